"""Memory of each GPU of a node that the other GPUs read directly, by torch's symmetric memory.

A rank writes its own buffer of a slot, all ranks meet at `barrier`, then each reads all buffers of the slot. Callers alternate
two slots: at a barrier every rank has read those of the exchange before the previous one, so that one barrier per exchange is
enough. The caller names the slot, and no slot is kept here: a capture that fails on one rank leaves no rank in another slot.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._C._distributed_c10d import Store

NUM_SLOTS = 2


class PeerBuffers(Protocol):
    """Buffers of all ranks. All ranks exchange equal shapes and slots in the same order, each on its current stream.

    Between two exchanges of one slot all ranks meet: by an exchange of the other slot, or by an operation of the collective.
    """

    @property
    def rank(self) -> int:
        """This rank."""
        ...

    @property
    def max_bytes(self) -> int:
        """Size of a buffer."""
        ...

    def at(self, slot: int, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """Returns the buffer of each rank, by rank. slot: below `NUM_SLOTS`. Any shape up to `max_bytes`."""
        ...

    def barrier(self, slot: int) -> None:
        """Queues a wait until all ranks have queued theirs for this slot: then their earlier writes are visible."""
        ...


class SymmetricBuffers:
    """`PeerBuffers` over NVLink or PCIe. All ranks open them together. Raises RuntimeError if a GPU cannot read another."""

    def __init__(self, store: Store, rank: int, world_size: int, *, max_bytes: int, device: torch.device) -> None:
        from torch._C._distributed_c10d import _SymmetricMemory  # only in CUDA builds

        name = "phalanx-peer-buffers"
        symmetric: Any = _SymmetricMemory
        symmetric.set_group_info(name, rank, world_size, store)
        self.max_bytes = max_bytes
        self._memory: Tensor = symmetric.empty_strided_p2p((NUM_SLOTS * max_bytes,), (1,), torch.uint8, device, name)
        self._handle = symmetric.rendezvous(self._memory, name)
        self._world_size = world_size
        self.rank = rank

    def at(self, slot: int, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        """See `PeerBuffers`."""
        offset = slot * self.max_bytes // dtype.itemsize
        return [self._handle.get_buffer(rank, shape, dtype, offset) for rank in range(self._world_size)]

    def barrier(self, slot: int) -> None:
        """See `PeerBuffers`."""
        self._handle.barrier(channel=slot)
