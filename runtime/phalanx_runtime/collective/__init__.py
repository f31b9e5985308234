"""Sums and gathers between the ranks of a group, behind one Protocol."""
