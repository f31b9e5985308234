"""Shared parts of benchmarks: figures, verdicts and tables; programs, clients and prompts."""
