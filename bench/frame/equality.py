"""Whether a text is what the reference's tokens say, near-ties aside.

A near-tie: the tokens differ, and in the reference run the two best logits before that token are closer than 2e-5 standard
deviations of that step's logits. Comparison of that stream ends there. At most 1 + tokens / 2,000 near-ties in one
comparison, and at least 90 % of all tokens compared.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from tokenizers import Tokenizer

NEAR_TIE = 2e-5
_UNFINISHED = "\ufffd"


@dataclass(frozen=True, slots=True)
class Equality:
    """The outcome of one comparison of many streams. `different` names the streams that differ without excuse."""

    num_tokens: int
    num_compared: int
    num_near_ties: int
    different: list[str]

    @property
    def holds(self) -> bool:
        """Whether the streams are equal in the sense above."""
        few_ties = self.num_near_ties <= 1 + self.num_tokens / 2000
        return not self.different and few_ties and self.num_compared >= 0.9 * self.num_tokens


def first_difference(tokenizer: Tokenizer, text: str, reference: Sequence[int]) -> int | None:
    """Index of the first reference token that the text does not say, or None when it says them all and nothing more."""
    if text == tokenizer.decode(list(reference), skip_special_tokens=False):
        return None
    for index in range(len(reference)):
        said = tokenizer.decode(list(reference[: index + 1]), skip_special_tokens=False)
        if not text.startswith(said.rstrip(_UNFINISHED)):
            return index
    return len(reference) - 1


def compare(tokenizer: Tokenizer, texts: list[str], references: list[list[int]], gap_at: Callable[[int, int], float]) -> Equality:
    """Texts against reference tokens. `gap_at(stream, index)` is asked only where they differ."""
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


def together(outcomes: list[Equality]) -> Equality:
    """Several comparisons as one."""
    return Equality(
        sum(outcome.num_tokens for outcome in outcomes),
        sum(outcome.num_compared for outcome in outcomes),
        sum(outcome.num_near_ties for outcome in outcomes),
        [line for outcome in outcomes for line in outcome.different],
    )
