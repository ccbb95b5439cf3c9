"""From one GPU to many, with the speedup measured, not guessed."""

__version__ = "0.1.0"
