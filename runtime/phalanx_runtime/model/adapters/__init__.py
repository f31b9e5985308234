"""LoRA adapters: their factors in slots, and what they add to linears."""
