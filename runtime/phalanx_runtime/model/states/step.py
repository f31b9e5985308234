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

    def take(self, packed: Tensor) -> Tensor:
        """Returns the tokens of [1, tokens, ...] as [rows, count, ...]."""
        part = packed[0, self.tokens]
        return part.reshape(len(self.rows), self.count, *part.shape[1:])


def divide_step(step: StepRows, takes_chunks: bool) -> list[TokenGroup]:
    """Returns the groups of a step in the order of their computation.

    Single tokens after computed ones are one group. Without `takes_chunks` a chunk after computed tokens is computed token by
    token, those of all requests together.
    """
    firsts, position = [], 0
    for count in step.counts:
        firsts.append(position)
        position += count
    requests = list(zip(step.rows, step.starts, step.counts, firsts, strict=True))
    groups = [
        TokenGroup((row,), slice(first, first + count), count, start == 0)
        for row, start, count, first in requests
        if start == 0 or (count > 1 and takes_chunks)
    ]
    rest = [request for request in requests if request[1] and (request[2] == 1 or not takes_chunks)]
    for index in range(max((count for _, _, count, _ in rest), default=0)):
        tokens = [(row, first + index) for row, _, count, first in rest if index < count]
        groups.append(_single_tokens(tokens))
    return groups


def _single_tokens(tokens: Sequence[tuple[int, int]]) -> TokenGroup:
    places = [place for _, place in tokens]
    is_range = places == list(range(places[0], places[0] + len(places)))
    span = slice(places[0], places[0] + len(places)) if is_range else torch.tensor(places)
    return TokenGroup(tuple(row for row, _ in tokens), span, 1, is_first=False)
