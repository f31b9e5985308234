"""KV cache and memory profiling."""
