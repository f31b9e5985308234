"""Gumbel noise of token t at output index j of a request: a function of (seed, j, t) and nothing else.

A counter-based hash in 32-bit integer arithmetic, so any part of the vocabulary, on any device, in any batch, has the same bits:
    key0, key1 = halves of mix64(mix64(seed) + index)      bits = mix32(mix32(t * odd + key0) + key1)
Source of the mixers: splitmix64 (Steele, Lea, Flood 2014), and the 32-bit one searched for lowest bias by Chris Wellons (2018).
"""

import torch
from torch import Tensor

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
