"""Watching runs: read from their folders, shown in a terminal or a browser, reported to others."""
