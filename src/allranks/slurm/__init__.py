"""SLURM's commands, words and queue, and what a cluster has."""
