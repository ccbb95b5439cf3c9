"""Runs on SLURM clusters: sent, raced, started on their nodes, kept going."""
