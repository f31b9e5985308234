"""Labelled pairs of texts: paraphrases, which one answer serves, and near-misses, which need another answer.

A file has families of seven texts, separated by blank lines and written for this bench: `@` names the domain, `=` starts three
texts with one answer, `!` four near-misses with the kind of the difference. The paraphrases of a family make three pairs with
each other. Near-misses 1 to 3 make a pair with the paraphrase of their number, near-miss 4 with paraphrase 1. Mostly, 1 and 2
change few words, 3 is worded differently, and 4 narrows the question. The guard was tuned on `families.txt`, and not changed for
any result of `held_out.txt`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

Part = Literal["tuning", "held-out"]
FILES: Mapping[Part, Path] = {
    "tuning": Path(__file__).with_name("families.txt"),
    "held-out": Path(__file__).with_name("held_out.txt"),
}


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts, and whether one answer serves both."""

    family: int
    domain: str
    kind: str
    """Of the difference; `paraphrase` without one."""

    asked: str
    stored: str
    part: Part = "tuning"

    @property
    def is_same(self) -> bool:
        return self.kind == "paraphrase"


def read_pairs(texts: Mapping[Part, str] | None = None) -> tuple[Pair, ...]:
    """Returns the pairs of all families, in order; of the files by default. Raises ValueError for a family of another shape."""
    texts = {part: path.read_text() for part, path in FILES.items()} if texts is None else texts
    families = [(part, family) for part, text in texts.items() for family in text.strip().split("\n\n")]
    return tuple(pair for at, (part, family) in enumerate(families) for pair in _family_pairs(at, part, family.splitlines()))


def texts_of(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """Returns each text once, in order of appearance."""
    return tuple(dict.fromkeys(text for pair in pairs for text in (pair.asked, pair.stored)))


def _family_pairs(number: int, part: Part, lines: list[str]) -> Iterator[Pair]:
    head, same, near = lines[0], lines[1:4], lines[4:]
    marks = [line[:2] for line in lines]
    if marks != ["@ ", *["= "] * 3, *["! "] * 4]:
        raise ValueError(f"family {number} ({head}): expected a domain, three paraphrases and four near-misses")
    for first, second in combinations(same, 2):
        yield Pair(number, head[2:], "paraphrase", first[2:], second[2:], part)
    for stored, line in zip((*same, same[0]), near, strict=True):
        kind, _, asked = line[2:].partition(" ")
        yield Pair(number, head[2:], kind, asked, stored[2:], part)
