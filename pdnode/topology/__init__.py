"""What this host has: GPUs, NICs, NUMA nodes, and which of them belong together. No torch."""
