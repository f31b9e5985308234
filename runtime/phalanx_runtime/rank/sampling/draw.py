"""From logits to tokens: argmax of logits / T + Gumbel noise over the tokens that top-k, top-p and min-p leave.

What the filters leave, in this order (as `transformers` does): the k highest; of those, the highest until their mass reaches
p; of those, the ones at least min_p times as probable as the highest. Ties at a cut stay, so the order of tokens decides nothing.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import msgspec
import torch
from torch import Tensor

from phalanx_api import wire
from phalanx_runtime.rank.noise import gumbel, noise_key

MIN_TEMPERATURE = 1e-5
"""A lower one is greedy, as in vLLM: scores divided by it could pass what float32 holds."""

CANDIDATES = 1024
"""Tokens sorted at first to find a top-p cut; a flatter distribution is sorted whole."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One token to draw: output index `index` of a request with these parameters. Temperature 0 is greedy."""

    seed: int
    index: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int | None = None
    min_p: float = 0.0

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens may be cut."""
        return self.top_p < 1.0 or self.top_k is not None or self.min_p > 0.0


class Rivals(msgspec.Struct, frozen=True, array_like=True):
    """The tokens that a draw may give, its own first, and the logarithms of their shares: minus infinity where one is cut."""

    tokens: list[int]
    shares: list[float]


def draw_of(s: wire.Sampling, index: int) -> Draw:
    """The draw of this output index of a request that is sampled so."""
    temperature = s.temperature if s.temperature >= MIN_TEMPERATURE else 0.0
    return Draw(s.seed, index, temperature, s.top_p, s.top_k, s.min_p)


def draw(logits: Tensor, draws: Sequence[Draw | None]) -> list[int]:
    """The token of each draw. logits: [draws, vocabulary]. Where a draw is None the token means nothing."""
    sampled = [(row, one) for row, one in enumerate(draws) if one is not None and one.temperature > 0]
    if not sampled:
        return _integers(_best(logits))
    places, wanted = [row for row, _ in sampled], [one for _, one in sampled]
    at = torch.tensor(places, device=logits.device)
    scores = scaled(logits.index_select(0, at), wanted)
    keep_filtered(scores, wanted)
    chosen = scores.add_(_noise(scores, wanted)).argmax(-1)
    if len(places) == len(draws):
        return _integers(chosen)
    return _integers(_best(logits).index_copy_(0, at, chosen))


def draw_several(logits: Tensor, draws: Sequence[Draw], count: int) -> list[Rivals]:
    """Of each draw its token and those that come next, `count` in all. Shares are of the scores with the noise."""
    scores = scaled(logits, [replace(one, temperature=one.temperature or 1.0) for one in draws])
    sampled = [(row, one) for row, one in enumerate(draws) if one.temperature > 0]
    if sampled:
        wanted = [one for _, one in sampled]
        at = torch.tensor([row for row, _ in sampled], device=logits.device)
        part = scores.index_select(0, at)
        keep_filtered(part, wanted)
        scores.index_copy_(0, at, part.add_(_noise(part, wanted)))
    best = scores.topk(min(count, scores.shape[1]))
    shares = (best.values - scores.logsumexp(-1, keepdim=True)).tolist()
    return [Rivals(ids, own) for ids, own in zip(best.indices.tolist(), shares, strict=True)]


def _noise(scores: Tensor, draws: Sequence[Draw]) -> Tensor:
    """The noise of each draw's tokens: [draws, vocabulary]."""
    tokens = torch.arange(scores.shape[1], dtype=torch.int32, device=scores.device)
    keys = torch.tensor([noise_key(one.seed, one.index) for one in draws], dtype=torch.int32, device=scores.device)
    return gumbel(keys, tokens, scores.dtype)


def _best(logits: Tensor) -> Tensor:
    """The highest of each row. bf16 is widened first: torch compares it one number at a time."""
    return (logits.float() if logits.dtype == torch.bfloat16 else logits).argmax(-1)


def scaled(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    """logits / T in float32, or float64 if they are. A new tensor."""
    wide = logits if logits.dtype == torch.float64 else logits.float()
    return wide / torch.tensor([one.temperature for one in draws], dtype=wide.dtype, device=wide.device).unsqueeze(1)


def keep_filtered(scores: Tensor, draws: Sequence[Draw]) -> None:
    """Puts minus infinity where a draw's filters cut. scores: [draws, vocabulary], logits / T, changed in place."""
    rows = [row for row, one in enumerate(draws) if one.is_filtered]
    if not rows:
        return
    at = torch.tensor(rows, device=scores.device)
    part = scores.index_select(0, at)
    cuts = torch.stack([_cut(part[i], draws[row]) for i, row in enumerate(rows)])
    scores.index_copy_(0, at, part.masked_fill_(part < cuts.unsqueeze(1), -math.inf))


def _cut(scores: Tensor, one: Draw) -> Tensor:
    """The lowest score that this draw keeps."""
    top = scores.max()
    cut = top + math.log(one.min_p) if one.min_p > 0 else torch.full_like(top, -math.inf)
    size = scores.shape[0]
    limit = size if one.top_k is None else min(one.top_k, size)
    if one.top_p >= 1.0:
        return cut if limit == size else torch.maximum(cut, scores.topk(limit).values[-1])
    highest = scores.topk(min(limit, CANDIDATES)).values
    if len(highest) < limit:
        kept, enough = _nucleus(highest, scores, one.top_p)
        if enough:
            return torch.maximum(cut, kept)
        highest = scores.topk(limit).values
    return torch.maximum(cut, _nucleus(highest, highest, one.top_p)[0])


def _nucleus(highest: Tensor, all_scores: Tensor, top_p: float) -> tuple[Tensor, bool]:
    """The last of the falling scores before which less than `top_p` of the mass lies, and whether it is among them."""
    mass = (highest - torch.logsumexp(all_scores, 0)).exp().cumsum(0)
    count = int((mass < top_p).sum())
    return highest[min(count, len(highest) - 1)], count < len(highest)


def _integers(tokens: Tensor) -> list[int]:
    return [int(token) for token in tokens.tolist()]
