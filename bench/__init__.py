"""Benchmarks, each one command: `serve` measures a URL, `versus_transformers` runs transformers beside us, others one part."""
