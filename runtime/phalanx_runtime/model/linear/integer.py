"""Weights in codes of 4 or 8 bits with scales and zero points for groups of inputs, in no kernel's layout."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from phalanx_runtime.model.ggml.weight import GgmlWeight
from phalanx_runtime.model.linear.nested import NestedScales, join_nested


@dataclass(frozen=True, slots=True, kw_only=True)
class IntWeight:
    """A weight: (codes - zeros) * scales, codes * scales + offsets, table[codes] * scales * factors, or e4m3 * scales."""

    codes: Tensor
    """uint8 [outputs, inputs]."""
    scales: Tensor
    """[outputs, groups], in the dtype of the checkpoint; codes in uint8 with `nested`."""
    zeros: Tensor | None
    """uint8 [outputs, groups]; None: the middle code."""
    groups: Tensor
    """int64 [inputs]: the group of each input, in any order."""
    bits: int
    """4 or 8."""
    dtype: torch.dtype
    """Compute dtype."""
    offsets: Tensor | None = None
    """bfloat16 [outputs, groups]: the values of code 0, in place of zero points."""
    rounds_inputs: bool = False
    """Whether the checkpoint is made for inputs in int8."""
    table: Tensor | None = None
    """fp32 [16]: the values of codes of 4 bits, in place of zero points."""
    factors: Tensor | None = None
    """fp32 [outputs]: further scales; only with a table."""
    is_e4m3: bool = False
    """Whether codes of 8 bits are numbers in e4m3."""
    nested: NestedScales | None = None
    """What codes of scales mean; only with a table."""

    @property
    def outputs(self) -> int:
        """Number of outputs."""
        return len(self.codes)

    @property
    def middle(self) -> int:
        """The code that is zero without zero points."""
        return 1 << self.bits - 1

    def all_zeros(self) -> Tensor:
        """Returns the zero points, uint8 [outputs, groups]."""
        return torch.full_like(self.scales, self.middle, dtype=torch.uint8) if self.zeros is None else self.zeros

    def with_plain_scales(self) -> "IntWeight":
        """Returns the weight with scales in fp32, if they are in codes."""
        return self if self.nested is None else replace(self, scales=self.nested.expand(self.scales), nested=None)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [outputs, inputs], rounded once: from fp32, or float64 if that is `dtype`."""
        wide = torch.promote_types(dtype, torch.float32)
        scales = self.with_plain_scales().scales.to(wide)[:, self.groups]
        if self.is_e4m3:
            return self.codes.view(torch.float8_e4m3fn).to(wide).mul_(scales).to(dtype)
        values = self.codes.to(wide)
        if self.table is not None:
            values = self.table.to(wide)[self.codes.int()].mul_(scales)
            return (values if self.factors is None else values.mul_(self.factors[:, None])).to(dtype)
        if self.offsets is not None:
            return values.mul_(scales).add_(self.offsets.to(wide)[:, self.groups]).to(dtype)
        return values.sub_(self.all_zeros()[:, self.groups]).mul_(scales).to(dtype)

    def by_outputs(self, change: Callable[[Tensor], Tensor]) -> "IntWeight":
        """Returns the weight with a change of the outputs, the first dimension, in all its tensors."""
        return replace(
            self,
            codes=change(self.codes),
            scales=change_places(self.scales, change),
            zeros=None if self.zeros is None else change(self.zeros),
            offsets=None if self.offsets is None else change(self.offsets),
            factors=None if self.factors is None else change(self.factors),
            nested=None if self.nested is None else self.nested.by_outputs(change),
        )


def change_places(numbers: Tensor, change: Callable[[Tensor], Tensor]) -> Tensor:
    """Applies a change of places. torch pads no numbers of 8 bits but integers."""
    return change(numbers.view(torch.uint8)).view(numbers.dtype) if numbers.itemsize == 1 else change(numbers)


def _cat(parts: Sequence[Tensor]) -> Tensor:
    """Joins tensors of one dtype. torch joins no numbers of 8 bits on each device but integers."""
    if parts[0].itemsize > 1:
        return torch.cat([*parts])
    return torch.cat([part.view(torch.uint8) for part in parts]).view(parts[0].dtype)


def join(parts: Sequence[IntWeight]) -> IntWeight | None:
    """Returns the outputs of several weights without offsets, one above the other; None if their groups or bits differ."""
    nested = join_nested([part.nested for part in parts])
    if nested is None:
        parts = [part.with_plain_scales() for part in parts]
    first = parts[0]
    if any(part.bits != first.bits or part.scales.dtype != first.scales.dtype for part in parts):
        return None
    if any(not torch.equal(part.groups, first.groups) for part in parts):
        return None
    tables = [part.table for part in parts if part.table is not None]
    if tables and any(len(tables) < len(parts) or not torch.equal(table, tables[0]) for table in tables):
        return None
    factors = [part.factors for part in parts if part.factors is not None]
    has_zeros = any(part.zeros is not None for part in parts)
    return IntWeight(
        codes=torch.cat([part.codes for part in parts]),
        scales=_cat([part.scales for part in parts]),
        zeros=torch.cat([part.all_zeros() for part in parts]) if has_zeros else None,
        groups=first.groups,
        bits=first.bits,
        dtype=first.dtype,
        rounds_inputs=first.rounds_inputs,
        table=first.table,
        factors=torch.cat(factors) if factors else None,
        nested=nested,
    )


@dataclass(frozen=True, slots=True)
class IntStack:
    """Weights one above the other that have no common groups, some of them perhaps not in codes."""

    parts: tuple[IntWeight | GgmlWeight | Tensor, ...]

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns all outputs, rounded once."""
        return torch.cat([part.to(dtype) if isinstance(part, Tensor) else part.dequantize(dtype) for part in self.parts])


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
