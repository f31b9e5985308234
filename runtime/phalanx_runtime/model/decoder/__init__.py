"""The fused decoder block of the Llama-shaped families, and how its weights load."""
