"""Host memory of a rank for the slots of its host tier, which grows and shrinks.

Slots are in segments of `SEGMENT_SLOTS`, each one mapping: a segment without slots is unmapped, which returns its memory. On CPU
a segment takes memory as it is first written. For a GPU it is pinned from the start.
"""

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank.memory.kv_cache import lazily_zeroed

SEGMENT_SLOTS = 64
"""One plan adds or removes about as many."""
Row = Tensor | NDArray[np.uint8]
"""Bytes of one page in one layer's keys, values or scales."""


class PageLock(Protocol):
    """Locks memory for copies by a device."""

    def lock(self, address: int, num_bytes: int) -> None:
        """Locks mapped memory. Raises ModelError if the system refuses."""
        ...

    def unlock(self, address: int) -> None:
        """Unlocks memory that was locked from this address on; no copy uses it."""
        ...


class CudaPageLock:
    """Registers memory with CUDA."""

    def __init__(self, runtime: Any) -> None:
        """runtime: `torch.cuda.cudart()`."""
        self._runtime = runtime

    def lock(self, address: int, num_bytes: int) -> None:
        """See `PageLock`."""
        _check(self._runtime.cudaHostRegister(address, num_bytes, 0), f"{num_bytes >> 20} MiB of host memory cannot be pinned")

    def unlock(self, address: int) -> None:
        """See `PageLock`."""
        _check(self._runtime.cudaHostUnregister(address), "host memory cannot be unlocked")


def open_page_lock() -> PageLock:
    """Returns the lock of this process's devices; without any, one that does nothing."""
    if not torch.cuda.is_available():
        return NO_LOCK
    open_runtime: Any = torch.cuda.cudart
    return CudaPageLock(open_runtime())


def _check(code: Any, failure: str) -> None:
    if int(code):
        raise ModelError(f"{failure}: CUDA error {int(code)}")


class _NoLock:
    def lock(self, address: int, num_bytes: int) -> None:
        pass

    def unlock(self, address: int) -> None:
        pass


NO_LOCK: PageLock = _NoLock()


class SlotMemory:
    """Slots 0 to `num_slots` - 1, each with a row of bytes for each of `row_bytes`."""

    def __init__(self, row_bytes: Sequence[int], num_slots: int, limit: int, lock: PageLock | None = None) -> None:
        """limit: the largest number of slots. lock: of the device that copies; None on CPU, where rows are arrays: torch takes
        longer for each.
        """
        self._row_bytes, self._limit = list(row_bytes), limit
        self._lock, self._has_arrays = lock or NO_LOCK, lock is None
        self._segments: list[list[Any]] = []
        """Rows of each segment: one tensor or array per layer's keys, values or scales."""
        self._addresses: list[int] = []
        self.num_slots = 0
        self.resize(num_slots)

    def resize(self, num_slots: int) -> None:
        """Maps or unmaps segments; slots before `num_slots` keep their content. No copy is in progress."""
        num_segments = -(-num_slots // SEGMENT_SLOTS)
        while len(self._segments) > num_segments:
            self._lock.unlock(self._addresses.pop())
            self._segments.pop()
        while len(self._segments) < num_segments:
            self._map_segment()
        self.num_slots = num_slots

    def row(self, layer: int, slot: int) -> Any:
        """Returns the row of a slot: of one layer's keys, values or scales."""
        return self._segments[slot // SEGMENT_SLOTS][layer][slot % SEGMENT_SLOTS]

    def parts(self, slot: int) -> list[memoryview]:
        """Returns all rows of a slot."""
        rows = (rows[slot % SEGMENT_SLOTS] for rows in self._segments[slot // SEGMENT_SLOTS])
        return [(row.numpy() if isinstance(row, Tensor) else row).data for row in rows]

    def move(self, moves: Sequence[tuple[int, int]]) -> None:
        """Copies slots, from and to, in order."""
        for layer in range(len(self._row_bytes)):
            for source, target in moves:
                self.row(layer, target)[:] = self.row(layer, source)

    def _map_segment(self) -> None:
        count = min(SEGMENT_SLOTS, self._limit - len(self._segments) * SEGMENT_SLOTS)
        tensors = lazily_zeroed([((count, size), torch.uint8) for size in self._row_bytes])
        address, last = tensors[0].data_ptr(), tensors[-1]
        self._lock.lock(address, last.data_ptr() + last.nbytes - address)
        self._segments.append([tensor.numpy() for tensor in tensors] if self._has_arrays else tensors)
        self._addresses.append(address)
