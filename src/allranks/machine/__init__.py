"""What this machine has: CPUs, GPUs, network, disks, processes, prices."""
