"""Benchmarks of moves."""
