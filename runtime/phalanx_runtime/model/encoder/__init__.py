"""Encoders: models with bidirectional attention, for embeddings, classes and scores."""
