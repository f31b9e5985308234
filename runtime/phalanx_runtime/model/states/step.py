"""The requests of a step, and the groups in which a layer with states computes them."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class StepRows:
    """The requests of a step in packed order; parallel."""

    rows: Sequence[int]
    starts: Sequence[int]
    """Computed tokens of each row; at 0 its state is empty."""
    counts: Sequence[int]
    drafts: Sequence[int] = ()
    """How many of these are draft tokens, which may be taken back; empty: none."""


@dataclass(frozen=True, slots=True)
class TokenGroup:
    """Tokens that a layer computes in one call: as many of each row."""

    rows: tuple[int, ...]
    tokens: slice | Tensor
    """Their places in the step, row by row."""
    count: int
    """Tokens per row."""
    is_first: bool
    """The rows have no state yet."""
    ends: tuple[int, ...] = ()
    """Tokens in the states of the rows after the call."""

    def take(self, packed: Tensor) -> Tensor:
        """Returns the tokens of [1, tokens, ...] as [rows, count, ...]."""
        part = packed[0, self.tokens]
        return part.reshape(len(self.rows), self.count, *part.shape[1:])


def divide_step(step: StepRows, takes_chunks: bool) -> list[TokenGroup]:
    """Returns the groups of a step in the order of their computation.

    Single tokens after computed ones are one group. A chunk after computed tokens is computed token by token without
    `takes_chunks`, and if it has draft tokens, those of all requests together.
    """
    firsts, position = [], 0
    for count in step.counts:
        firsts.append(position)
        position += count
    drafts = step.drafts or [0] * len(step.rows)
    requests = list(zip(step.rows, step.starts, step.counts, firsts, drafts, strict=True))

    def is_whole(start: int, count: int, depth: int) -> bool:
        return start == 0 or (count > 1 and takes_chunks and not depth)

    groups = [
        TokenGroup((row,), slice(first, first + count), count, start == 0, (start + count,))
        for row, start, count, first, depth in requests
        if is_whole(start, count, depth)
    ]
    rest = [request for request in requests if not is_whole(request[1], request[2], request[4])]
    for index in range(max((count for _, _, count, _, _ in rest), default=0)):
        tokens = [(row, first + index, start + index + 1) for row, start, count, first, _ in rest if index < count]
        groups.append(_single_tokens(tokens))
    return groups


def _single_tokens(tokens: Sequence[tuple[int, int, int]]) -> TokenGroup:
    """tokens: (row, place, tokens in the state after it)."""
    rows, places, ends = zip(*tokens, strict=True)
    is_range = list(places) == list(range(places[0], places[0] + len(places)))
    span = slice(places[0], places[0] + len(places)) if is_range else torch.tensor(places)
    return TokenGroup(rows, span, 1, is_first=False, ends=ends)
