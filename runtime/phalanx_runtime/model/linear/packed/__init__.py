"""Weights in the order of kernels on GPUs: their formats, how they are packed, and the reference of products with them."""
