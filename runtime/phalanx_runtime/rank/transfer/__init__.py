"""KV transfer: page copies between the ranks of two groups."""
