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
        self.barrier = threading.Barrier(world_size)

    def of(self, rank: int) -> "ThreadBuffers":
        """Returns the `PeerBuffers` of a rank."""
        return ThreadBuffers(self, rank)


class ThreadBuffers:
    """`PeerBuffers` of one thread."""

    def __init__(self, shared: SharedBuffers, rank: int) -> None:
        self.rank = rank
        self.max_bytes = shared.max_bytes
        self._shared = shared
        self._slot = 0

    def next(self, shape: Sequence[int], dtype: torch.dtype) -> list[Tensor]:
        self._slot = (self._slot + 1) % NUM_SLOTS
        size = torch.Size(shape).numel()
        return [memory.view(dtype)[:size].view(*shape) for memory in self._shared.memory[self._slot]]

    def barrier(self) -> None:
        self._shared.barrier.wait(TIMEOUT_S)
