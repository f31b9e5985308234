"""Weights as checkpoints store them."""
