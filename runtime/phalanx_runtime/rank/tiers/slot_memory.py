"""Host memory of a rank for the slots of its host tier, which grows and shrinks.

Slots are in segments of `SEGMENT_SLOTS`, each one mapping. All are mapped at the start, so that no rank fails
in a plan that adds slots: a segment takes memory as it is first written, and returns it once it has no slots. For a GPU a
segment with slots is pinned; one that cannot be pinned later serves too, and the fitted times of loads follow its slower copies.
"""

import logging
import mmap
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from phalanx_runtime.errors import ModelError
from phalanx_runtime.rank.memory.kv_cache import lazily_mapped

log = logging.getLogger(__name__)

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
        longer for each. Raises OSError and ModelError if the system refuses memory.
        """
        self._row_bytes = list(row_bytes)
        self._lock, has_arrays = lock or NO_LOCK, lock is None
        self._segments: list[list[Any]] = []
        """Rows of each segment: one tensor or array per layer's keys, values or scales."""
        self._mappings: list[tuple[mmap.mmap, int, int]] = []
        """Of each segment, with its address and size."""
        for first in range(0, limit, SEGMENT_SLOTS):
            self._map_segment(min(SEGMENT_SLOTS, limit - first), has_arrays=has_arrays)
        self._is_locked = [False] * len(self._segments)
        self.num_slots = num_slots
        for segment in range(_num_segments(num_slots)):
            self._lock_segment(segment)

    def resize(self, num_slots: int) -> None:
        """Adds or removes slots at the end; those before `num_slots` keep their content. No copy is in progress."""
        for segment in range(_num_segments(self.num_slots), _num_segments(num_slots)):
            try:
                self._lock_segment(segment)
            except ModelError as error:
                log.warning("added host memory is not pinned: its copies are slower", extra={"why": str(error)})
        for segment in range(_num_segments(num_slots), _num_segments(self.num_slots)):
            self._return_segment(segment)
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

    def _map_segment(self, count: int, *, has_arrays: bool) -> None:
        memory, tensors = lazily_mapped([((count, size), torch.uint8) for size in self._row_bytes])
        address, last = tensors[0].data_ptr(), tensors[-1]
        self._segments.append([tensor.numpy() for tensor in tensors] if has_arrays else tensors)
        self._mappings.append((memory, address, last.data_ptr() + last.nbytes - address))

    def _lock_segment(self, segment: int) -> None:
        _, address, size = self._mappings[segment]
        self._lock.lock(address, size)
        self._is_locked[segment] = True

    def _return_segment(self, segment: int) -> None:
        memory, address, _ = self._mappings[segment]
        if self._is_locked[segment]:
            self._lock.unlock(address)
            self._is_locked[segment] = False
        with suppress(OSError):  # the memory of a process that locks all of it stays
            memory.madvise(mmap.MADV_REMOVE)  # of a shared mapping, as this one is, no other advice frees the memory


def _num_segments(num_slots: int) -> int:
    return -(-num_slots // SEGMENT_SLOTS)
