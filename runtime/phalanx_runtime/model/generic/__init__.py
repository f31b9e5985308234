"""Models of `transformers` with paged attention."""
