"""Speculation decisions: which requests get draft tokens, and how many."""
