"""Norm and rotation in C++, in one pass instead of several. Reference implementations: `rms_norm` and `rotate`."""

import ctypes

import torch
from torch import Tensor

from phalanx_runtime.model.layers import Steps, TorchSteps, rms_norm
from phalanx_runtime.model.native.library import Library, library
from phalanx_runtime.model.rope import Angles, rotate

_Three = ctypes.c_int64 * 3
_Five = ctypes.c_int64 * 5
_DTYPES = (torch.float32, torch.bfloat16)


class NativeSteps:
    """`Steps` of the C++ kernels; unsupported dtypes and strides use torch."""

    __slots__ = ("_functions",)

    def __init__(self, library: Library) -> None:
        self._functions = library.functions

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """As `rms_norm`."""
        if x.dtype not in _DTYPES or weight.dtype not in (x.dtype, torch.float32) or x.dim() != 2 or x.stride(1) != 1:
            return rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
        sizes = _Three(x.shape[0], x.shape[1], x.stride(0))
        wide = (x.dtype == torch.bfloat16, weight.dtype == torch.bfloat16)
        self._functions.phalanx_norm(*wide, x.data_ptr(), weight.data_ptr(), out.data_ptr(), sizes, eps)
        return out

    def turned(self, x: Tensor, angles: Angles) -> Tensor:
        """As `rotate`, in place."""
        cos, sin = angles
        if x.dtype not in _DTYPES or cos.dtype != x.dtype or x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            return rotate(x, angles)
        sizes = _Five(*x.shape, cos.shape[-1], x.stride(0))
        self._functions.phalanx_rotate(x.dtype == torch.bfloat16, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), sizes)
        return x


def open_cpu_steps() -> Steps:
    """Returns the compiled steps, or torch's where the kernels cannot compile."""
    compiled = library()
    return TorchSteps() if compiled is None else NativeSteps(compiled)
