"""The command line: what was typed, parsed, passed on, printed."""
