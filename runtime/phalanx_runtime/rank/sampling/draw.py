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

# Gumbel noise of token t at output index j of a request: a function of (seed, j, t) and nothing else.
# A counter-based hash in 32-bit integer arithmetic, so any part of the vocabulary, on any device, in any batch, has the same
# bits:     key0, key1 = halves of mix64(mix64(seed) + index)      bits = mix32(mix32(t * odd + key0) + key1) Source of the
# mixers: splitmix64 (Steele, Lea, Flood 2014), and the 32-bit one searched for lowest bias by Chris Wellons (2018).

_ODD = -1640531535  # 0x9E3779B1 as a signed number: 2^32 over the golden ratio
_FIRST = 0x7FEB352D
_SECOND = -2073254261  # 0x846CA68B as a signed number
_MASK64 = 0xFFFFFFFFFFFFFFFF


def noise_key(seed: int, index: int) -> tuple[int, int]:
    """Two signed 32-bit words that name the draw of output `index` under this seed."""
    mixed = _mix64((_mix64(seed & _MASK64) + index) & _MASK64)
    return _signed(mixed >> 32), _signed(mixed & 0xFFFFFFFF)


def noise_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """Random int32 of each (draw, token). keys: [draws, 2] int32. tokens: [v] int32 ids. Gives [draws, v]."""
    bits = _mix32((tokens * _ODD).unsqueeze(0) + keys[:, :1])
    return _mix32(bits.add_(keys[:, 1:]))


def gumbel(keys: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Standard Gumbel noise of each (draw, token), in float32 or float64: finite."""
    return gumbel_of(noise_bits(keys, tokens), dtype)


def gumbel_of(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """-log(-log(1 - v)) of random int32, with v in (0, 1) by their distance from zero.

    So v is exact where it is small, and there the largest noise comes from. It is never 0 nor 1, for infinite noise would choose
    a token that a filter or a grammar excludes (minus infinity and infinity are no number), or none where only one is left.
    """
    uniform = bits.to(dtype).add_(0.5).abs_().mul_(2.0**-31).clamp_(max=1.0 - torch.finfo(dtype).eps / 2)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix32(x: Tensor) -> Tensor:
    """The mixer, in place. int32 multiplication wraps around; shifts are made logical by a mask."""
    x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))
    x.mul_(_FIRST)
    x.bitwise_xor_((x >> 15).bitwise_and_(0x1FFFF))
    x.mul_(_SECOND)
    return x.bitwise_xor_((x >> 16).bitwise_and_(0xFFFF))


def _mix64(x: int) -> int:
    x = (x + 0x9E3779B97F4A7C15) & _MASK64
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


MIN_TEMPERATURE = 1e-5
"""A lower one is greedy, as in vLLM: scores divided by it could pass what float32 holds."""

CANDIDATES = 1024
"""Tokens sorted at first to find a top-p cut; a flatter distribution is sorted whole."""


@dataclass(frozen=True, slots=True, kw_only=True)
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
    return Draw(seed=s.seed, index=index, temperature=temperature, top_p=s.top_p, top_k=s.top_k, min_p=s.min_p)


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
