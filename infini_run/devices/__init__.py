"""The accelerators of this machine: which there are, which are free, and which CPUs are near to them."""
