"""Samples by the Gumbel-max trick: argmax of logits / T + keyed Gumbel noise over the tokens that the filters keep."""

from collections.abc import Sequence
from dataclasses import replace

import msgspec
import torch
from torch import Tensor

from phalanx_runtime.rank.sampling.filters import Draw, apply_filters, apply_temperature

# Keyed noise: a counter-based hash of (seed, output index j, token t) in 32-bit integers, equal on any device and in any batch.
#     key0, key1 = halves of mix64(mix64(seed) + j)
#     bits = mix32(mix32(t * odd + key0) + key1)
# mix64 is splitmix64 (Steele, Lea, Flood 2014); mix32 was searched for lowest bias by Chris Wellons (2018).

_ODD = -1640531535  # 0x9E3779B1 as a signed number: 2^32 over the golden ratio
_FIRST = 0x7FEB352D
_SECOND = -2073254261  # 0x846CA68B as a signed number
_MASK64 = 0xFFFFFFFFFFFFFFFF


def noise_key(seed: int, index: int) -> tuple[int, int]:
    """Returns the key of output index `index` as two signed 32-bit words."""
    mixed = _mix64((_mix64(seed & _MASK64) + index) & _MASK64)
    return _signed(mixed >> 32), _signed(mixed & 0xFFFFFFFF)


def mixed_seed(seed: int) -> int:
    """Returns the part of `noise_key` that no index changes, as a signed 64-bit integer."""
    mixed = _mix64(seed & _MASK64)
    return mixed - (1 << 64) if mixed >> 63 else mixed


def noise_bits(keys: Tensor, tokens: Tensor) -> Tensor:
    """Returns random int32 [draws, v]. keys: [draws, 2] int32. tokens: [v] int32."""
    bits = _mix32((tokens * _ODD).unsqueeze(0) + keys[:, :1])
    return _mix32(bits.add_(keys[:, 1:]))


def gumbel(keys: Tensor, tokens: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns standard Gumbel noise [draws, v], finite."""
    return gumbel_from_bits(noise_bits(keys, tokens), dtype)


def gumbel_from_bits(bits: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns -log(-log(1 - v)), where v in (0, 1) is the distance of `bits` from zero, exact if small.

    v is never 0 or 1: infinite noise could select an excluded token. bits: int32, any shape.
    """
    uniform = bits.to(dtype).add_(0.5).abs_().mul_(2.0**-31).clamp_(max=1.0 - torch.finfo(dtype).eps / 2)
    return uniform.neg_().log1p_().neg_().log_().neg_()


def _mix32(x: Tensor) -> Tensor:
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


class RankedTokens(msgspec.Struct, frozen=True, array_like=True):
    """The most probable tokens given the noise, the sampled one first."""

    tokens: list[int]
    log_shares: list[float]
    """log softmax of logits / T + noise; minus infinity if excluded."""


def sample(logits: Tensor, draws: Sequence[Draw | None]) -> list[int]:
    """Samples one token per row; without a draw, any value. logits: [draws, vocabulary]."""
    random = [(row, draw) for row, draw in enumerate(draws) if draw is not None and draw.temperature > 0]
    if not random:
        return _integers(_argmax(logits))
    rows, random_draws = [row for row, _ in random], [draw for _, draw in random]
    indices = torch.tensor(rows, device=logits.device)
    scaled = apply_temperature(logits.index_select(0, indices), random_draws)
    apply_filters(scaled, random_draws)
    sampled = scaled.add_(_noise(scaled, random_draws)).argmax(-1)
    if len(rows) == len(draws):
        return _integers(sampled)
    return _integers(_argmax(logits).index_copy_(0, indices, sampled))


def sample_ranked(logits: Tensor, draws: Sequence[Draw], count: int) -> list[RankedTokens]:
    """Returns `count` tokens per draw, the sampled one first. logits: [draws, vocabulary]."""
    scaled = apply_temperature(logits, [replace(draw, temperature=draw.temperature or 1.0) for draw in draws])
    rows = [row for row, draw in enumerate(draws) if draw.temperature > 0]
    if rows:
        random_draws = [draws[row] for row in rows]
        indices = torch.tensor(rows, device=logits.device)
        part = scaled.index_select(0, indices)
        apply_filters(part, random_draws)
        scaled.index_copy_(0, indices, part.add_(_noise(part, random_draws)))
    top = scaled.topk(min(count, scaled.shape[1]))
    log_shares = (top.values - scaled.logsumexp(-1, keepdim=True)).tolist()
    return [RankedTokens(tokens, shares) for tokens, shares in zip(top.indices.tolist(), log_shares, strict=True)]


def _noise(logits: Tensor, draws: Sequence[Draw]) -> Tensor:
    tokens = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
    keys = torch.tensor([noise_key(draw.seed, draw.index) for draw in draws], dtype=torch.int32, device=logits.device)
    return gumbel(keys, tokens, logits.dtype)


def _argmax(logits: Tensor) -> Tensor:
    # torch compares bf16 one number at a time.
    return (logits.float() if logits.dtype == torch.bfloat16 else logits).argmax(-1)


def _integers(tokens: Tensor) -> list[int]:
    return [int(token) for token in tokens.tolist()]
