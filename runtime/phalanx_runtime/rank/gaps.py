"""How narrowly a token won: the distance that tests excuse as a near-tie (DESIGN: equal), in standard deviations of logits / T.

The distance of the winner to the second among the tokens that the filters leave; or, where less, of the winner, or of a token
that would have won but for a cut, to that cut's other side. Top-p is a cut in mass: no score has to move less than the mass does.
"""

import math

import torch
from torch import Tensor

from phalanx_runtime.rank.noise import gumbel, noise_key
from phalanx_runtime.rank.sampling import Draw, keep_filtered, scaled


def gap(raw: Tensor, scores: Tensor, one: Draw) -> float:
    """The gap of one draw, infinite with one token. raw: [vocabulary]; scores: the same after masks, bias and penalties."""
    if one.temperature == 0:
        best = scores.topk(2).values
        return float((best[0] - best[1]) / raw.std())
    warm = scaled(scores.unsqueeze(0), [one])
    kept = warm.clone()
    keep_filtered(kept, [one])
    key = torch.tensor([noise_key(one.seed, one.index)], dtype=torch.int32, device=raw.device)
    noise = gumbel(key, torch.arange(len(raw), dtype=torch.int32, device=raw.device), warm.dtype)
    best = (kept + noise)[0].topk(2).values
    rivals = (warm + noise)[0] >= best[0]
    near = torch.minimum(best[0] - best[1], _to_cuts(warm[0], one)[rivals].min())
    return float(near / (raw.to(warm.dtype) / one.temperature).std())


def _to_cuts(scores: Tensor, one: Draw) -> Tensor:
    """How far each token is from the other side of the nearest cut; infinite where nothing is cut."""
    far = torch.full_like(scores, math.inf)
    falling, order = scores.sort(descending=True)
    limit = len(scores) if one.top_k is None else min(one.top_k, len(scores))
    if limit < len(scores):
        far = torch.minimum(far, _to_edge(scores, falling[limit - 1], falling[limit]))
    if one.top_p < 1.0:
        mass = falling.softmax(0) if limit == len(scores) else falling[:limit].softmax(0)
        before = mass.cumsum(0) - mass
        far[order[:limit]] = torch.minimum(far[order[:limit]], (before - one.top_p).abs())
        count = int((before < one.top_p).sum())
        if count < len(scores):
            far = torch.minimum(far, _to_edge(scores, falling[count - 1], falling[count]))
    if one.min_p > 0:
        far = torch.minimum(far, (scores - falling[0] - math.log(one.min_p)).abs())
    return far


def _to_edge(scores: Tensor, lowest_kept: Tensor, highest_cut: Tensor) -> Tensor:
    """Distances of kept tokens to the highest that was cut, and of cut ones to the lowest that was kept."""
    return torch.where(scores >= lowest_kept, scores - highest_cut, lowest_kept - scores)
