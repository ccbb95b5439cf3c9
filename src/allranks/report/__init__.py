"""Compare runs: did it scale, why not, and was it worth the GPU-hours?"""
