"""`DecoderOps` in C++, in one pass each."""

import ctypes

import torch
from torch import Tensor

from phalanx_runtime.model.layers import DecoderOps, TorchOps, rms_norm
from phalanx_runtime.model.native.library import Library, library
from phalanx_runtime.model.rope import Angles, rotate

_NormSizes = ctypes.c_int64 * 3
_RotateSizes = ctypes.c_int64 * 5
_DTYPES = (torch.float32, torch.bfloat16)


class NativeOps(TorchOps):
    """`DecoderOps` with kernels for norm and rotation; unsupported dtypes and strides use torch."""

    __slots__ = ("_functions",)

    def __init__(self, library: Library) -> None:
        self._functions = library.functions

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """See `DecoderOps`."""
        if x.dtype not in _DTYPES or weight.dtype not in (x.dtype, torch.float32) or x.dim() != 2 or x.stride(1) != 1:
            return rms_norm(x, weight, eps)
        out = torch.empty(x.shape, dtype=x.dtype)
        sizes = _NormSizes(x.shape[0], x.shape[1], x.stride(0))
        is_bf16 = (x.dtype == torch.bfloat16, weight.dtype == torch.bfloat16)
        self._functions.phalanx_norm(*is_bf16, x.data_ptr(), weight.data_ptr(), out.data_ptr(), sizes, eps)
        return out

    def rotate(self, x: Tensor, angles: Angles) -> Tensor:
        """Applies the rotary embedding to [tokens, heads, dim], in place."""
        cos, sin = angles
        if x.dtype not in _DTYPES or cos.dtype != x.dtype or x.stride(2) != 1 or x.stride(1) != x.shape[2]:
            return rotate(x, angles)
        sizes = _RotateSizes(*x.shape, cos.shape[-1], x.stride(0))
        self._functions.phalanx_rotate(x.dtype == torch.bfloat16, x.data_ptr(), cos.data_ptr(), sin.data_ptr(), sizes)
        return x


def open_cpu_ops() -> DecoderOps:
    """Opens the kernels, or torch's operations where they cannot compile."""
    compiled = library()
    return TorchOps() if compiled is None else NativeOps(compiled)
