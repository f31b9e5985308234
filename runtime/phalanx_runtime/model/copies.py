"""Copies from host to device through pinned memory: values of a step, and weights while the next part is read.

Copies from other memory wait for earlier work of the device.
"""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from itertools import cycle
from typing import Any, Protocol, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes: kernels load vectors of this size."""

Array = NDArray[Any]
GPU_READERS = 4
"""Files that a rank with a GPU reads at once."""
BUFFER_BYTES = 32 << 20
"""Pinned memory of one buffer."""
NUM_BUFFERS = 2
"""Buffers of a reader: one is filled while the other is copied."""
Part = TypeVar("Part")
Result = TypeVar("Result")


def upload(arrays: Sequence[Array], device: torch.device) -> list[Tensor]:
    """Returns the arrays as tensors on the device. On a GPU they share memory; on the CPU each shares it with its array."""
    if device.type == "cpu":
        return [torch.from_numpy(np.ascontiguousarray(array)) for array in arrays]
    return unpack(to_device(torch.from_numpy(pack(arrays)), device), arrays)


def to_device(values: Tensor, device: torch.device) -> Tensor:
    """Copies a tensor of the host. Any shape."""
    if device.type == "cuda" and torch.cuda.is_available():
        values = values.pin_memory()
    return values.to(device, non_blocking=True)


def pack(arrays: Sequence[Array]) -> NDArray[np.uint8]:
    """Returns the bytes of the arrays, each at a multiple of `ALIGNMENT`."""
    packed = np.empty(sum(map(_padded_bytes, arrays)), np.uint8)
    start = 0
    for array in arrays:
        packed[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        start += _padded_bytes(array)
    return packed


def unpack(packed: Tensor, arrays: Sequence[Array]) -> list[Tensor]:
    """Returns views with dtypes and shapes of the arrays. packed: [bytes] uint8, by `pack`."""
    tensors, start = [], 0
    for array in arrays:
        dtype = torch.from_numpy(np.empty(0, array.dtype)).dtype
        part = packed[start : start + array.nbytes] if array.size else packed.new_empty(0)
        tensors.append(part.view(dtype).view(array.shape))
        start += _padded_bytes(array)
    return tensors


def _padded_bytes(array: Array) -> int:
    return -(-array.nbytes // ALIGNMENT) * ALIGNMENT


class CopyEvent(Protocol):
    """A point in the copies to the device."""

    def record(self) -> None:
        """Marks the end of the copies that were queued."""
        ...

    def synchronize(self) -> None:
        """Waits until the marked copies are done."""
        ...


class StagingRing:
    """Buffers in pinned memory, used in turn. One thread at a time."""

    def __init__(self, buffers: Sequence[Tensor], make_event: Callable[[], CopyEvent]) -> None:
        """`buffers`: uint8 vectors of equal size."""
        self._size = len(buffers[0])
        self._slots = cycle([(buffer, make_event()) for buffer in buffers])

    def copy(self, source: Tensor, target: Tensor) -> None:
        """Copies to the device and converts; returns when `source` has been read. target: contiguous, of equal shape."""
        rows = self._size // max(1, target[:1].nbytes) if target.dim() else 0
        if rows == 0:
            target.copy_(source)
            return
        for start in range(0, len(target), rows):
            buffer, event = next(self._slots)
            event.synchronize()
            part = target[start : start + rows]
            staged = buffer[: part.nbytes].view(part.dtype).view(part.shape)
            staged.copy_(source[start : start + rows])
            part.copy_(staged, non_blocking=True)
            event.record()


def open_staging(device: torch.device) -> StagingRing | None:
    """Returns the ring of one reader; None without a GPU: a CPU reads mapped files directly."""
    if device.type != "cuda" or not torch.cuda.is_available():
        return None
    buffers = [torch.empty(BUFFER_BYTES, dtype=torch.uint8, pin_memory=True) for _ in range(NUM_BUFFERS)]
    return StagingRing(buffers, torch.cuda.Event)


def read_in_threads(parts: Sequence[Part], read: Callable[[Part], Result], device: torch.device) -> list[Result]:
    """Reads each part in a thread of its own, with `device` as its current one. Raises the error of the first part that fails."""

    def run(part: Part) -> Result:
        with torch.cuda.device(device) if device.type == "cuda" else nullcontext():
            return read(part)

    with ThreadPoolExecutor(len(parts), "weights") as pool:
        return list(pool.map(run, parts))
