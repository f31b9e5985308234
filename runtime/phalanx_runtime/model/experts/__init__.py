"""Mixtures of experts in the fused decoder: the torch reference implementation, and the kernels of GPUs."""
