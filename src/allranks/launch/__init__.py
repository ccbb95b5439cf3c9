"""From a job to running ranks, on this machine and elsewhere."""
