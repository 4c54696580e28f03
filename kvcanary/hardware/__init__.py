"""Which machine and device computes here, what its driver says of it, and whether it has its turn to be watched."""
