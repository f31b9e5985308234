"""Whether two runs gave equal tokens, near-ties aside: the rule of the design, as a pure comparison.

A near-tie: the tokens differ and, in the reference run, the gap that decided the token (best two scores, or winner to a cut) is
under 2e-5 standard deviations of that step's logits / T. The comparison of that stream ends there. At most 1 + tokens / 2,000
near-ties in one comparison, and at least 90 % of all tokens compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass

NEAR_TIE = 2e-5


@dataclass(frozen=True, slots=True)
class Stream:
    """One reference stream: its tokens, and for each the gap in standard deviations."""

    tokens: Sequence[int]
    gaps: Sequence[float]


@dataclass(frozen=True, slots=True)
class Equality:
    """The outcome. `different` holds (stream, index) of each token that differs without excuse."""

    num_tokens: int
    num_compared: int
    num_near_ties: int
    different: list[tuple[int, int]]

    @property
    def holds(self) -> bool:
        """Whether the runs are equal."""
        few = self.num_near_ties <= 1 + self.num_tokens / 2000
        return not self.different and few and self.num_compared >= 0.9 * self.num_tokens


def compare(reference: Sequence[Stream], outputs: Sequence[Sequence[int]]) -> Equality:
    """Outputs against the reference streams. A shorter or longer output differs at its end."""
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
    """Index of the first token that differs, the shorter length if one ends early, None if they are the same."""
    for index, (ours, theirs) in enumerate(zip(reference, output, strict=False)):
        if ours != theirs:
            return index
    return None if len(reference) == len(output) else min(len(reference), len(output))
