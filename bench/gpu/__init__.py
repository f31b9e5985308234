"""Figures about GPUs: a model of the limit of a step."""
