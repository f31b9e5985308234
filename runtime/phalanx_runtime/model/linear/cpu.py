"""Linear layers from weights of bf16 or int8 in blocks of 16 outputs, for any number of rows, with sums in float.

One layout serves a single row and a long prefill. Steps that follow a linear are done on its sums: `add_to` adds the result to
a residual, `Gated` gives silu(gate) * up. The twins are `DenseLinear`, `QuantizedLinear` and `swiglu`.
"""

import ctypes
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.model.native.library import Library

BLOCK = 16
"""Outputs in a block."""

Precision = Literal["bf16", "int8"]
Sizes = ctypes.c_int64 * 6
_PLAIN, _ADD, _GATED = range(3)
_DTYPES = (torch.bfloat16, torch.float32)


def multiplies(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel multiplies activations of this dtype with this weight."""
    return dtype in _DTYPES and weight.shape[1] % 2 == 0


def quantized(weight: Tensor) -> tuple[Tensor, Tensor]:
    """The weight as int8, and the scale of each output: weight = int8 * scale within half a scale."""
    wide = weight.float()
    scales = wide.abs().amax(1).clamp_min_(1e-30) / 127
    return (wide / scales[:, None]).round_().to(torch.int8), scales


@dataclass(frozen=True, slots=True)
class Blocks:
    """A weight as the kernel reads it: [outputs, inputs], both before padding. scales are None for bf16."""

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
        """Rows of the weight as they were, from bf16 blocks: a tied embedding needs no copy of its own. dim is 0."""
        return self.words[index // BLOCK, :, index % BLOCK].flatten(1).contiguous()

    def multiply(self, x: Tensor, y: Tensor, mode: int) -> None:
        """Fills y, or adds to it. x: [rows, inputs]."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        self.library.functions.phalanx_linear(
            x.dtype == torch.bfloat16,
            self.words.dtype == torch.int8,
            x.data_ptr(),
            self.words.data_ptr(),
            None if self.scales is None else self.scales.data_ptr(),
            None if self.bias is None else self.bias.data_ptr(),
            y.data_ptr(),
            Sizes(x.shape[0], self.outputs, self.inputs, x.stride(0), y.stride(0), mode),
        )


def in_blocks(library: Library, weight: Tensor, bias: Tensor | None, precision: Precision) -> Blocks:
    """The weight, [outputs, inputs] with an even number of inputs, laid out in blocks. Rounds to the precision."""
    outputs, inputs = weight.shape
    missing = -outputs % BLOCK
    wide = None if bias is None else F.pad(bias.float(), (0, missing))
    if precision == "bf16":
        parts = F.pad(weight.to(torch.bfloat16), (0, 0, 0, missing)).view(-1, BLOCK, inputs // 2, 2)
        return Blocks(library, parts.permute(0, 2, 1, 3).contiguous(), None, wide, outputs, inputs)
    rounded, scales = quantized(weight)
    parts = F.pad(rounded, (0, 0, 0, missing)).view(-1, BLOCK, inputs // 2, 2)
    return Blocks(library, parts.permute(0, 2, 1, 3).contiguous(), F.pad(scales, (0, missing)), wide, outputs, inputs)


class NativeLinear:
    """A linear layer of the compiled kernel."""

    __slots__ = ("blocks", "num_bytes")

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None, precision: Precision = "bf16") -> None:
        self.blocks = in_blocks(library, weight, bias, precision)
        self.num_bytes = self.blocks.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Gives [tokens, out]."""
        y = x.new_empty(x.shape[0], self.blocks.outputs)
        self.blocks.multiply(x, y, _PLAIN)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the result to the residual, in place; rounded once."""
        self.blocks.multiply(x, residual, _ADD)


class NativeGated:
    """silu(x G^T) * (x U^T), where the weight is G above U."""

    __slots__ = ("blocks", "num_bytes", "outputs")

    def __init__(self, library: Library, weight: Tensor, bias: Tensor | None, precision: Precision = "bf16") -> None:
        blocks = in_blocks(library, _alternating(weight), None if bias is None else _alternating(bias), precision)
        self.outputs = weight.shape[0] // 2
        self.blocks = replace(blocks, outputs=2 * self.outputs)
        self.num_bytes = self.blocks.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Gives [tokens, out / 2]."""
        y = x.new_empty(x.shape[0], self.outputs)
        self.blocks.multiply(x, y, _GATED)
        return y


def _alternating(weight: Tensor) -> Tensor:
    """Blocks of gates and of ups in turn. Each half is padded with zero rows to whole blocks."""
    halves = [F.pad(half, (0,) * (2 * half.dim() - 1) + (-half.shape[0] % BLOCK,)) for half in weight.chunk(2)]
    return torch.stack([half.view(-1, BLOCK, *half.shape[1:]) for half in halves], 1).flatten(0, 2)
