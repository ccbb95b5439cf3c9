"""Where runs execute: one file or folder for each kind of place."""
