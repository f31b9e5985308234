"""Compressed pages: how keys and values are rounded as they are written.

    fp8     e2m5 with a scale per token and head: sign, two bits of exponent, five of mantissa, all codes finite
    int8    -127 to 127 with a scale per token and head
    int4    0 to 15 with a scale and an offset per token, head and group of at most 64 dimensions; the two halves of a head are in
            the low and the high bits of each byte

A Hadamard transform of keys and queries keeps their products and evens out dimensions with large values.

Scales and offsets are bf16, rounded before the codes are computed, so that reading has no other error than the codes'. Numbers
that share a scale with NaN or infinity are not read back as finite ones.

fp8 is e2m5, where other engines have e4m3: with a scale per head a code needs little range, and has two bits more of mantissa.

Sources: FP8 Quantization: The Power of the Exponent (Kuzmin et al. 2022) for e2m5, KVQuant (Hooper et al. 2024) and KIVI (Liu et
al. 2024) for groups, QuaRot (Ashkboos et al. 2024) for rotated keys.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Protocol

import torch
from torch import Tensor

from phalanx_runtime.errors import ModelError

GROUP_DIMS = 64
"""Maximum dimensions of an int4 group."""
EXPANSION_BYTES = 9
"""Scratch per number of a key or value while torch expands it: its code, and two float32."""
INT4_MAX = 15.0
INT8_MAX = 127.0
FP8_MAX = 7.875


class PageFormat(Protocol):
    """Codes and scales of compressed keys or values."""

    @property
    def name(self) -> str:
        """Value of `--kv-cache-dtype`."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Of the codes."""
        ...

    def code_dim(self, head_dim: int) -> int:
        """Returns the codes' size of a head."""
        ...

    def num_scales(self, head_dim: int) -> int:
        """Returns the bf16 scales and offsets of a head."""
        ...

    def scales_of(self, x: Tensor, margin: float = 0.0) -> Tensor:
        """Returns scales, and offsets after them, [..., num_scales], of [..., head_dim] in float32.

        margin: share of the range at each of its ends that codes do not reach.
        """
        ...

    def spread(self, scales: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """Returns the scale and the offset of each dimension, [..., head_dim] or [..., 1] in float32."""
        ...

    def numbers(self, ratios: Tensor) -> Tensor:
        """Returns the nearest numbers that a code has, in float32, given numbers less their offset over their scale."""
        ...

    def pack(self, numbers: Tensor) -> Tensor:
        """Returns codes, [..., code_dim], of such numbers, [..., head_dim]."""
        ...

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """Returns [..., head_dim] in `dtype`, computed in float32 or wider."""
        ...


@dataclass(frozen=True, slots=True)
class ScaledFormat:
    """One code per number and one scale per token and head: int8, and what fp8 has in common with it."""

    name: str = "int8"
    dtype: torch.dtype = torch.int8
    maximum: float = INT8_MAX
    """Largest code."""

    def code_dim(self, head_dim: int) -> int:
        """See `PageFormat`."""
        return head_dim

    def num_scales(self, head_dim: int) -> int:
        """See `PageFormat`."""
        return 1

    def scales_of(self, x: Tensor, margin: float = 0.0) -> Tensor:
        """See `PageFormat`."""
        return (x.abs().amax(-1, keepdim=True) * (1 - 2 * margin) / self.maximum).bfloat16()

    def spread(self, scales: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """See `PageFormat`."""
        return scales.float(), torch.zeros_like(scales, dtype=torch.float32)

    def numbers(self, ratios: Tensor) -> Tensor:
        """See `PageFormat`."""
        return ratios.clamp(-self.maximum, self.maximum).round()

    def pack(self, numbers: Tensor) -> Tensor:
        """See `PageFormat`."""
        return numbers.to(self.dtype)

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """See `PageFormat`."""
        wide = torch.promote_types(dtype, torch.float32)
        return (codes.to(wide) * scales.to(wide)).to(dtype)


@dataclass(frozen=True, slots=True)
class Fp8Format(ScaledFormat):
    """e2m5 codes, which torch has no dtype for, as bytes."""

    name: str = "fp8"
    dtype: torch.dtype = torch.uint8
    maximum: float = FP8_MAX

    def numbers(self, ratios: Tensor) -> Tensor:
        """See `PageFormat`."""
        return e2m5_numbers(self.pack(ratios.clamp(-self.maximum, self.maximum)))

    def pack(self, numbers: Tensor) -> Tensor:
        """See `PageFormat`. Rounds to the nearest code, ties to even."""
        bits = numbers.contiguous().view(torch.int32)
        size = bits & 0x7FFFFFFF
        normal = ((size + 0x1FFFF + (size >> 18 & 1)) >> 18) - (126 << 5)  # 126: the difference of exponents
        subnormal = (numbers.abs() * 32).round().to(torch.int32)
        return (torch.where(size < 0x3F800000, subnormal, normal) | bits >> 24 & 0x80).to(self.dtype)  # below 1

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """See `PageFormat`."""
        wide = torch.promote_types(dtype, torch.float32)
        return (e2m5_numbers(codes).to(wide) * scales.to(wide)).to(dtype)


def e2m5_numbers(codes: Tensor) -> Tensor:
    """Returns e2m5 codes, uint8, in float32: their bits as one with an exponent that is 126 too small."""
    bits = codes.view(torch.int8).to(torch.int32)
    bits <<= 18
    bits &= -0x7E040000  # the sign, and seven bits from bit 18 on
    return bits.view(torch.float32).mul_(2.0**126)


@dataclass(frozen=True, slots=True)
class GroupedFormat:
    """Two codes per byte, and a scale and an offset per group: int4."""

    name: str = "int4"
    dtype: torch.dtype = torch.uint8

    def code_dim(self, head_dim: int) -> int:
        """See `PageFormat`."""
        return head_dim // 2

    def num_scales(self, head_dim: int) -> int:
        """See `PageFormat`."""
        return 2 * num_groups(head_dim)

    def scales_of(self, x: Tensor, margin: float = 0.0) -> Tensor:
        """See `PageFormat`. Scales of all groups, then offsets."""
        count = num_groups(x.shape[-1])
        groups = x.reshape(*x.shape[:-1], count, x.shape[-1] // count)
        low, high = groups.amin(-1), groups.amax(-1)
        left_out = (high - low) * margin
        offsets = _rounded_down(low + left_out)
        return torch.cat((((high - left_out - offsets.float()) / INT4_MAX).bfloat16(), offsets), -1)

    def spread(self, scales: Tensor, head_dim: int) -> tuple[Tensor, Tensor]:
        """See `PageFormat`."""
        factors, offsets = scales.float().chunk(2, -1)
        size = head_dim // factors.shape[-1]
        return factors.repeat_interleave(size, -1), offsets.repeat_interleave(size, -1)

    def numbers(self, ratios: Tensor) -> Tensor:
        """See `PageFormat`."""
        return ratios.clamp(0, INT4_MAX).round()

    def pack(self, numbers: Tensor) -> Tensor:
        """See `PageFormat`."""
        low, high = numbers.to(torch.uint8).chunk(2, -1)
        return low | high << 4

    def decode(self, codes: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
        """See `PageFormat`."""
        wide = torch.promote_types(dtype, torch.float32)
        factors, offsets = scales.to(wide).unsqueeze(-1).chunk(2, -2)
        numbers = torch.cat((codes & 15, codes >> 4), -1).view(*codes.shape[:-1], factors.shape[-2], -1)
        return (numbers.to(wide) * factors + offsets).flatten(-2).to(dtype)


def encode(format: PageFormat, x: Tensor) -> tuple[Tensor, Tensor]:
    """Returns codes, [..., code_dim], and scales, [..., num_scales], of [..., head_dim]."""
    wide = x.float()
    scales = format.scales_of(wide)
    steps, offsets = format.spread(scales, x.shape[-1])
    return format.pack(format.numbers((wide - offsets) / divisor(steps))), scales


def hadamard_transform(x: Tensor) -> Tensor:
    """Returns [..., head_dim] times the Hadamard matrix of the largest power of two that divides it; twice it is x again."""
    size = hadamard_size(x.shape[-1])
    return torch.matmul(x.reshape(*x.shape[:-1], -1, size), hadamard_matrix(size).to(x)).flatten(-2)


def hadamard_size(head_dim: int) -> int:
    """Returns the largest power of two that divides the head dimension."""
    return head_dim & -head_dim


def num_groups(head_dim: int) -> int:
    """Returns the int4 groups of a head."""
    return -(-head_dim // GROUP_DIMS)


@cache
def hadamard_matrix(size: int) -> Tensor:
    """Returns the orthonormal Hadamard matrix of a power of two, symmetric, [size, size], float32 (Sylvester 1867)."""
    matrix = torch.ones(1, 1)
    while len(matrix) < size:
        matrix = torch.cat((torch.cat((matrix, matrix), 1), torch.cat((matrix, -matrix), 1)))
    return matrix.div_(size**0.5)


def divisor(scales: Tensor) -> Tensor:
    """Returns scales in float32, 1 instead of 0: the codes of zeros are zeros."""
    return torch.where(scales == 0, 1.0, scales.float())


def _rounded_down(x: Tensor) -> Tensor:
    """Returns the largest bf16 numbers up to float32 x: a larger offset would cut the smallest number off."""
    bits = x.view(torch.int32)
    down = torch.where(bits < 0, (bits + 0xFFFF) >> 16, bits >> 16)
    return down.to(torch.int16).view(torch.bfloat16)


FORMATS: Mapping[str, PageFormat] = {
    "fp8": Fp8Format(),
    "int8": ScaledFormat(),
    "int4": GroupedFormat(),
}
"""By `--kv-cache-dtype`."""
CODES: Mapping[str, str] = {"fp8": "fp8-e2m5"}
"""Names in page keys and layouts of codes that changed, by `--kv-cache-dtype`: earlier releases have e4m3."""
FORMAT_NUMBERS: Mapping[PageFormat | None, int] = {None: 0, FORMATS["int8"]: 1, FORMATS["fp8"]: 2, FORMATS["int4"]: 3}
"""The kernels' number of each format."""


def choose_format(kv_cache_dtype: str, head_dims: tuple[int, ...]) -> PageFormat | None:
    """Returns the format; no value for `auto`: pages in the dtype of the weights.

    Raises ModelError for an unsupported head dimension.
    """
    if kv_cache_dtype == "auto":
        return None
    for dim in head_dims if kv_cache_dtype == "int4" else ():
        if dim % (2 * num_groups(dim)):
            raise ModelError(
                f"kv-cache-dtype int4 cuts a head into groups of equal, even size and at most {GROUP_DIMS} dimensions: "
                f"heads of {dim} are not {num_groups(dim)} of them; use int8 or fp8"
            )
    return FORMATS[kv_cache_dtype]


def codes_name(kv_cache_dtype: str) -> str:
    """Returns the name of pages of this dtype in page keys and layouts: pages of equal names have equal codes."""
    return CODES.get(kv_cache_dtype, kv_cache_dtype)


def rows_of(table: Tensor, kv_heads: int) -> Tensor:
    """Returns the rows of the pages of a table, KV head by KV head."""
    return (table.long() * kv_heads + torch.arange(kv_heads, device=table.device).unsqueeze(1)).flatten()


def gather(table: Tensor, rows: Tensor, buffer: Tensor) -> Tensor:
    """Returns these rows, in the buffer."""
    return torch.index_select(table, 0, rows, out=buffer[: rows.numel() * table.shape[1]].view(-1, table.shape[1]))
