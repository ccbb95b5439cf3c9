"""One run on disk: its folder, events, claims, commits, and what became of it."""
