"""Sampling: logits processors, keyed noise, verification of draft tokens, grammars, logprobs."""
