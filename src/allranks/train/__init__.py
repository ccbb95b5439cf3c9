"""The training that runs in every rank of a task."""
