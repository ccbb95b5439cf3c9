"""The job file: its keys, the kinds of values they take, and problems in words."""
