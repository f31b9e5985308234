"""KV transfer between the ranks of two groups."""
