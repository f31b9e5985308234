"""Every causal model class of `transformers`, tried: what works through its own attention, what is refused, and why."""
