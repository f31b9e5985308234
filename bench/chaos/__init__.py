"""Strikes pods, operators, nodes and the API server under load, and checks recovery."""
