"""What a cache with all paraphrases would answer: the k nearest stored texts, of which the first serves that passes the guard."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from bench.router.answers.pairs import Pair
from bench.router.answers.vectors import Vectors


@dataclass(frozen=True, slots=True)
class Lookups:
    """Outcomes of one lookup per text."""

    right: int
    wrong: int
    answerable: int
    """Lookups of texts with a stored paraphrase."""


def look_up(
    pairs: Sequence[Pair],
    vectors: Mapping[str, Vectors],
    is_alike: Callable[[str, str], bool],
    *,
    nearest: int,
    threshold: float,
) -> Lookups:
    """Looks up each text among the paraphrases of all families, itself excepted. A near-miss has no right answer."""
    families = {text: pair.family for pair in pairs if pair.is_same for text in (pair.asked, pair.stored)}
    stored = list(families)
    matrix = np.array([vectors[text] for text in stored])
    queries = dict.fromkeys(text for pair in pairs for text in (pair.asked, pair.stored))
    right = wrong = 0
    for query in queries:
        cosines = matrix @ vectors[query]
        order = [int(at) for at in np.argsort(-cosines)[: nearest + 1] if stored[at] != query][:nearest]
        found = next((at for at in order if cosines[at] >= threshold and is_alike(query, stored[at])), None)
        if found is not None:
            is_right = families.get(query) == families[stored[found]]
            right, wrong = right + is_right, wrong + (not is_right)
    return Lookups(right, wrong, len(stored))
