"""Chaos: `python -m bench.chaos` strikes pods, operators, nodes and the API server under load, and watches."""
