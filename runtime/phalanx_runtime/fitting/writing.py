"""Text that a model writes itself, and its hidden states on the way.

Rows write side by side, one token a step, each from a beginning to an end token or to the longest length; then the row begins
another text. Tokens are drawn as everywhere, with noise that is keyed by seed and index: the same seed gives the same texts.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import count

import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.core.step_plan import NewRow, StepPlan
from phalanx_runtime.model.decoder.decoder import Decoder
from phalanx_runtime.rank.memory.kv_cache import make_caches
from phalanx_runtime.rank.sampling.draw import Draw, draw
from phalanx_runtime.rank.step.batch import BatchBuilder, CacheShape

PAGE_SIZE = 16
ROWS = 32
"""Texts written at once. More read the weights less often, and need more memory for keys and values."""
LONGEST = 256
"""Tokens of a text."""


@dataclass(frozen=True, slots=True)
class Step:
    """One token of each of some texts.

    texts: the number of each text. early, late: [texts, hidden], states after the first layers and before the final norm.
    best: [texts], the token that the model finds most probable next.
    """

    texts: list[int]
    early: Tensor
    late: Tensor
    best: Tensor


@dataclass(slots=True)
class _Text:
    number: int
    tokens: list[int]
    computed: int = 0
    pages: list[int] = field(default_factory=list)


class Writer:
    """Writes texts with a whole model on one rank. `beginnings` are taken in turn; `ends` are the tokens that end a text."""

    def __init__(
        self, model: Decoder, form_of: tuple[torch.dtype, torch.device], beginnings: Sequence[list[int]], ends: frozenset[int]
    ) -> None:
        dtype, device = form_of
        self._model = model
        self._beginnings = beginnings
        self._ends = ends
        self._longest = min(LONGEST, model.positions)
        self._pages = -(-self._longest // PAGE_SIZE)
        self._caches = make_caches(model.kv, ROWS * self._pages, PAGE_SIZE, dtype, device)
        self._builder = BatchBuilder(CacheShape(PAGE_SIZE, model.kv.kv_heads, 1 << 16), dtype, device)

    @torch.inference_mode()
    def steps(self, num_layers: int, seed: int, temperature: float) -> Iterator[Step]:
        """Step after step, for ever. `num_layers` says after which layer the early states are taken.

        The first token of a text is told in no step: its state is like no other's, and no draft begins there.
        """
        numbers = count()
        rows = [self._begin(next(numbers)) for _ in range(ROWS)]
        for step in count():
            drawn = [text.computed >= len(text.tokens) - 1 for text in rows]
            batch = self._builder.build(self._plan(step, rows))
            early, late = self._model.states(batch, self._caches, [num_layers, len(self._model.layers)])
            scores = self._model.state_scores(late)
            best = scores.argmax(-1)
            told = [at for at, text in enumerate(rows) if text.computed > 0]
            if told:
                at = torch.tensor(told, device=late.device)
                yield Step([rows[i].number for i in told], early[at], late[at], best[at])
            tokens = draw(scores, [Draw(_mixed(seed, text.number), len(text.tokens), temperature) for text in rows])
            for place, (text, token) in enumerate(zip(rows, tokens, strict=True)):
                text.computed += 1
                if drawn[place]:
                    text.tokens.append(token)
                if drawn[place] and (token in self._ends or len(text.tokens) >= self._longest):
                    rows[place] = self._begin(next(numbers))

    def _begin(self, number: int) -> _Text:
        return _Text(number, self._beginnings[number % len(self._beginnings)][: self._longest - 1])

    def _plan(self, step: int, rows: list[_Text]) -> StepPlan:
        """The next token of each text: drawn ones, or the next of its beginning."""
        fresh = [row for row, text in enumerate(rows) if text.computed == 0]
        return StepPlan(
            step,
            [NewRow(row, wire.Sampling(1, 0)) for row in fresh],
            list(range(len(rows))),
            [text.computed for text in rows],
            [1] * len(rows),
            [list(range(row * self._pages, (row + 1) * self._pages)) if row in fresh else [] for row in range(len(rows))],
            [text.tokens[text.computed] for text in rows],
            [(row, 0) for row in range(len(rows))],
        )


def _mixed(seed: int, text: int) -> int:
    return seed * 1_000_003 + text
