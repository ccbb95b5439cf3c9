"""What a machine and a job on it really do: benchmarks, each in run folders of its own."""
