"""The distribution of one token: temperature and filters, with the distance of each token to its threshold.

Filters in the order of `transformers`: the `top_k` highest; of these the highest until their mass reaches `top_p`; of these those
at least `min_p` times as probable as the first. Ties stay.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_api import wire

MIN_TEMPERATURE = 1e-5
"""Below it sampling is greedy, as in vLLM: logits / T could exceed float32."""

SORTED_TOKENS = 1024
"""Sorted first to find a top-p threshold; a flatter distribution is sorted whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Draw:
    """Samples output index `index` of a request. Temperature 0 is greedy."""

    seed: int
    index: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0

    @property
    def is_filtered(self) -> bool:
        """Whether a filter may exclude tokens."""
        return self.top_p < 1.0 or self.top_k is not None or self.min_p > 0.0


def make_draw(sampling: wire.Sampling, index: int) -> Draw:
    """Makes the draw of a request."""
    return Draw(
        seed=sampling.seed,
        index=index,
        temperature=sampling.temperature if sampling.temperature >= MIN_TEMPERATURE else 0.0,
        top_p=sampling.top_p,
        top_k=sampling.top_k,
        min_p=sampling.min_p,
    )


def apply_temperature(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """Returns logits / T as a new tensor, in float32 or wider. logits: [draws, vocabulary]."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide / torch.tensor([draw.temperature for draw in draws], dtype=wide.dtype, device=wide.device).unsqueeze(1)


def apply_filters(scaled: Tensor, draws: Sequence[Draw]) -> None:
    """Excludes tokens by top-k, top-p and min-p, in place. scaled: logits / T, [draws, vocabulary]."""
    rows = [row for row, draw in enumerate(draws) if draw.is_filtered]
    if not rows:
        return
    indices = torch.tensor(rows, device=scaled.device)
    part = scaled.index_select(0, indices)
    thresholds = torch.stack([_threshold(part[i], draws[row]) for i, row in enumerate(rows)])
    scaled.index_copy_(0, indices, part.masked_fill_(part < thresholds.unsqueeze(1), -math.inf))


def _threshold(scaled: Tensor, draw: Draw) -> Tensor:
    """Returns the lowest value that the filters keep."""
    top = scaled.max()
    threshold = top + math.log(draw.min_p) if draw.min_p > 0 else torch.full_like(top, -math.inf)
    size = scaled.shape[0]
    limit = size if draw.top_k is None else min(draw.top_k, size)
    if draw.top_p >= 1.0:
        return threshold if limit == size else torch.maximum(threshold, scaled.topk(limit).values[-1])
    highest = scaled.topk(min(limit, SORTED_TOKENS)).values
    if len(highest) < limit:
        lowest_kept, is_found = _top_p_threshold(highest, scaled, draw.top_p)
        if is_found:
            return torch.maximum(threshold, lowest_kept)
        highest = scaled.topk(limit).values
    return torch.maximum(threshold, _top_p_threshold(highest, highest, draw.top_p)[0])


def _top_p_threshold(highest: Tensor, all_scaled: Tensor, top_p: float) -> tuple[Tensor, bool]:
    """Returns where the mass of the descending `highest` reaches `top_p`, and whether it does."""
    mass = (highest - torch.logsumexp(all_scaled, 0)).exp().cumsum(0)
    count = int((mass < top_p).sum())
    return highest[min(count, len(highest) - 1)], count < len(highest)


def threshold_distances(scaled: Tensor, draw: Draw) -> Tensor:
    """Distances to the nearest filter threshold; infinite without filters and for masked tokens. scaled: [vocabulary]."""
    distances = torch.full_like(scaled, math.inf)
    descending, order = scaled.sort(descending=True)
    limit = len(scaled) if draw.top_k is None else min(draw.top_k, len(scaled))
    if limit < len(scaled):
        distances = torch.minimum(distances, _top_k_distances(scaled, descending[limit - 1], descending[limit]))
    if draw.top_p < 1.0:
        candidates = order[:limit]
        distances[candidates] = torch.minimum(distances[candidates], _top_p_distances(descending[:limit], draw.top_p))
    if draw.min_p > 0:
        distances = torch.minimum(distances, (scaled - descending[0] - math.log(draw.min_p)).abs())
    return distances.masked_fill(scaled == -math.inf, math.inf)


def _top_p_distances(descending: Tensor, top_p: float) -> Tensor:
    """Distances to the other side of top-p.

    At some rank, the value must reach that rank's value and the mass before it `top_p`. One distance rises with the rank, the
    other falls: their maximum is least where they cross.
    """
    mass = descending.softmax(0)
    spare = top_p - (mass.cumsum(0) - mass)
    kept = spare > 0
    count, last = int(kept.sum()), len(descending) - 1
    cross = torch.searchsorted(-(descending + spare), -descending)
    distances = torch.full_like(descending, math.inf)
    for rank in (cross - 1, cross):
        target = torch.where(kept, rank.clamp(0, min(count, last)), rank.clamp(count - 1, last))
        missing = torch.where(kept, spare[target], -spare[target]).clamp(min=0)
        distances = torch.minimum(distances, torch.maximum((descending[target] - descending).abs(), missing))
    return distances


def _top_k_distances(scaled: Tensor, lowest_kept: Tensor, highest_excluded: Tensor) -> Tensor:
    """Distances of kept tokens to the highest excluded, and of excluded ones to the lowest kept."""
    return torch.where(scaled >= lowest_kept, scaled - highest_excluded, lowest_kept - scaled)
