"""The fused decoder of Llama-shaped models."""
