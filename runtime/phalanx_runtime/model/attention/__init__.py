"""Paged attention: the torch reference implementation, and the kernels of CPUs and GPUs."""
