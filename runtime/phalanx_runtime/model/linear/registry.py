"""The layout of linear layers for each device, dtype and processor.

A new backend is one module and one branch of `choose_kernels`.
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.linear.cpu import NativeGated, NativeLinear, Precision, multiplies
from phalanx_runtime.model.linear.linear import (
    DenseLinear,
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

    # Packed for oneDNN.
    packed: bool = False
    # A transposed copy for single rows too, at twice the memory.
    transposed: bool = False
    # C++ kernels where they support the weight.
    compiled: bool = False
    # Of compiled linears: bf16 only where it represents the weight exactly. int8 rounds every linear, compiled or not.
    precision: Precision = "bf16"


def make_linear(weight: Tensor, bias: Tensor | None, kernels: Kernels) -> Linear:
    """Returns a linear layer in the layout of `kernels`."""
    made = library() if kernels.compiled and _compiles(weight, kernels.precision) else None
    if made is not None:
        return NativeLinear(made, weight, bias, kernels.precision)
    if kernels.precision == "int8":
        return QuantizedLinear(weight, bias)
    if kernels.packed:
        return TwofoldLinear(weight, bias) if kernels.transposed else PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


def make_gated(weight: Tensor, bias: Tensor | None, activation: Activation, kernels: Kernels) -> Gated:
    """Returns the gated half of an MLP: gate above up in `weight`, then activation(gate) * up."""
    made = library() if kernels.compiled and activation == "silu" and _compiles(weight, kernels.precision) else None
    if made is not None:
        return NativeGated(made, weight, bias, kernels.precision)
    return PlainGated(make_linear(weight, bias, kernels), activation)


def _compiles(weight: Tensor, precision: Precision) -> bool:
    """Whether a C++ kernel supports the weight, without loss if in bf16."""
    if not multiplies(weight, weight.dtype):
        return False
    return precision == "int8" or weight.dtype == torch.bfloat16 or bool((weight.bfloat16().float() == weight).all())


def choose_kernels(
    dtype: torch.dtype, device: torch.device, cpu: Processor, spare_bytes: int, num_bytes: int, precision: Precision = "bf16"
) -> Kernels:
    """Returns the fastest layout for linears of `num_bytes`, with `spare_bytes` of memory free for a second copy."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return Kernels(precision=precision)
    packed = can_pack(dtype)
    # On AMD, oneDNN beats MKL at any batch size, in bf16 too.
    transposed = packed and cpu.is_intel and dtype == torch.float32 and num_bytes <= spare_bytes
    return Kernels(packed, transposed, library() is not None, precision)
