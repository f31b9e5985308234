"""Details of tokens: logprobs of the raw logits, and near-tie gaps."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx_api.wire import TokenDetail
from phalanx_runtime.rank.sampling.filters import Draw, apply_filters, apply_temperature, threshold_distances
from phalanx_runtime.rank.sampling.gumbel import gumbel, noise_key

MAX_CHUNK_LOGITS = 1 << 22
"""Normalised at once: 16 MiB of float32. Fewer cost more calls."""
PromptDetails = list[tuple[int, int, list[TokenDetail]]]
"""(i, start, details of prompt tokens from `start` on) of request i of a plan."""


def rows_per_chunk(vocab_size: int) -> int:
    """Rows normalised at once."""
    return max(1, MAX_CHUNK_LOGITS // vocab_size)


def token_details(
    logits: Tensor, tokens: Sequence[int], tops: Sequence[int], rows: Sequence[int] | None = None
) -> list[TokenDetail]:
    """Returns the details of one token per row. logits: [rows, vocabulary], raw.

    `tops[i]`: number of top logprobs. rows: row of each token; by default all.
    """
    size = rows_per_chunk(logits.shape[1])
    details: list[TokenDetail] = []
    for first in range(0, len(tokens), size):
        chunk = slice(first, first + size)
        part = logits[chunk] if rows is None else logits[torch.tensor(rows[chunk], device=logits.device)]
        details += _chunk_details(part, tokens[chunk], tops[chunk])
    return details


def _chunk_details(logits: Tensor, tokens: Sequence[int], tops: Sequence[int]) -> list[TokenDetail]:
    wide = logits if logits.dtype == torch.float64 else logits.float()
    logprobs = wide.log_softmax(-1)
    own = logprobs.gather(1, torch.tensor(tokens, device=logits.device).unsqueeze(1))
    ranks = (logprobs > own).sum(1).tolist()
    values, ids = logprobs.topk(min(max(tops), logits.shape[1]))
    return [
        TokenDetail(logprob=logprob, rank=rank, top_ids=top_ids[:top], top_logprobs=top_logprobs[:top])
        for logprob, rank, top_ids, top_logprobs, top in zip(
            own.squeeze(1).tolist(), ranks, ids.tolist(), values.tolist(), tops, strict=True
        )
    ]


def near_tie_gap(raw: Tensor, processed: Tensor, draw: Draw) -> float:
    """Returns the smallest change of logits / T that changes the token, in their standard deviations.

    A kept token overtakes it, an excluded one overtakes it and its threshold, or it falls below a threshold. Infinite with one
    token. raw: [vocabulary]; processed: after masks, bias and penalties.
    """
    if draw.temperature == 0:
        best = processed.topk(2).values
        return float((best[0] - best[1]) / raw.std())
    scaled = apply_temperature(processed.unsqueeze(0), [draw])
    kept = scaled.clone()
    apply_filters(kept, [draw])
    key = torch.tensor([noise_key(draw.seed, draw.index)], dtype=torch.int32, device=raw.device)
    noise = gumbel(key, torch.arange(len(raw), dtype=torch.int32, device=raw.device), scaled.dtype)
    winner = (kept + noise)[0].max(0)
    behind = (winner.values - (scaled + noise)[0]).clamp(min=0)
    to_threshold = threshold_distances(scaled[0], draw)
    distances = torch.where(kept[0] == -math.inf, torch.maximum(behind, to_threshold), behind)
    distances[winner.indices] = to_threshold[winner.indices]
    return float(distances.min() / (raw.to(scaled.dtype) / draw.temperature).std())
