"""SLURM: its commands, messages and queue, and what a cluster has."""
