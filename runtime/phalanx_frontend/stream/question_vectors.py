"""How a causal language model embeds a question: the last token of a prompt that asks for its meaning in one word.

The mean over the hidden states of a chat model says more about the words of a question than about what it asks: near-misses are
nearer to a question than its paraphrases. The state from which the model would name the meaning separates them better, and lets
fewer unrelated texts come near; `python -m bench.router.answers --methods` compares both. Models that were trained for embeddings
have a pooling and instructions of their own, and need no prompt.

Source: Jiang et al. 2023, "Scaling Sentence Embeddings with Large Language Models" (PromptEOL).
"""

from phalanx_api import wire

POOLING: wire.Pooling = "last"
"""Of `prepare`'s texts."""


def prepare(text: str) -> str:
    """Returns the text to embed with `POOLING`, about ten tokens longer."""
    return f'This sentence: "{text}" means in one word: "'
