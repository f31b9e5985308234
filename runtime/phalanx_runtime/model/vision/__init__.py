"""Vision towers: images become embeddings of placeholder tokens."""
