"""Device memory of a rank: the KV cache, and memory profiling."""
