"""Benchmarks of the runtime."""
