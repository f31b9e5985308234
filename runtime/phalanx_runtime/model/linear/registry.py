"""The layout of linear layers. A new backend is one module and one branch of `choose_kernels`."""

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.layers import gate
from phalanx_runtime.model.linear.cpu import NativeGated, NativeLinear, Precision, can_multiply
from phalanx_runtime.model.linear.linear import (
    DenseLinear,
    Gate,
    Gated,
    Linear,
    PackedLinear,
    PlainGated,
    QuantizedLinear,
    TwofoldLinear,
    can_pack,
)
from phalanx_runtime.model.native.library import library
from phalanx_runtime.model.processor import Processor


@dataclass(frozen=True, slots=True)
class Kernels:
    """Layout of linear layers."""

    packed: bool = False
    """Weights packed by oneDNN."""
    transposed: bool = False
    """With a transposed copy for single rows, at twice the memory."""
    compiled: bool = False
    """C++ kernels for supported weights."""
    precision: Precision = "bf16"
    """int8 rounds all linears; bf16 compiles those that it represents exactly."""


def make_linear(weight: Tensor, bias: Tensor | None, kernels: Kernels) -> Linear:
    """Creates a linear layer. weight: [out, in]; bias: [out]."""
    compiled = library() if kernels.compiled and _has_kernel(weight, kernels.precision) else None
    if compiled is not None:
        return NativeLinear(compiled, weight, bias, kernels.precision)
    if kernels.precision == "int8":
        return QuantizedLinear(weight, bias)
    if kernels.packed:
        return TwofoldLinear(weight, bias) if kernels.transposed else PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


def make_gated(weight: Tensor, bias: Tensor | None, activation: Activation, kernels: Kernels, gate: Gate = gate) -> Gated:
    """Creates the gated half of an MLP from gate above up. weight: [out, in]; bias: [out]; `gate`: as in `DecoderOps`."""
    compiled = library() if kernels.compiled and activation == "silu" and _has_kernel(weight, kernels.precision) else None
    if compiled is not None:
        return NativeGated(compiled, weight, bias, kernels.precision)
    return PlainGated(make_linear(weight, bias, kernels), activation, gate)


def _has_kernel(weight: Tensor, precision: Precision) -> bool:
    """Whether a kernel supports the weight, in bf16 without loss."""
    if not can_multiply(weight, weight.dtype):
        return False
    return precision == "int8" or weight.dtype == torch.bfloat16 or bool((weight.bfloat16().float() == weight).all())


def choose_kernels(
    dtype: torch.dtype, device: torch.device, cpu: Processor, spare_bytes: int, num_bytes: int, precision: Precision = "bf16"
) -> Kernels:
    """Returns the fastest layout, with a second copy of `num_bytes` if it fits `spare_bytes`."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return Kernels(precision=precision)
    packed = can_pack(dtype)
    # On AMD, oneDNN beats MKL at any batch size.
    transposed = packed and cpu.is_intel and dtype == torch.float32 and num_bytes <= spare_bytes
    return Kernels(packed, transposed, library() is not None, precision)
