"""Frozen input and output records of the decisions."""
