"""Measurements: what the hardware and the training on it really do."""
