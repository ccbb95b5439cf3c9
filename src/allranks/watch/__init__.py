"""Runs as they go: read from their folders, shown in a terminal or a browser, told to others."""
