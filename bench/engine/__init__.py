"""Benchmarks of one runtime and of its parts."""
