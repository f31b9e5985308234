"""Linear layers of the C++ kernels: bf16 or int8 weights in blocks of 16 outputs, for any number of rows, with fp32 sums.

One layout serves a single row and a long prefill. The kernel applies what follows a linear to its sums: `add_to` adds to a
residual, `NativeGated` returns silu(gate) * up. Reference implementations: `DenseLinear`, `QuantizedLinear`, `PlainGated`.
"""

import ctypes
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.model.native.library import Library

BLOCK = 16
"""Outputs per block."""

Precision = Literal["bf16", "int8"]
Sizes = ctypes.c_int64 * 6
_PLAIN, _ADD, _GATED = range(3)
_DTYPES = (torch.bfloat16, torch.float32)


def multiplies(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies activations of `dtype` with this weight."""
    return dtype in _DTYPES and weight.shape[1] % 2 == 0


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the weight as int8 and a scale per output: weight = int8 * scale within half a scale."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min_(1e-30) / 127
    return (wide / scales[:, None]).round_().to(torch.int8), scales


@dataclass(frozen=True, slots=True, kw_only=True)
class Blocks:
    """A weight in the kernel's layout; `outputs` and `inputs` exclude padding. `scales` is None for bf16."""

    library: Library
    words: Tensor
    scales: Tensor | None
    bias: Tensor | None
    outputs: int
    inputs: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        return sum(part.nbytes for part in (self.words, self.scales, self.bias) if part is not None)

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Returns rows of the weight from bf16 blocks, so a tied embedding needs no copy. dim is 0."""
        return self.words[index // BLOCK, :, index % BLOCK].flatten(1).contiguous()

    def multiply(self, x: Tensor, y: Tensor, mode: int) -> None:
        """Writes the product to y, or adds it, as `mode` selects. x: [rows, inputs]."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        self.library.functions.phalanx_linear(
            *(
                x.dtype == torch.bfloat16,
                self.words.dtype == torch.int8,
                x.data_ptr(),
                self.words.data_ptr(),
                None if self.scales is None else self.scales.data_ptr(),
                None if self.bias is None else self.bias.data_ptr(),
                y.data_ptr(),
                Sizes(*(x.shape[0], self.outputs, self.inputs, x.stride(0), y.stride(0), mode)),
            ),
        )


def in_blocks(library: Library, weight: Tensor, bias: Tensor | None, precision: Precision) -> Blocks:
    """Returns the weight, [outputs, inputs] with an even number of inputs, in blocks, rounded to `precision`."""
    outputs, inputs = weight.shape
    missing = -outputs % BLOCK
    wide = None if bias is None else F.pad(bias.float(), (0, missing))
    if precision == "bf16":
        parts = F.pad(weight.to(torch.bfloat16), (0, 0, 0, missing)).view(-1, BLOCK, inputs // 2, 2)
        return Blocks(
            library=library, words=parts.permute(0, 2, 1, 3).contiguous(), scales=None, bias=wide, outputs=outputs, inputs=inputs
        )
    rounded, scales = quantized(weight)
    parts = F.pad(rounded, (0, 0, 0, missing)).view(-1, BLOCK, inputs // 2, 2)
    return Blocks(
        library=library,
        words=parts.permute(0, 2, 1, 3).contiguous(),
        scales=F.pad(scales, (0, missing)),
        bias=wide,
        outputs=outputs,
        inputs=inputs,
    )


class NativeLinear:
    """Linear layer of the C++ kernel."""

    __slots__ = ("blocks", "num_bytes")

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None, precision: Precision = "bf16") -> None:
        self.blocks = in_blocks(library, weight, bias, precision)
        self.num_bytes = self.blocks.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out]."""
        y = x.new_empty(x.shape[0], self.blocks.outputs)
        self.blocks.multiply(x, y, _PLAIN)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the result to the residual, in place, with one rounding."""
        self.blocks.multiply(x, residual, _ADD)


class NativeGated:
    """silu(x G^T) * (x U^T) for a weight with G above U."""

    __slots__ = ("blocks", "num_bytes", "outputs")

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None, precision: Precision = "bf16") -> None:
        blocks = in_blocks(library, _alternating(weight), None if bias is None else _alternating(bias), precision)
        self.outputs = weight.shape[0] // 2
        self.blocks = replace(blocks, outputs=2 * self.outputs)
        self.num_bytes = self.blocks.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out / 2]."""
        y = x.new_empty(x.shape[0], self.outputs)
        self.blocks.multiply(x, y, _GATED)
        return y


def _alternating(weight: Tensor) -> Tensor:
    """Returns blocks of gates and ups in turn. Each half is padded with zero rows to whole blocks."""
    halves = [F.pad(half, (0,) * (2 * half.dim() - 1) + (-half.shape[0] % BLOCK,)) for half in weight.chunk(2)]
    return torch.stack([half.view(-1, BLOCK, *half.shape[1:]) for half in halves], 1).flatten(0, 2)
