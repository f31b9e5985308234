"""Benchmarks of speculation."""
