"""The job file: its keys, the values they take, and the messages about wrong ones."""
