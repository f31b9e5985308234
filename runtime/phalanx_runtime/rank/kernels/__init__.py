"""The Triton kernels of a rank: which variants its model uses, and their compilation before it serves."""
