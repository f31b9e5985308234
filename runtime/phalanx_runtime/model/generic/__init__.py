"""Level 0: any causal language model of `transformers`, around our paged attention. Ranks of fused models never import this."""
