"""Samples draft tokens with the request's sampling parameters and state, continued by the draft tokens before them."""

from collections.abc import Mapping, Sequence, Set
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.rank.sampling.filters import Draw
from phalanx_runtime.rank.sampling.gumbel import RankedTokens, sample, sample_ranked
from phalanx_runtime.rank.sampling.logits_processors import process_logits
from phalanx_runtime.rank.sampling.row import SamplingRow


@dataclass(frozen=True, slots=True)
class DraftPosition:
    """Position of a draft token: after the draft tokens `branch`."""

    row: int
    draw: Draw
    branch: tuple[int, ...] = ()


class DraftSampler:
    """Samples the draft tokens of one step. `rows`: state before the step."""

    def __init__(self, rows: Mapping[int, SamplingRow]) -> None:
        self._rows = rows
        self._copies: dict[tuple[int, tuple[int, ...]], SamplingRow] = {}

    def sample(self, logits: Tensor, positions: Sequence[DraftPosition], count: int = 1) -> list[RankedTokens]:
        """Returns `count` tokens per position, the sampled one first; empty if no token can be sampled.

        logits: [positions, vocabulary], raw. A single token has log share 0.
        """
        logits, excluded = self.process(logits, positions)
        draws = [position.draw for position in positions]
        if count > 1:
            ranked = sample_ranked(logits, draws, count)
        else:
            ranked = [RankedTokens([token], [0.0]) for token in sample(logits, draws)]
        return [RankedTokens([], []) if at in excluded else tokens for at, tokens in enumerate(ranked)]

    def process(self, logits: Tensor, positions: Sequence[DraftPosition]) -> tuple[Tensor, Set[int]]:
        """Returns processed logits, and the positions without possible tokens. logits: [positions, vocabulary], unchanged."""
        rows = [self._row(position.row, position.branch) for position in positions]
        special = [at for at, row in enumerate(rows) if row.needs_processing(positions[at].draw.index)]
        if not special:
            return logits, frozenset()
        processed = process_logits(logits, rows, special, [positions[at].draw.index for at in special])
        for at in processed.failed:
            processed.logits[processed.places[at]] = -torch.inf
        merged = logits.to(processed.logits.dtype, copy=True)
        return merged.index_copy_(0, torch.tensor(special, device=logits.device), processed.logits), processed.failed.keys()

    def _row(self, number: int, branch: tuple[int, ...]) -> SamplingRow:
        row = self._copies.get((number, branch))
        if row is None:
            row = _after(self._row(number, branch[:-1]), branch[-1]) if branch else self._rows[number].copy()
            self._copies[number, branch] = row
        return row


def _after(row: SamplingRow, token: int) -> SamplingRow:
    if not row.has_state:
        return row
    clone = row.copy()
    clone.append(token)
    return clone
