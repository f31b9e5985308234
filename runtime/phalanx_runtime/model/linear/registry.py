"""The layout of linear layers. A new backend is one module and one branch of `choose_kernels`."""

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.ggml.weight import GgmlWeight
from phalanx_runtime.model.layers import gate
from phalanx_runtime.model.linear.cpu import (
    DTYPES,
    Blocks,
    NativeGated,
    NativeLinear,
    Precision,
    can_multiply,
    interleave,
    make_blocks,
)
from phalanx_runtime.model.linear.ggml import make_ggml_product
from phalanx_runtime.model.linear.grouped import make_grouped_blocks, make_grouped_product
from phalanx_runtime.model.linear.integer import IntStack, IntWeight
from phalanx_runtime.model.linear.linear import (
    DenseLinear,
    Gate,
    Gated,
    Linear,
    PackedLinear,
    PlainGated,
    QuantizedLinear,
    StackedLinear,
    TwofoldLinear,
    can_pack,
)
from phalanx_runtime.model.linear.packed.pack import as_int4, pack, pack_codes, pack_ggml, quantize_fp8
from phalanx_runtime.model.linear.packed.reference import DequantizedLinear
from phalanx_runtime.model.linear.packed.weight import Format, Fp8Weight, PackedWeight
from phalanx_runtime.model.linear.rounded import can_round, make_rounded_blocks
from phalanx_runtime.model.native.library import Library, library
from phalanx_runtime.model.operators import launch_obstacle
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
    precision: Precision | Format = "bf16"
    """A quantisation rounds all linears; bf16 compiles those that it represents exactly."""
    triton: bool = False
    """Triton kernels for quantised weights."""


Weight = Tensor | Fp8Weight | IntWeight | GgmlWeight | IntStack


def make_linear(weight: Weight, bias: Tensor | None, kernels: Kernels) -> Linear:
    """Creates a linear layer; a format without a kernel is dequantised to its compute dtype. weight: [out, in]; bias: [out]."""
    if isinstance(weight, IntStack):
        sizes = [len(part) if isinstance(part, Tensor) else part.outputs for part in weight.parts]
        biases = [None] * len(sizes) if bias is None else torch.split(bias, sizes)
        return StackedLinear([make_linear(part, own, kernels) for part, own in zip(weight.parts, biases, strict=True)])
    if isinstance(weight, GgmlWeight | IntWeight) and kernels.precision != "bf16":  # all linears are rounded to another format
        weight = weight.dequantize(weight.dtype)
    if isinstance(weight, GgmlWeight):
        return _make_ggml_linear(weight, bias, kernels)
    if isinstance(weight, IntWeight):
        return _make_integer_linear(weight, bias, kernels)
    if isinstance(weight, Fp8Weight):
        if not kernels.triton and keeps_fp8(weight.dtype, weight.values.device, kernels):
            return _make_integer_linear(weight.as_codes(), bias, kernels)
        if not kernels.triton or not weight.can_pack:
            return make_linear(weight.dequantize(weight.dtype), bias, replace(kernels, precision="bf16"))
        kernels = replace(kernels, precision="fp8")
    if kernels.precision != "bf16" and kernels.triton:
        from phalanx_runtime.model.linear.scaled import make_triton_linear  # imports Triton

        return make_triton_linear(weight, bias, kernels.precision)
    assert isinstance(weight, Tensor)
    if kernels.precision == "int4":
        compiled = _library_for(weight.dtype, kernels)
        if compiled is None:
            return DequantizedLinear(pack(weight, "int4"), bias)
        return NativeLinear(make_grouped_product(compiled, as_int4(weight), bias))
    if kernels.precision == "fp8":
        return make_linear(quantize_fp8(weight), bias, kernels)
    compiled = library() if kernels.compiled and _has_kernel(weight, kernels.precision) else None
    if compiled is not None:
        return NativeLinear(make_blocks(compiled, weight, bias, kernels.precision))
    if kernels.precision == "int8":
        return QuantizedLinear(weight, bias)
    if kernels.packed:
        return TwofoldLinear(weight, bias) if kernels.transposed else PackedLinear(weight, bias)
    return DenseLinear(weight, bias)


def pack_weight(weight: Weight, precision: Precision | Format, dtype: torch.dtype) -> PackedWeight | None:
    """Returns the weight in a format of the kernels on a GPU: as it is stored, or rounded to `precision`. None if it has none.

    `dtype`: the compute dtype, from which weights are rounded.
    """
    if precision != "bf16" and not (precision == "fp8" and isinstance(weight, Fp8Weight)):
        return pack(weight if isinstance(weight, Tensor) else weight.dequantize(dtype), precision)
    if isinstance(weight, Fp8Weight):
        return pack(weight, "fp8") if weight.can_pack else None
    if isinstance(weight, GgmlWeight):
        return pack_ggml(weight) if len(weight.parts) == 1 and weight.has_whole_blocks else None
    return pack_codes(weight) if isinstance(weight, IntWeight) else None


def _make_ggml_linear(weight: GgmlWeight, bias: Tensor | None, kernels: Kernels) -> Linear:
    """Keeps the bytes of the file on a CPU, and on a GPU its codes and scales."""
    if kernels.triton:
        if len(weight.parts) > 1:
            return make_linear(IntStack(tuple(replace(weight, parts=(part,)) for part in weight.parts)), bias, kernels)
        return _make_triton_ggml(weight, bias)
    if not keeps_codes(weight.parts[0].raw.device):
        return make_linear(weight.dequantize(weight.dtype), bias, kernels)
    compiled = _library_for(weight.dtype, kernels)
    return DequantizedLinear(weight, bias) if compiled is None else NativeLinear(make_ggml_product(compiled, weight, bias))


def _make_triton_ggml(weight: GgmlWeight, bias: Tensor | None) -> Linear:
    from phalanx_runtime.model.linear.gpu import ArrangedLinear, PackedTritonLinear  # imports Triton

    packed = pack_ggml(weight)
    linear, before = PackedTritonLinear(packed, bias), weight.skipped
    after = packed.inputs - before - weight.inputs
    return ArrangedLinear(linear, lambda x: F.pad(x, (before, after))) if before or after else linear


def _make_integer_linear(weight: IntWeight, bias: Tensor | None, kernels: Kernels) -> Linear:
    """Keeps codes packed on a CPU, and on a GPU those that a Triton kernel reads as they are."""
    if kernels.triton and (linear := _make_triton_linear(weight, bias)) is not None:
        return linear
    if not keeps_codes(weight.codes.device):
        return make_linear(weight.dequantize(weight.dtype), bias, kernels)
    compiled = _library_for(weight.dtype, kernels)
    if compiled is None:
        return DequantizedLinear(make_grouped_blocks(weight), bias)
    return NativeLinear(_code_blocks(compiled, weight, bias))


def _make_triton_linear(weight: IntWeight, bias: Tensor | None) -> Linear | None:
    """Returns a linear with packed codes, in the order of their groups if that is another one; None if no format has them."""
    from phalanx_runtime.model.linear.gpu import ArrangedLinear, PackedTritonLinear  # imports Triton

    packed = pack_codes(weight)
    if packed is not None:
        return PackedTritonLinear(packed, bias)
    order = weight.groups.argsort(stable=True)
    packed = pack_codes(replace(weight, codes=weight.codes[:, order], groups=weight.groups[order]))
    return (
        None
        if packed is None
        else ArrangedLinear(PackedTritonLinear(packed, bias), lambda x: x.index_select(1, order), order.nbytes)
    )


def _code_blocks(compiled: Library, weight: IntWeight, bias: Tensor | None) -> Blocks:
    make = make_rounded_blocks if compiled.has_int8_dot and can_round(weight) else make_grouped_product
    return make(compiled, weight, bias)


def keeps_codes(device: torch.device) -> bool:
    """Whether codes of checkpoints stay packed on the device, whatever their groups and scales are."""
    return device.type == "cpu"


def keeps_ggml(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether blocks of GGUF files stay packed on the device, for computations in `dtype`."""
    return keeps_codes(device) or (device.type == "cuda" and dtype != torch.float64 and launch_obstacle() is None)


def keeps_fp8(dtype: torch.dtype, device: torch.device, kernels: Kernels) -> bool:
    """Whether weights in fp8 stay so on the device, for computations in `dtype`."""
    return kernels.triton or (keeps_codes(device) and _library_for(dtype, kernels) is not None)


def make_gated(weight: Weight, bias: Tensor | None, activation: Activation, kernels: Kernels, gate: Gate = gate) -> Gated:
    """Creates the gated half of an MLP from gate above up. weight: [out, in]; bias: [out]; `gate`: as in `DecoderOps`."""
    if isinstance(weight, GgmlWeight | IntWeight) and kernels.precision != "bf16":
        weight = weight.dequantize(weight.dtype)
    if isinstance(weight, Tensor) and kernels.precision == "fp8" and not kernels.triton:
        weight = quantize_fp8(weight)
    if isinstance(weight, Fp8Weight) and not kernels.triton:
        keeps, kernels = keeps_fp8(weight.dtype, weight.values.device, kernels), replace(kernels, precision="bf16")
        weight = weight.as_codes() if keeps else weight.dequantize(weight.dtype)
    compiled = _library_for(weight.dtype, kernels) if activation == "silu" and not isinstance(weight, IntStack) else None
    if compiled is not None:
        wide = None if bias is None else interleave(bias)
        if isinstance(weight, Tensor) and kernels.precision == "int4":
            weight = as_int4(weight)
        if isinstance(weight, GgmlWeight) and len(weight.parts) == 1:
            return NativeGated(make_ggml_product(compiled, weight.by_outputs(interleave), wide), weight.outputs // 2)
        if isinstance(weight, IntWeight) and keeps_codes(weight.codes.device):
            return NativeGated(_code_blocks(compiled, weight.by_outputs(interleave), wide), len(weight.codes) // 2)
        if isinstance(weight, Tensor) and kernels.precision in ("bf16", "int8") and _has_kernel(weight, kernels.precision):
            return NativeGated(make_blocks(compiled, interleave(weight), wide, kernels.precision), len(weight) // 2)
    return PlainGated(make_linear(weight, bias, kernels), activation, gate)


def _library_for(dtype: torch.dtype, kernels: Kernels) -> Library | None:
    """Returns the C++ kernels, if they compute in this dtype."""
    return library() if kernels.compiled and dtype in DTYPES else None


def _has_kernel(weight: Tensor, precision: Precision) -> bool:
    """Whether a kernel supports the weight, in bf16 without loss."""
    if not can_multiply(weight, weight.dtype):
        return False
    return precision == "int8" or weight.dtype == torch.bfloat16 or bool((weight.bfloat16().float() == weight).all())


def choose_kernels(
    dtype: torch.dtype,
    device: torch.device,
    cpu: Processor,
    spare_bytes: int,
    num_bytes: int,
    precision: Precision | Format = "bf16",
) -> Kernels:
    """Returns the fastest layout, with a second copy of `num_bytes` if it fits `spare_bytes`."""
    if device.type == "cuda" and dtype != torch.float64:
        return Kernels(precision=precision, triton=launch_obstacle() is None)
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return Kernels(precision=precision)
    packed = can_pack(dtype)
    # On AMD, oneDNN beats MKL at any batch size.
    transposed = packed and cpu.is_intel and dtype == torch.float32 and num_bytes <= spare_bytes
    return Kernels(packed, transposed, library() is not None, precision)
