"""Tensors of a step, and pipeline stages."""
