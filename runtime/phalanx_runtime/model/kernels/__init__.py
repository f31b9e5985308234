"""Triton kernels as a finite list: variants, launches, and the cache of an image."""
