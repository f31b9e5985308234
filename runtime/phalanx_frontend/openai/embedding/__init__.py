"""Embeddings of texts, and what is computed of them."""
