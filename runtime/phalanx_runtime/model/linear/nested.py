"""Scales that are in codes of 8 bits themselves, as bitsandbytes quantises them twice: table[code] * outer scale + offset."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.model.linear.cpu import BLOCK

TABLE_SIZE = 256
WHOLE_ROW = 62
"""`log_segment` of one outer scale for all groups of an output."""
_SIZES = 8
_HEADER_BYTES = 4 * TABLE_SIZE + 8 * _SIZES


@dataclass(frozen=True, slots=True, kw_only=True)
class NestedScales:
    """What the codes of scales mean, which are uint8 [outputs, groups]."""

    table: Tensor
    """fp32 [256]."""
    outer: Tensor
    """fp32 [outputs, segments]: of 2 ** `log_segment` groups each."""
    offsets: Tensor
    """fp32 [outputs]."""
    log_segment: int

    def expand(self, codes: Tensor) -> Tensor:
        """Returns the scales in fp32, [outputs, groups]."""
        segments = torch.arange(codes.shape[1], device=codes.device) >> self.log_segment
        return self.table[codes.int()] * self.outer[:, segments] + self.offsets[:, None]

    def by_outputs(self, change: Callable[[Tensor], Tensor]) -> "NestedScales":
        """See `IntWeight.by_outputs`."""
        return replace(self, outer=change(self.outer), offsets=change(self.offsets))

    def pack(self, codes: Tensor) -> Tensor:
        """Returns all in the kernel's layout, as bytes: table, sizes, outer scales, offsets, codes."""
        sizes = torch.zeros(_SIZES, dtype=torch.int64)
        sizes[:3] = torch.tensor([self.log_segment, self.outer.shape[1], -(-len(codes) // BLOCK)])
        parts = (self.table, sizes, _blocks(self.outer), _blocks(self.offsets[:, None]), _blocks(codes))
        return torch.cat([part.contiguous().view(torch.uint8).flatten() for part in parts])


def find_nested(table: Tensor, outer: Tensor, offset: float) -> NestedScales | None:
    """Returns the scales if outer ones, [outputs, groups], are equal in segments of two groups or more; None otherwise."""
    logs = [WHOLE_ROW, *range((outer.shape[1] - 1).bit_length() - 1, 0, -1)]
    for log in logs:
        segments = torch.arange(outer.shape[1]) >> log
        firsts = outer[:, :: 1 << log] if log < WHOLE_ROW else outer[:, :1]
        if torch.equal(firsts[:, segments], outer):
            offsets = torch.full((len(outer),), offset)
            return NestedScales(table=table, outer=firsts.contiguous(), offsets=offsets, log_segment=log)
    return None


def join_nested(parts: Sequence[NestedScales | None]) -> NestedScales | None:
    """Returns the scales of several weights, one above the other; None unless all have a table in common, and segments."""
    found = [part for part in parts if part is not None]
    if len(found) < len(parts):
        return None
    first = found[0]
    if any(part.log_segment != first.log_segment or not torch.equal(part.table, first.table) for part in found):
        return None
    outer, offsets = (torch.cat(rows) for rows in ([part.outer for part in found], [part.offsets for part in found]))
    return replace(first, outer=outer, offsets=offsets)


def expand_packed(packed: Tensor, num_groups: int) -> Tensor:
    """Returns the scales in fp32, [padded outputs, groups], of what `NestedScales.pack` returned."""
    log, segments, num_blocks = map(int, packed[4 * TABLE_SIZE : _HEADER_BYTES].view(torch.int64)[:3])
    sizes = [num_blocks * BLOCK * size for size in (4 * segments, 4, num_groups)]
    outer, offsets, codes = torch.split(packed[_HEADER_BYTES:], sizes)
    nested = NestedScales(
        table=packed[: 4 * TABLE_SIZE].view(torch.float32),
        outer=_rows(outer.view(torch.float32), segments),
        offsets=_rows(offsets.view(torch.float32), 1)[:, 0],
        log_segment=log,
    )
    return nested.expand(_rows(codes, num_groups))


def _blocks(numbers: Tensor) -> Tensor:
    """Returns [blocks, columns, 16] of [outputs, columns]."""
    padded = F.pad(numbers, (0, 0, 0, -len(numbers) % BLOCK))
    return padded.view(-1, BLOCK, numbers.shape[1]).transpose(1, 2)


def _rows(blocks: Tensor, columns: int) -> Tensor:
    return blocks.view(-1, columns, BLOCK).transpose(1, 2).reshape(-1, columns)
