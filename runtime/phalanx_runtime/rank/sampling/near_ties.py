"""How narrowly a token won: the distance that tests excuse as a near-tie (DESIGN: equal), in standard deviations of logits / T.

What has to change least: a token that the filters leave passes the winner; a token that they cut does so and comes over its cut;
the winner is cut. Top-p is a cut in mass: no score has to move less than the mass does.
"""

import math

import torch
from torch import Tensor

from phalanx_runtime.rank.sampling.draw import Draw, gumbel, keep_filtered, noise_key, scaled


def logit_gap(raw: Tensor, scores: Tensor, one: Draw) -> float:
    """The gap of one draw, infinite with one token. raw: [vocabulary]; scores: the same after masks, bias and penalties."""
    if one.temperature == 0:
        best = scores.topk(2).values
        return float((best[0] - best[1]) / raw.std())
    warm = scaled(scores.unsqueeze(0), [one])
    kept = warm.clone()
    keep_filtered(kept, [one])
    key = torch.tensor([noise_key(one.seed, one.index)], dtype=torch.int32, device=raw.device)
    noise = gumbel(key, torch.arange(len(raw), dtype=torch.int32, device=raw.device), warm.dtype)
    won = (kept + noise)[0].max(0)
    behind, cuts = (won.values - (warm + noise)[0]).clamp(min=0), _to_cuts(warm[0], one)
    short = torch.where(kept[0] == -math.inf, torch.maximum(behind, cuts), behind)
    short[won.indices] = cuts[won.indices]
    return float(short.min() / (raw.to(warm.dtype) / one.temperature).std())


def _to_cuts(scores: Tensor, one: Draw) -> Tensor:
    """How far each token is from the other side of the nearest cut; infinite where nothing is cut and for masked tokens."""
    far = torch.full_like(scores, math.inf)
    falling, order = scores.sort(descending=True)
    limit = len(scores) if one.top_k is None else min(one.top_k, len(scores))
    if limit < len(scores):
        far = torch.minimum(far, _to_edge(scores, falling[limit - 1], falling[limit]))
    if one.top_p < 1.0:
        among = order[:limit]
        far[among] = torch.minimum(far[among], _to_mass(falling[:limit], one.top_p))
    if one.min_p > 0:
        far = torch.minimum(far, (scores - falling[0] - math.log(one.min_p)).abs())
    return far.masked_fill(scores == -math.inf, math.inf)


def _to_mass(falling: Tensor, top_p: float) -> Tensor:
    """How far each of the falling scores is from the other side of top-p.

    It gets there at some rank: its score has to move to that rank's, and the mass before that rank over `top_p`,
    unless it is there already. The greater of the two is least where they cross, for one rises with the rank
    and the other falls.
    """
    mass = falling.softmax(0)
    spare = top_p - (mass.cumsum(0) - mass)
    kept = spare > 0
    count, last = int(kept.sum()), len(falling) - 1
    cross = torch.searchsorted(-(falling + spare), -falling)
    far = torch.full_like(falling, math.inf)
    for rank in (cross - 1, cross):
        at = torch.where(kept, rank.clamp(0, min(count, last)), rank.clamp(count - 1, last))
        missing = torch.where(kept, spare[at], -spare[at]).clamp(min=0)
        far = torch.minimum(far, torch.maximum((falling[at] - falling).abs(), missing))
    return far


def _to_edge(scores: Tensor, lowest_kept: Tensor, highest_cut: Tensor) -> Tensor:
    """Distances of kept tokens to the highest that was cut, and of cut ones to the lowest that was kept."""
    return torch.where(scores >= lowest_kept, scores - highest_cut, lowest_kept - scores)
