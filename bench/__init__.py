"""Benchmarks: one command for each; docs/benchmarks.md lists them."""
