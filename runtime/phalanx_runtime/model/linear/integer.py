"""Weights in integer codes with scales and zero points for groups of inputs, in no kernel's layout."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class IntWeight:
    """A weight: (codes - zeros) * scales."""

    codes: Tensor
    """uint8 [outputs, inputs]."""
    scales: Tensor
    """[outputs, groups], in the dtype of the checkpoint."""
    zeros: Tensor | None
    """uint8 [outputs, groups]; None: the middle code."""
    groups: Tensor
    """int64 [inputs]: the group of each input, in any order."""
    bits: int
    """4 or 8."""
    dtype: torch.dtype
    """Compute dtype."""

    @property
    def middle(self) -> int:
        """The code that is zero without zero points."""
        return 1 << self.bits - 1

    def all_zeros(self) -> Tensor:
        """Returns the zero points, uint8 [outputs, groups]."""
        return torch.full_like(self.scales, self.middle, dtype=torch.uint8) if self.zeros is None else self.zeros

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [outputs, inputs], rounded once: from fp32, or float64 if that is `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        values = self.codes.to(wide).sub_(self.all_zeros()[:, self.groups])
        return values.mul_(self.scales.to(wide)[:, self.groups]).to(dtype)


def join(parts: Sequence[IntWeight]) -> IntWeight | None:
    """Returns the outputs of several weights one above the other; None if their groups or bits differ."""
    first = parts[0]
    if any(part.bits != first.bits or not torch.equal(part.groups, first.groups) for part in parts):
        return None
    has_zeros = any(part.zeros is not None for part in parts)
    return IntWeight(
        codes=torch.cat([part.codes for part in parts]),
        scales=torch.cat([part.scales for part in parts]),
        zeros=torch.cat([part.all_zeros() for part in parts]) if has_zeros else None,
        groups=first.groups,
        bits=first.bits,
        dtype=first.dtype,
    )


def unpack_words(words: Tensor, bits: int, order: Sequence[int] = ()) -> Tensor:
    """Returns the fields of int32 words, uint8 [rows, words * 32 / bits].

    The lowest field is first, or field `order[i]` of a word is its value i.
    """
    fields = words.contiguous().flatten().view(torch.uint8).view(words.shape[0], -1)  # little-endian, as safetensors are
    if bits == 4:
        fields = torch.stack((fields & 15, fields >> 4), 2).flatten(1)
    if order:
        fields = fields.view(words.shape[0], -1, len(order))[:, :, list(order)].flatten(1)
    return fields
