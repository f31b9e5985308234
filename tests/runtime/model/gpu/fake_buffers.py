"""Buffers of ranks that are threads of one process."""

import threading
from collections.abc import Sequence

import torch
from torch import Tensor

from phalanx_runtime.collective.peer_buffers import NUM_SLOTS

TIMEOUT_S = 60.0


class SharedBuffers:
    """Memory of all ranks."""

    def __init__(self, world_size: int, max_bytes: int) -> None:
        self.max_bytes = max_bytes
        self.memory = [[torch.zeros(max_bytes, dtype=torch.uint8) for _ in range(world_size)] for _ in range(NUM_SLOTS)]
        self.barriers = [threading.Barrier(world_size) for _ in range(NUM_SLOTS)]

    def of(self, rank: int) -> "ThreadBuffers":
        """Returns the `PeerBuffers` of a rank."""
        return ThreadBuffers(self, rank)


class ThreadBuffers:
    """`PeerBuffers` of one thread."""

    def __init__(self, shared: SharedBuffers, rank: int) -> None:
        self.rank = rank
        self.max_bytes = shared.max_bytes
        self._shared = shared
        self.recordable: int | None = None
        """Barriers before a capture lacks memory. While it is set, barriers do not wait, as while a CUDA graph is captured."""

    def at(self, slot: int, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        size = torch.Size(shape).numel()
        return [memory.view(dtype)[:size].view(*shape) for memory in self._shared.memory[slot]]

    def barrier(self, slot: int) -> None:
        if self.recordable is None:
            self._shared.barriers[slot].wait(TIMEOUT_S)
        elif self.recordable == 0:
            raise torch.OutOfMemoryError("out of memory")
        else:
            self.recordable -= 1
