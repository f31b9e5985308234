"""Eviction policies of the prefix cache, behind one protocol."""
