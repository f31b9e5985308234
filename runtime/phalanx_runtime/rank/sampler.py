"""Draws the tokens of a step on the rank that draws, and keeps for each row what its next draw depends on.

The order, for each row alone:

    raw scores ------------------------------------> logprobs
        -> masks: grammar, allowed tokens, bad words, ends before min_tokens
        -> bias -> repetition, then frequency and presence penalty
        -> / temperature -> top-k -> top-p -> min-p -> Gumbel noise -> argmax

All of it follows from the request's tokens. Rows that ask for none of it are drawn from the raw scores, without state.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

import msgspec
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.plan import NewRow
from phalanx_runtime.rank.changes import Changed, change
from phalanx_runtime.rank.gaps import gap
from phalanx_runtime.rank.grammar import Grammars
from phalanx_runtime.rank.logprobs import token_details
from phalanx_runtime.rank.row import COMPLETE, Row
from phalanx_runtime.rank.sampling import Draw, draw

MIN_TEMPERATURE = 1e-5
"""A lower one is greedy, as in vLLM: scores divided by it could pass what float32 holds."""


@dataclass(frozen=True, slots=True)
class Drawn:
    """Tokens parallel to what was asked; details too, or empty.

    `ended`, `failed` and `over` name positions: complete by their grammar, not drawn for the reason told (the token there is
    none), and not drawn because the grammar was complete before.
    """

    tokens: list[int]
    details: list[wire.TokenDetail | None] = field(default_factory=list)
    ended: list[int] = field(default_factory=list)
    failed: list[tuple[int, str]] = field(default_factory=list)
    over: list[int] = field(default_factory=list)


class Sampler:
    """The rows, on the rank that draws. `grammars` None fails requests that have one."""

    def __init__(self, vocab_size: int, grammars: Grammars | None = None) -> None:
        self.vocab_size = vocab_size
        self.grammars = grammars
        self._rows: dict[int, Row] = {}

    def admit(self, new: NewRow) -> None:
        """Starts a row anew."""
        self._rows[new.row] = Row(new, self.vocab_size, self.grammars)

    def draw(self, scores: Tensor, asked: Sequence[tuple[int, int]]) -> Drawn:
        """The next token of each (row, output index). scores: [asked, vocabulary], raw; they stay as they are."""
        rows = [self._rows[row] for row, _ in asked]
        draws = [_draw_of(row.sampling, index) for row, (_, index) in zip(rows, asked, strict=True)]
        special = [at for at, row in enumerate(rows) if row.is_special(draws[at].index)]
        changed = change(scores, rows, special, [draws[at].index for at in special]) if special else None
        tokens = _draw(scores, draws, changed)
        if changed is None:
            return Drawn(tokens, _details(scores, rows, draws, tokens, None))
        drawn = [at for at in special if at not in changed.failed]
        return Drawn(
            tokens,
            _details(scores, rows, draws, tokens, changed),
            ended=[at for at in drawn if rows[at].has_state and rows[at].drew(tokens[at])],
            failed=[(at, why) for at, why in changed.failed.items() if why != COMPLETE],
            over=[at for at, why in changed.failed.items() if why == COMPLETE],
        )


def _draw_of(s: wire.Sampling, index: int) -> Draw:
    temperature = s.temperature if s.temperature >= MIN_TEMPERATURE else 0.0
    return Draw(s.seed, index, temperature, s.top_p, s.top_k, s.min_p)


def _draw(scores: Tensor, draws: Sequence[Draw], changed: Changed | None) -> list[int]:
    """Plain rows from the raw scores, special rows from theirs."""
    if changed is None:
        return draw(scores, draws)
    tokens = [0] * len(draws)
    if len(changed.places) < len(draws):
        tokens = draw(scores, [None if at in changed.places else one for at, one in enumerate(draws)])
    wanted = [None if at in changed.failed else draws[at] for at in changed.places]
    for at, token in zip(changed.places, draw(changed.scores, wanted), strict=True):
        tokens[at] = token
    return tokens


def _details(
    raw: Tensor, rows: Sequence[Row], draws: Sequence[Draw], tokens: Sequence[int], changed: Changed | None
) -> list[wire.TokenDetail | None]:
    """What was asked about the drawn tokens; empty when nobody asked."""
    asked = [at for at, row in enumerate(rows) if row.sampling.logprobs is not None or row.sampling.return_gaps]
    if not asked:
        return []
    details: list[wire.TokenDetail | None] = [None] * len(rows)
    tops = [rows[at].sampling.logprobs or 0 for at in asked]
    for at, detail in zip(asked, token_details(raw, [tokens[at] for at in asked], tops, asked), strict=True):
        details[at] = detail
        if rows[at].sampling.return_gaps:
            scores = raw[at] if changed is None or at not in changed.places else changed.scores[changed.places[at]]
            details[at] = msgspec.structs.replace(detail, gap=gap(raw[at], scores, draws[at]))
    return details
