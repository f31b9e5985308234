"""Linear layers with codes of 4 or 8 bits in C++: codes stay packed in memory, sums are fp32.

Reference: `DequantizedLinear`. Codes of 4 bits that are made for rounded inputs multiply inputs in int8. Each row has the scale
maximum / 127; the sums of a group are exact.
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.model.linear.cpu import BLOCK, GROUPED, ROUNDED_GROUPS, KernelArguments, columns
from phalanx_runtime.model.linear.integer import IntWeight, change_places
from phalanx_runtime.model.linear.nested import expand_packed
from phalanx_runtime.model.native.library import Library

OCTET = 8
"""Inputs that the kernel reads at once."""
_Sizes = ctypes.c_int64 * 11
_SCALE_KINDS = {
    torch.float32: 0,
    torch.bfloat16: 1,
    torch.float16: 2,
    torch.float8_e8m0fnu: 3,
    torch.float8_e4m3fn: 4,
    torch.uint8: 5,
}
_FIELDS = (0, 2, 4, 6, 1, 3, 5, 7)
"""The input of each field of an octet of 4 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupedBlocks:
    """A weight in the kernel's layout: blocks of 16 outputs, and each group padded to whole octets."""

    codes: Tensor
    """4 bits: int32 [blocks, octets, 16]; 8 bits: int8 [blocks, octets * 4, 16, 2], code - 128, or float8_e4m3fn."""
    scales: Tensor
    """[blocks, groups, 16], or the bytes of `NestedScales.pack`."""
    offsets: Tensor | None
    """Zero points in uint8, or the values of code 0 in bfloat16: [blocks, groups, 16]."""
    ends: Tensor
    """int64 [groups]: ends of the groups in octets."""
    order: Tensor | None
    """int32 [octets * 8]: the input of each column, `inputs` for padding; None: as they are."""
    factors: Tensor | None
    """fp32 [padded outputs]."""
    table: Tensor | None
    """fp32 [16]: the values of codes of 4 bits."""
    outputs: int
    inputs: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        parts = (self.codes, self.scales, self.offsets, self.ends, self.order, self.factors, self.table)
        return sum(part.nbytes for part in parts if part is not None)

    @property
    def is_e4m3(self) -> bool:
        """Whether codes of 8 bits are numbers in e4m3."""
        return self.codes.dtype == torch.float8_e4m3fn

    @property
    def bits(self) -> int:
        """4 or 8."""
        return 4 if self.codes.dtype == torch.int32 else 8

    def arrange(self, x: Tensor) -> Tensor:
        """Returns the inputs in the order of the columns."""
        if self.order is None:
            return x if x.stride(-1) == 1 else x.contiguous()
        padded = x if len(self.order) == self.inputs else F.pad(x, (0, 1))
        return padded.index_select(1, self.order)

    def dequantize(self, dtype: torch.dtype) -> Tensor:
        """Returns [outputs, inputs], rounded once: from fp32, or float64 if that is `dtype`."""
        wide, middle = torch.promote_types(dtype, torch.float32), 1 << self.bits - 1
        sizes = torch.diff(self.ends, prepend=self.ends.new_zeros(1)) * OCTET
        codes, groups = self._columns(), torch.repeat_interleave(sizes)
        is_nested = self.scales.dtype == torch.uint8
        plain = expand_packed(self.scales, len(self.ends)) if is_nested else _rows(self.scales)
        scales = plain.to(wide)[: self.outputs, groups]
        if self.is_e4m3:
            values = codes[: self.outputs].view(torch.float8_e4m3fn).to(wide).mul_(scales)
            return self._arranged(values).to(dtype)
        values = codes[: self.outputs].to(wide)
        if self.table is not None:
            values = self.table.to(wide)[codes[: self.outputs].int()].mul_(scales)
            values = values if self.factors is None else values.mul_(self.factors[: self.outputs, None])
        elif self.offsets is None:
            values = values.sub_(middle).mul_(scales)
        elif self.offsets.dtype == torch.uint8:
            values = values.sub_(_rows(self.offsets)[: self.outputs, groups]).mul_(scales)
        else:
            values = values.mul_(scales).add_(_rows(self.offsets).to(wide)[: self.outputs, groups])
        return self._arranged(values).to(dtype)

    def _arranged(self, values: Tensor) -> Tensor:
        """Returns [outputs, inputs] of [outputs, columns]."""
        if self.order is None:
            return values
        arranged = values.new_empty(self.outputs, self.inputs + 1)
        arranged[:, self.order] = values
        return arranged[:, : self.inputs]

    def _columns(self) -> Tensor:
        """Returns the codes, uint8 [padded outputs, columns]."""
        if self.bits == 8:
            flipped = 0 if self.is_e4m3 else 128
            return (self.codes.view(torch.uint8) ^ flipped).permute(0, 2, 1, 3).reshape(len(self.codes) * BLOCK, -1)
        fields = self.codes.view(torch.uint8).view(*self.codes.shape, 4)
        fields = torch.stack((fields & 15, fields >> 4), 4).flatten(3)  # of inputs 0, 2, 4, 6, 1, 3, 5, 7
        octets = torch.empty_like(fields)
        octets[..., list(_FIELDS)] = fields
        return octets.permute(0, 2, 1, 3).reshape(len(self.codes) * BLOCK, -1)


def can_round_groups(weight: IntWeight) -> bool:
    """Whether the kernel supports the weight with rounded inputs: 4 bits without a table, made for them, computed in bf16."""
    is_plain = weight.table is None and weight.offsets is None
    return weight.rounds_inputs and weight.bits == 4 and is_plain and weight.dtype == torch.bfloat16


def make_grouped_blocks(weight: IntWeight) -> GroupedBlocks:
    """Packs a weight. Inputs are sorted by group, if they are not."""
    outputs, inputs = weight.codes.shape
    sizes = weight.groups.bincount(minlength=weight.scales.shape[1])
    padded = -(-sizes // OCTET) * OCTET
    starts, ends = sizes.cumsum(0) - sizes, padded.cumsum(0)
    inputs_by_group = weight.groups.argsort(stable=True)
    group = weight.groups[inputs_by_group]
    columns = torch.arange(inputs) - starts[group] + (ends - padded)[group]
    order = torch.full((int(ends[-1]),), inputs)
    order[columns] = inputs_by_group
    is_arranged = torch.equal(order, torch.arange(inputs))
    codes = weight.codes if is_arranged else F.pad(weight.codes, (0, 1))[:, order]
    offsets = weight.zeros if weight.offsets is None else weight.offsets
    return GroupedBlocks(
        codes=(_pack4 if weight.bits == 4 else _pack_e4m3 if weight.is_e4m3 else _pack8)(
            F.pad(codes, (0, 0, 0, -outputs % BLOCK))
        ),
        scales=_blocks(weight.scales) if weight.nested is None else weight.nested.pack(weight.scales),
        offsets=None if offsets is None else _blocks(offsets),
        ends=ends // OCTET,
        order=None if is_arranged else order.int(),
        factors=None if weight.factors is None else F.pad(weight.factors, (0, -outputs % BLOCK)),
        table=weight.table,
        outputs=outputs,
        inputs=inputs,
    )


def _pack4(codes: Tensor) -> Tensor:
    octets = codes.view(-1, BLOCK, codes.shape[1] // OCTET, OCTET)[..., list(_FIELDS)]
    fields = octets[..., ::2] | octets[..., 1::2] << 4
    return fields.permute(0, 2, 1, 3).contiguous().view(torch.int32)[..., 0]


def _pack8(codes: Tensor) -> Tensor:
    return _pairs(codes ^ 128).view(torch.int8)


def _pack_e4m3(codes: Tensor) -> Tensor:
    return _pairs(codes).view(torch.float8_e4m3fn)


def _pairs(codes: Tensor) -> Tensor:
    return codes.view(-1, BLOCK, codes.shape[1] // 2, 2).permute(0, 2, 1, 3).contiguous()


def _blocks(numbers: Tensor) -> Tensor:
    """Returns [blocks, groups, 16] of [outputs, groups]."""
    padded = change_places(numbers, lambda part: F.pad(part, (0, 0, 0, -part.shape[0] % BLOCK)))
    return padded.view(-1, BLOCK, numbers.shape[1]).transpose(1, 2).contiguous()


def _rows(blocks: Tensor) -> Tensor:
    """Inverts `_blocks`, with its padding."""
    return blocks.transpose(1, 2).reshape(-1, blocks.shape[1])


@dataclass(frozen=True, slots=True)
class GroupedProduct:
    """`Blocks` of codes and a bias."""

    library: Library
    codes: GroupedBlocks
    bias: Tensor | None
    """fp32, padded to whole blocks."""
    rounds_inputs: bool
    """Whether inputs are multiplied in int8."""
    addresses: tuple[int | None, ...]
    """Of the kernel's arguments between x and y; read once, as calls of few rows take microseconds."""
    layout: tuple[int, ...]
    """Bits, number of groups, kinds of scales, offsets and codes."""

    @property
    def outputs(self) -> int:
        """See `Blocks`."""
        return self.codes.outputs

    @property
    def num_bytes(self) -> int:
        """See `Blocks`."""
        return self.codes.num_bytes + (0 if self.bias is None else self.bias.nbytes)

    @property
    def arguments(self) -> KernelArguments | None:
        """See `Blocks`."""
        if self.codes.order is not None:
            return None
        *parts, bias = (address or 0 for address in self.addresses)
        values = (0, 0) if self.rounds_inputs else ()
        return ROUNDED_GROUPS if self.rounds_inputs else GROUPED, *parts, *values, bias, self.codes.inputs, *self.layout

    def multiply(self, x: Tensor, y: Tensor, mode: int) -> None:
        """See `Blocks`."""
        x = self.codes.arrange(x)
        functions = self.library.functions
        multiply = functions.phalanx_rounded_groups if self.rounds_inputs else functions.phalanx_grouped
        sizes = _Sizes(*(x.shape[0], columns(y, mode), x.shape[1], x.stride(0), y.stride(0), mode, *self.layout))
        multiply(x.dtype == torch.bfloat16, x.data_ptr(), *self.addresses, y.data_ptr(), sizes)


def make_grouped_product(library: Library, weight: IntWeight, bias: Tensor | None) -> GroupedProduct:
    """Packs a weight and its bias."""
    wide = None if bias is None else F.pad(bias.float(), (0, -len(bias) % BLOCK))
    blocks, rounds_inputs = make_grouped_blocks(weight), library.has_int8_dot and can_round_groups(weight)
    values = () if rounds_inputs else (blocks.factors, blocks.table)
    parts = (blocks.codes, blocks.scales, blocks.offsets, blocks.ends, *values, wide)
    offset_kind = 0 if blocks.offsets is None else 1 if blocks.offsets.dtype == torch.uint8 else 2
    return GroupedProduct(
        library=library,
        codes=blocks,
        bias=wide,
        rounds_inputs=rounds_inputs,
        addresses=tuple(None if part is None else part.data_ptr() for part in parts),
        layout=(blocks.bits, len(blocks.ends), _SCALE_KINDS[blocks.scales.dtype], offset_kind, blocks.is_e4m3),
    )
