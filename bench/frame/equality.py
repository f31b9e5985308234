"""Compares texts with the tokens of a reference run, except for near-ties.

Near-tie: the tokens differ, and before that token the reference's two best logits are closer than 2e-5 standard deviations of
that step's logits. Comparison of that stream ends there. Allowed are 1 + tokens / 2,000 near-ties per comparison; at least 90 %
of all tokens must be compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

NEAR_TIE = 2e-5
_UNFINISHED = "\ufffd"


@dataclass(frozen=True, slots=True)
class Equality:
    num_tokens: int
    num_compared: int
    num_near_ties: int
    different: list[str]
    """One line for each stream that differs without a near-tie."""

    @property
    def holds(self) -> bool:
        """Whether no stream differs, near-ties are few and enough tokens were compared."""
        has_few_ties = self.num_near_ties <= 1 + self.num_tokens / 2000
        return not self.different and has_few_ties and self.num_compared >= 0.9 * self.num_tokens


def first_difference(tokenizer: Tokenizer, text: str, reference: Sequence[int]) -> int | None:
    """Returns the index of the first reference token that `text` does not contain; `None` if both are equal.

    A text that is longer than the reference differs at its last token.
    """
    if text == tokenizer.decode(list(reference), skip_special_tokens=False):
        return None
    for index in range(len(reference)):
        prefix = tokenizer.decode(list(reference[: index + 1]), skip_special_tokens=False)
        if not text.startswith(prefix.rstrip(_UNFINISHED)):
            return index
    return len(reference) - 1


def compare(tokenizer: Tokenizer, texts: list[str], references: list[list[int]], gap_at: Callable[[int, int], float]) -> Equality:
    """Compares texts with reference tokens.

    `gap_at(stream, index)` returns the reference's logit gap; it runs only where a stream differs.
    """
    compared, ties, different = 0, 0, []
    for stream, (text, reference) in enumerate(zip(texts, references, strict=True)):
        index = first_difference(tokenizer, text, reference)
        compared += len(reference) if index is None else index
        if index is None:
            continue
        gap = gap_at(stream, index)
        if gap < NEAR_TIE:
            ties += 1
        else:
            different.append(f"stream {stream}, token {index}: the reference's gap is {gap:.2g} standard deviations")
    return Equality(sum(map(len, references)), compared, ties, different)


def merge(outcomes: list[Equality]) -> Equality:
    return Equality(
        sum(outcome.num_tokens for outcome in outcomes),
        sum(outcome.num_compared for outcome in outcomes),
        sum(outcome.num_near_ties for outcome in outcomes),
        [line for outcome in outcomes for line in outcome.different],
    )
