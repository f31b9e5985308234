"""Linear layers: the torch reference implementation and the CPU kernels."""
