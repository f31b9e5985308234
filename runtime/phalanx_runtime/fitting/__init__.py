"""Fits the self-draft exit of a model, as a separate program."""
