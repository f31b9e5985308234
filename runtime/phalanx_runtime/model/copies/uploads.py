"""Copies values of the host to a device, from pinned memory: other copies wait for earlier work of the device."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ALIGNMENT = 16
"""Bytes: kernels load vectors of this size."""

Array = NDArray[Any]


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
