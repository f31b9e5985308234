"""Paged attention: the torch reference implementation and the CPU kernels."""
