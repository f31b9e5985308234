"""Parts that benchmarks share: figures, pairs and tables; programs, clients and prompts."""
