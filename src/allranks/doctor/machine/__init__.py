"""Is this machine, or this allocation, fit to train: facts, checks of them, and what to type."""
