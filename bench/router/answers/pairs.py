"""Labelled pairs of texts: paraphrases, which one answer serves, and near-misses, which need another answer.

`families.txt` has families of seven texts, separated by blank lines and written for this bench: `@` names the domain, `=` starts
three texts with one answer, `!` four near-misses with the kind of the difference. The paraphrases of a family make three pairs;
near-miss i makes one with paraphrase i, the fourth with the first one. The first two mostly change few words of theirs, the third
is mostly worded differently, the fourth narrows the question (a few replace another thing). The guard was tuned on the
first families; the last 135 were written after that and not used to change it.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import combinations
from pathlib import Path
from typing import Literal

FAMILIES = Path(__file__).with_name("families.txt")
NUM_TUNING = 568
"""Families that the guard was tuned on."""
Part = Literal["tuning", "held-out"]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two texts, and whether one answer serves both."""

    family: int
    domain: str
    kind: str
    """Of the difference; `paraphrase` without one."""

    asked: str
    stored: str

    @property
    def is_same(self) -> bool:
        return self.kind == "paraphrase"

    @property
    def part(self) -> Part:
        return "tuning" if self.family < NUM_TUNING else "held-out"


def read_pairs(text: str | None = None) -> tuple[Pair, ...]:
    """Returns the pairs of all families, in order. Raises ValueError for a family of another shape."""
    families = (FAMILIES.read_text() if text is None else text).strip().split("\n\n")
    return tuple(pair for number, lines in enumerate(families) for pair in _family_pairs(number, lines.splitlines()))


def texts_of(pairs: Sequence[Pair]) -> tuple[str, ...]:
    """Returns each text once, in order of appearance."""
    return tuple(dict.fromkeys(text for pair in pairs for text in (pair.asked, pair.stored)))


def _family_pairs(number: int, lines: list[str]) -> Iterator[Pair]:
    head, same, near = lines[0], lines[1:4], lines[4:]
    marks = [line[:2] for line in lines]
    if marks != ["@ ", *["= "] * 3, *["! "] * 4]:
        raise ValueError(f"family {number} ({head}): expected a domain, three paraphrases and four near-misses")
    for first, second in combinations(same, 2):
        yield Pair(number, head[2:], "paraphrase", first[2:], second[2:])
    for stored, line in zip((*same, same[0]), near, strict=True):
        kind, _, asked = line[2:].partition(" ")
        yield Pair(number, head[2:], kind, asked, stored[2:])
