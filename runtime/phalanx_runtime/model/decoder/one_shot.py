"""One kernel for the sum over ranks after each half of a layer, with residual and norm: for few rows, on GPUs of one node.

Each rank writes its part, waits for the others, and reads all parts: one hop, where a ring needs 2 * (ranks - 1). It reads
ranks * rows * hidden numbers, so that with many rows the all-reduce of the collective is faster.
"""

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor

from phalanx_runtime.collective.peer_buffers import NUM_SLOTS, PeerBuffers

ATTENTION_SLOT, MLP_SLOT = range(NUM_SLOTS)
"""Buffers of the sums after each half of a layer: they alternate, as `PeerBuffers` requires, also from step to step."""


class PartsOps(Protocol):
    """The kernel. Implemented in `decoder.gpu`."""

    def can_add_parts(self, x: Tensor, after: Tensor | None, before: Tensor | None) -> bool:
        """Returns whether the kernel supports x, [rows, hidden], with these weights."""
        ...

    def add_parts_norm(self, x: Tensor, parts: list[Tensor], after: Tensor | None, before: Tensor | None, eps: float) -> Tensor:
        """See `DecoderOps.add_norm`, with y as the sum of the parts: [rows, hidden] each."""
        ...


class OneShot:
    """Sums of up to `max_rows` rows, which all ranks choose alike."""

    def __init__(self, buffers: PeerBuffers, ops: PartsOps, max_rows: int) -> None:
        self.max_rows = max_rows
        self.num_computed = 0
        """Sums by the kernel."""
        self._buffers = buffers
        self._ops = ops

    def fits(self, x: Tensor, after: Tensor | None, before: Tensor | None) -> bool:
        """Returns whether `add_norm` supports x, [rows, hidden], with these weights."""
        return len(x) <= self.max_rows and x.nbytes <= self._buffers.max_bytes and self._ops.can_add_parts(x, after, before)

    def add_norm(
        self, x: Tensor, partial: Tensor, after: Tensor | None, before: Tensor | None, eps: float, *, slot: int
    ) -> Tensor:
        """See `DecoderOps.add_norm`, with y as the sum of `partial` over the ranks: [rows, hidden]. Equal bits on all ranks.

        slot: of the `PeerBuffers`; another one than in the previous sum, unless the collective's operations are between them.
        """
        self.num_computed += 1
        parts = self._buffers.at(slot, partial.shape, partial.dtype)
        parts[self._buffers.rank].copy_(partial)
        self._buffers.barrier(slot)
        return self._ops.add_parts_norm(x, parts, after, before, eps)


def one_shot_rows(all_reduce_us: Mapping[int, int], one_shot_us: Mapping[int, int]) -> int:
    """Returns up to how many rows one shot is faster, 0 for none. Both: time by number of rows, of the slowest rank."""
    longest = 0
    for rows in sorted(one_shot_us):
        if one_shot_us[rows] >= all_reduce_us[rows]:
            break
        longest = rows
    return longest
