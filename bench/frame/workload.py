"""Seeded prompts: words that nearly every vocabulary encodes as one token, or exact token ids."""

import random
from pathlib import Path

from tokenizers import Tokenizer

_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which you were"
    " her all she there would their we him been has when who will more no if out so said what up its about into than them can"
    " only other new some could time these two may then do first any my now such like our over man me even most made after also"
    " did many before must through back years where much your way well down should because each just those people how too little"
    " state good very make world still own see men work long get here between both life being under never day same another know"
    " while last might us great old year off come since against go came right used take three"
).split()


def words(rng: random.Random, count: int) -> str:
    """Returns a random text of about `count` tokens."""
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def texts(seed: int, num_prompts: int, shortest: int, longest: int) -> list[str]:
    """Returns prompts of mixed length in words."""
    rng = random.Random(seed)
    return [words(rng, rng.randint(shortest, longest)) for _ in range(num_prompts)]


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
