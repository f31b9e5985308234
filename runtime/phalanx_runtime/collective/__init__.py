"""Collective operations between the ranks of a group."""
