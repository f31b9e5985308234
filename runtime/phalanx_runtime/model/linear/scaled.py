"""Linears with fp8 weights and fp8 activations, by `torch._scaled_mm`, for devices whose tensor cores multiply e4m3."""

import torch
from torch import Tensor

from phalanx_runtime.model.kernels.variant import KernelVariant, launch, variant_of
from phalanx_runtime.model.linear import triton_rows as kernels
from phalanx_runtime.model.linear.gpu import GpuShape, PackedTritonLinear, read_gpu_shape
from phalanx_runtime.model.linear.packed.pack import pack
from phalanx_runtime.model.linear.packed.weight import FP8, Format, Fp8Weight, PackedWeight
from phalanx_runtime.model.operators import operator

MAX_UNROUNDED_ROWS = 64
"""Rows for which reading the weights takes longer than bf16 products: their activations are not rounded."""
BLOCK_WORDS = 1024
"""Words of a row that a program of `quantize_rows` holds."""
QUANTIZE_WARPS = 8
_UNIT = 16
"""Outputs of `torch._scaled_mm` are a multiple."""


@operator("quantize_rows(Tensor x, Tensor(a!) words, Tensor(b!) scales, int width)")
def _quantize_rows(x: Tensor, words: Tensor, scales: Tensor, width: int) -> None:
    arguments = {
        "x": x,
        "words": words,
        "scales": scales,
        "inputs": x.shape[1],
        "x_stride": x.stride(0),
        "word_stride": words.shape[1],
        "WIDTH": width,
        "BLOCK_WORDS": BLOCK_WORDS,
    }
    launch(kernels.quantize_rows, (x.shape[0],), arguments, num_warps=QUANTIZE_WARPS)


class ScaledLinear:
    """`Linear` that rounds many rows to e4m3 with a scale each, in two launches; fewer rows are multiplied unrounded.

    The rounded rows have the order of the packed weight, so both ways read the same words.
    """

    __slots__ = ("num_bytes", "packed")

    def __init__(self, weight: PackedWeight, bias: Tensor | None, gpu: GpuShape | None = None) -> None:
        self.packed = PackedTritonLinear(weight, bias, gpu)
        self.num_bytes = self.packed.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        if x.shape[0] <= MAX_UNROUNDED_ROWS:
            return self.packed(x)
        weight, rows = self.packed.weight, x.shape[0]
        words = torch.empty((rows, weight.words.shape[1]), dtype=torch.int32, device=x.device)
        scales = torch.empty((rows, 1), dtype=torch.float32, device=x.device)
        _quantize_rows(x=x if x.stride(1) == 1 else x.contiguous(), words=words, scales=scales, width=weight.width)
        return torch._scaled_mm(
            words.view(FP8),
            weight.words.view(FP8).t(),
            scale_a=scales,
            scale_b=weight.scales.t(),
            bias=self.packed.bias,
            out_dtype=x.dtype,
        )

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`. Three launches for many rows."""
        if x.shape[0] <= MAX_UNROUNDED_ROWS:
            self.packed.add_to(residual, x)
        else:
            residual.add_(self(x))

    def variants(self, dtype: torch.dtype, *, add: bool) -> list[KernelVariant]:
        """See `PackedTritonLinear`."""
        weight = self.packed.weight
        arguments = {
            "x": dtype,
            "words": torch.int32,
            "scales": torch.float32,
            "inputs": weight.inputs,
            "x_stride": weight.inputs,
            "word_stride": weight.words.shape[1],
            "WIDTH": weight.width,
            "BLOCK_WORDS": BLOCK_WORDS,
        }
        return [*self.packed.variants(dtype, add=add), variant_of(kernels.quantize_rows, arguments, num_warps=QUANTIZE_WARPS)]


def make_triton_linear(
    weight: Tensor | Fp8Weight, bias: Tensor | None, format: Format, gpu: GpuShape | None = None
) -> PackedTritonLinear | ScaledLinear:
    """Quantises the weight to `format`, or packs what is quantised. fp8 with a scale per output may round activations too."""
    gpu, dtype, packed = gpu or read_gpu_shape(), weight.dtype, pack(weight, format)
    is_scaled = format == "fp8" and gpu.has_fp8 and dtype == torch.bfloat16
    if is_scaled and packed.scales.shape[1] == 1 and packed.outputs % _UNIT == 0:
        return ScaledLinear(packed, bias, gpu)
    return PackedTritonLinear(packed, bias, gpu)
