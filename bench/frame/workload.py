"""Seeded prompts: words that nearly every vocabulary encodes as one token, or exact token ids."""

import random
from pathlib import Path

from tokenizers import Tokenizer

from phalanx_runtime.terminal.load import texts as texts
from phalanx_runtime.terminal.load import words as words


def token_ids(folder: Path, seed: int, lengths: list[int]) -> list[list[int]]:
    """Returns prompts of exactly these lengths in tokens of the folder's tokenizer."""
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    rng = random.Random(seed)
    return [tokenizer.encode(words(rng, 2 * length), add_special_tokens=False).ids[:length] for length in lengths]


def spread_lengths(num_prompts: int, shortest: int, longest: int) -> list[int]:
    """Returns lengths evenly spread from shortest to longest, shuffled."""
    step = (longest - shortest) / max(1, num_prompts - 1)
    lengths = [round(shortest + step * index) for index in range(num_prompts)]
    random.Random(0).shuffle(lengths)
    return lengths
