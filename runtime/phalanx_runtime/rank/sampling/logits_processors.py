"""Scores after masks, bias and penalties: what a row is drawn from that asks for any of them.

Masks first, then bias, then penalties, as in vLLM; the whole order is told in `sampler`. One pass for all such rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from phalanx_frontend.text.grammar import GrammarError
from phalanx_runtime.rank.sampling.masks import penalise
from phalanx_runtime.rank.sampling.row import SamplingRow

NOTHING_LEFT = "nothing can be drawn: grammar, allowed_token_ids, bad_words and min_tokens together exclude every token"


@dataclass(frozen=True, slots=True)
class ProcessedLogits:
    """Scores of special rows after masks, bias and penalties. `places` maps positions in the step to rows of `scores`."""

    scores: Tensor
    places: dict[int, int]
    failed: dict[int, str]


def process_logits(raw: Tensor, rows: Sequence[SamplingRow], special: Sequence[int], indices: Sequence[int]) -> ProcessedLogits:
    """The scores of the special ones of these rows after masks, bias and penalties, in float32 or wider.

    raw: [rows, vocabulary], which stays as it is. special: positions of rows, and the output indices that they draw.
    """
    part = raw.index_select(0, torch.tensor(special, device=raw.device))
    scores = part if part.dtype == torch.float64 else part.float()
    chosen = [rows[at] for at in special]
    _mask(scores, chosen)
    able = [row.failure is None for row in chosen]
    _put(scores, [row.bans.now(row.tokens or (), at) if ok else [] for row, at, ok in zip(chosen, indices, able, strict=True)])
    for row, is_empty in zip(chosen, (scores.amax(1) == -torch.inf).tolist(), strict=True):
        row.failure = row.failure or (NOTHING_LEFT if is_empty else None)
    _bias(scores, [row.sampling.logit_bias if ok else {} for row, ok in zip(chosen, able, strict=True)])
    penalised = [(place, row.seen, row.sampling) for place, row in enumerate(chosen) if row.seen is not None]
    if penalised:
        places, seen, samplings = zip(*penalised, strict=True)
        penalise(scores, places, seen, samplings)
    failed = {at: row.failure for at, row in zip(special, chosen, strict=True) if row.failure is not None}
    return ProcessedLogits(scores, {at: place for place, at in enumerate(special)}, failed)


def _mask(scores: Tensor, rows: Sequence[SamplingRow]) -> None:
    """Leaves what grammars and allowed tokens allow. A grammar that cannot go on fails its row."""
    for place, row in enumerate(rows):
        if row.matcher is not None and row.failure is None:
            try:
                allowed = torch.from_numpy(row.matcher.allowed()).to(scores.device)
            except GrammarError as error:
                row.failure = f"grammar: {error}"
                continue
            scores[place].masked_fill_(~allowed, -torch.inf)
        if row.bans.allowed is not None and row.failure is None:
            banned = torch.ones(scores.shape[1], dtype=torch.bool, device=scores.device)
            banned[torch.tensor(row.bans.allowed, dtype=torch.int64, device=scores.device)] = False
            scores[place].masked_fill_(banned, -torch.inf)


def _put(scores: Tensor, banned: Sequence[Sequence[int]]) -> None:
    """Excludes the banned tokens of each row."""
    if any(banned):
        at, ids = _pairs(banned, scores.device)
        scores[at, ids] = -torch.inf


def _bias(scores: Tensor, biases: Sequence[dict[int, float]]) -> None:
    """Adds each row's bias to its tokens."""
    if any(biases):
        at, ids = _pairs([list(bias) for bias in biases], scores.device)
        values = [value for bias in biases for value in bias.values()]
        scores[at, ids] += torch.tensor(values, dtype=scores.dtype, device=scores.device)


def _pairs(ids: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Lists of tokens per row as parallel rows and tokens."""
    rows = np.repeat(np.arange(len(ids)), [len(some) for some in ids])
    flat = torch.tensor([token for some in ids for token in some], dtype=torch.int64, device=device)
    return torch.from_numpy(rows).to(device), flat
