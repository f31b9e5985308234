"""Level 0: any causal language model of `transformers` with paged attention. Ranks of fused models never import this."""
