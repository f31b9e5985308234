"""Compares the tokens of two runs, except after near-ties.

A near-tie: the tokens differ, and the deciding gap of the reference (best two logits, or winner to a cut) is under 2e-5 standard
deviations of that step's logits / T. The comparison of that stream ends there. At most 1 + tokens / 2,000 near-ties, and at least
90 % of all tokens compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NEAR_TIE = 2e-5


@dataclass(frozen=True, slots=True)
class Stream:
    """A reference stream: tokens, and the gap of each in standard deviations."""

    tokens: Sequence[int]
    gaps: Sequence[float]


@dataclass(frozen=True, slots=True)
class Equality:
    """Result. `different`: (stream, index) of each difference that is no near-tie."""

    num_tokens: int
    num_compared: int
    num_near_ties: int
    different: list[tuple[int, int]]

    @property
    def holds(self) -> bool:
        """Whether the runs are equal."""
        has_few_ties = self.num_near_ties <= 1 + self.num_tokens / 2000
        return not self.different and has_few_ties and self.num_compared >= 0.9 * self.num_tokens


def compare(reference: Sequence[Stream], outputs: Sequence[Sequence[int]]) -> Equality:
    """Compares outputs with reference streams. Another length is a difference."""
    compared, ties, different = 0, 0, []
    for number, (stream, output) in enumerate(zip(reference, outputs, strict=True)):
        index = first_difference(stream.tokens, output)
        compared += len(stream.tokens) if index is None else index
        if index is None:
            continue
        if index < min(len(stream.tokens), len(output)) and stream.gaps[index] < NEAR_TIE:
            ties += 1
        else:
            different.append((number, index))
    return Equality(sum(len(stream.tokens) for stream in reference), compared, ties, different)


def first_difference(reference: Sequence[int], output: Sequence[int]) -> int | None:
    """Returns the index of the first difference, the shorter length if one ends early, None if equal."""
    for index, (expected, actual) in enumerate(zip(reference, output, strict=False)):
        if expected != actual:
            return index
    return None if len(reference) == len(output) else min(len(reference), len(output))
