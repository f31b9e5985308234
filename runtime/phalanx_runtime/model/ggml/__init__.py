"""Weights as GGUF files have them: bytes of blocks, their codes and scales, and what GPU kernels read of them."""
