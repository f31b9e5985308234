"""Benchmarks of the KV cache."""
