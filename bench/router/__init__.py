"""Benchmarks of the router and the API server."""
