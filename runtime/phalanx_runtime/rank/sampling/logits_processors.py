"""Logits processors: masks, bias, penalties, in the order of vLLM.

repetition r (prompt and output)         logit / r if positive, else logit * r      (CTRL, Keskar et al. 2019)
frequency f and presence p (output)      logit - f * count - p if count > 0         (OpenAI API)
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx_api import wire
from phalanx_frontend.text.grammar import GrammarError
from phalanx_runtime.rank.sampling.row import SamplingRow, TokenCounts

NOTHING_LEFT = "no token can be sampled: grammar, allowed_token_ids, bad_words and min_tokens together exclude every token"


@dataclass(frozen=True, slots=True)
class ProcessedLogits:
    """Processed logits of some rows of a step."""

    logits: Tensor
    places: dict[int, int]
    """Row by position in the step."""
    failed: dict[int, str]
    """Reason by position."""


def process_logits(raw: Tensor, rows: Sequence[SamplingRow], special: Sequence[int], indices: Sequence[int]) -> ProcessedLogits:
    """Processes the rows at the positions `special`, which sample these output indices, in float32 or wider.

    raw: [rows, vocabulary], unchanged.
    """
    part = raw.index_select(0, torch.tensor(special, device=raw.device))
    logits = part if part.dtype == torch.float64 else part.float()
    chosen = [rows[position] for position in special]
    _apply_masks(logits, chosen)
    has_failed = [row.failure is not None for row in chosen]
    _exclude(
        logits,
        [
            [] if failed else row.bans.banned(row.tokens or (), index)
            for row, index, failed in zip(chosen, indices, has_failed, strict=True)
        ],
    )
    for row, is_empty in zip(chosen, (logits.amax(1) == -torch.inf).tolist(), strict=True):
        row.failure = row.failure or (NOTHING_LEFT if is_empty else None)
    _add_bias(logits, [{} if failed else row.sampling.logit_bias for row, failed in zip(chosen, has_failed, strict=True)])
    penalised = [(place, row.counts, row.sampling) for place, row in enumerate(chosen) if row.counts is not None]
    if penalised:
        places, counts, samplings = zip(*penalised, strict=True)
        apply_penalties(logits, places, counts, samplings)
    reasons = {position: row.failure for position, row in zip(special, chosen, strict=True) if row.failure is not None}
    return ProcessedLogits(logits, {position: place for place, position in enumerate(special)}, reasons)


def apply_penalties(
    logits: Tensor, rows: Sequence[int], counts: Sequence[TokenCounts], samplings: Sequence[wire.Sampling]
) -> None:
    """Applies penalties in place. logits: [n, vocabulary]; the sequences are parallel."""
    sizes = [len(row.ids) for row in counts]
    at = _tensor(np.repeat(np.asarray(rows, np.int64), sizes), logits.device)
    ids = _tensor(np.concatenate([row.ids for row in counts]), logits.device)
    output_counts = _tensor(np.concatenate([row.counts for row in counts]), logits.device).to(logits.dtype)

    def spread(values: list[float]) -> Tensor:
        return _tensor(np.repeat(values, sizes), logits.device).to(logits.dtype)

    repetition = spread([sampling.repetition_penalty for sampling in samplings])
    frequency = spread([sampling.frequency_penalty for sampling in samplings])
    presence = spread([sampling.presence_penalty for sampling in samplings])
    own = logits[at, ids]
    own = torch.where(own > 0, own / repetition, own * repetition)
    logits[at, ids] = own - frequency * output_counts - presence * (output_counts > 0)


def _apply_masks(logits: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Applies grammars and allowed tokens. A grammar error fails its row."""
    for place, row in enumerate(rows):
        if row.matcher is not None and row.failure is None:
            try:
                allowed = torch.from_numpy(row.matcher.allowed()).to(logits.device)
            except GrammarError as error:
                row.failure = f"grammar: {error}"
                continue
            logits[place].masked_fill_(~allowed, -torch.inf)
        if row.bans.allowed is not None and row.failure is None:
            banned = torch.ones(logits.shape[1], dtype=torch.bool, device=logits.device)
            banned[torch.tensor(row.bans.allowed, dtype=torch.int64, device=logits.device)] = False
            logits[place].masked_fill_(banned, -torch.inf)


def _exclude(logits: Tensor, banned: Sequence[Sequence[int]]) -> None:
    if any(banned):
        at, ids = _flatten(banned, logits.device)
        logits[at, ids] = -torch.inf


def _add_bias(logits: Tensor, biases: Sequence[dict[int, float]]) -> None:
    if any(biases):
        at, ids = _flatten([list(bias) for bias in biases], logits.device)
        values = [value for bias in biases for value in bias.values()]
        logits[at, ids] += torch.tensor(values, dtype=logits.dtype, device=logits.device)


def _flatten(ids: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    rows = np.repeat(np.arange(len(ids)), [len(row_ids) for row_ids in ids])
    flat = torch.tensor([token for row_ids in ids for token in row_ids], dtype=torch.int64, device=device)
    return torch.from_numpy(rows).to(device), flat


def _tensor(values: NDArray[np.int64] | NDArray[np.float64], device: torch.device) -> Tensor:
    return torch.from_numpy(values).to(device)
