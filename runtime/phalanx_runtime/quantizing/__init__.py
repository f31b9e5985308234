"""Quantises a checkpoint, as a separate program."""
