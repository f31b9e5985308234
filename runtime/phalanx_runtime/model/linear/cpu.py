"""Linear layers in C++: bf16 or int8 weights in blocks of 16 outputs, with fp32 sums.

The kernel can add to a residual or gate its outputs. Reference: `DenseLinear`, `QuantizedLinear`, `PlainGated`.
"""

import ctypes
from dataclasses import dataclass
from typing import Literal, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.model.native.library import Library

BLOCK = 16
"""Outputs per block."""

Precision = Literal["bf16", "int8"]
_Sizes, _GateSizes = ctypes.c_int64 * 6, ctypes.c_int64 * 3
PLAIN, ADD, GATED = range(3)
"""What the kernels do with y."""
DTYPES = (torch.bfloat16, torch.float32)
"""Of activations."""
DENSE, GROUPED, ROUNDED_GROUPS, ROUNDED, GGML = range(5)
"""Kernels of linears, as `phalanx_layers` numbers them."""
KernelArguments = tuple[int, ...]
"""Kernel; addresses of weight, scales, offsets or sums, ends, factors, table, bias (0: none); inputs; layout, five numbers."""


def can_multiply(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether the kernel supports the weight for activations of `dtype`. weight: [outputs, inputs]."""
    return dtype in DTYPES and weight.shape[1] % 2 == 0


def quantize(weight: Tensor) -> tuple[Tensor, Tensor]:
    """Returns int8 weights and a scale per output. weight: [outputs, inputs]."""
    weight = weight.float()
    scales = weight.abs().amax(1).clamp_min_(1e-30) / 127
    return (weight / scales[:, None]).round_().to(torch.int8), scales


@dataclass(frozen=True, slots=True, kw_only=True)
class BlockedWeight:
    """A weight in the kernel's layout; sizes exclude padding."""

    library: Library
    values: Tensor
    scales: Tensor | None
    """Scale of each output row; int8 only."""
    bias: Tensor | None
    outputs: int
    inputs: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        return sum(part.nbytes for part in (self.values, self.scales, self.bias) if part is not None)

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Returns rows of a bf16 weight, [n, inputs], for tied embeddings. index: [n]."""
        return self.values[index // BLOCK, :, index % BLOCK].flatten(1).contiguous()

    @property
    def arguments(self) -> KernelArguments:
        """See `Blocks`."""
        scales, bias = (0 if part is None else part.data_ptr() for part in (self.scales, self.bias))
        is_int8 = self.values.dtype == torch.int8
        return DENSE, self.values.data_ptr(), scales, 0, 0, 0, 0, bias, self.inputs, is_int8, 0, 0, 0, 0

    def multiply(self, x: Tensor, y: Tensor, mode: int) -> None:
        """See `Blocks`."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        self.library.functions.phalanx_linear(
            *(
                x.dtype == torch.bfloat16,
                self.values.dtype == torch.int8,
                x.data_ptr(),
                self.values.data_ptr(),
                None if self.scales is None else self.scales.data_ptr(),
                None if self.bias is None else self.bias.data_ptr(),
                y.data_ptr(),
                _Sizes(*(x.shape[0], columns(y, mode), self.inputs, x.stride(0), y.stride(0), mode)),
            ),
        )


def make_blocks(library: Library, weight: Tensor, bias: Tensor | None, precision: Precision) -> BlockedWeight:
    """Rounds [outputs, inputs] to `precision` in blocks. The number of inputs must be even."""
    outputs, inputs = weight.shape
    padding = -outputs % BLOCK
    wide_bias = None if bias is None else F.pad(bias.float(), (0, padding))
    if precision == "bf16":
        parts = F.pad(weight.to(torch.bfloat16), (0, 0, 0, padding)).view(-1, BLOCK, inputs // 2, 2)
        return BlockedWeight(
            library=library,
            values=parts.permute(0, 2, 1, 3).contiguous(),
            scales=None,
            bias=wide_bias,
            outputs=outputs,
            inputs=inputs,
        )
    rounded, scales = quantize(weight)
    parts = F.pad(rounded, (0, 0, 0, padding)).view(-1, BLOCK, inputs // 2, 2)
    return BlockedWeight(
        library=library,
        values=parts.permute(0, 2, 1, 3).contiguous(),
        scales=F.pad(scales, (0, padding)),
        bias=wide_bias,
        outputs=outputs,
        inputs=inputs,
    )


class Addition(Protocol):
    """What is added to outputs of a linear."""

    def add(self, y: Tensor, x: Tensor, *, alternates: bool = False) -> None:
        """Adds to y, in place. x: [tokens, in]; y: [tokens, out], with `alternates` as `interleave` has the outputs."""
        ...


class Blocks(Protocol):
    """A weight and its bias in the layout of a kernel, in blocks of 16 outputs."""

    @property
    def library(self) -> Library:
        """The kernels."""
        ...

    @property
    def outputs(self) -> int:
        """Outputs without padding; of a gated weight those of all its blocks."""
        ...

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        ...

    @property
    def arguments(self) -> KernelArguments | None:
        """What `phalanx_layers` calls its kernel with; None if the inputs need another order first."""
        ...

    def multiply(self, x: Tensor, y: Tensor, mode: int) -> None:
        """Writes, adds or gates the outputs that y has room for. x: [rows, inputs]; y: [rows, outputs]."""
        ...


class NativeLinear:
    """`Linear` by a kernel."""

    __slots__ = ("blocks", "num_bytes")

    def __init__(self, blocks: Blocks) -> None:
        self.blocks = blocks
        self.num_bytes = blocks.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y = x.new_empty(x.shape[0], self.blocks.outputs)
        self.blocks.multiply(x, y, PLAIN)
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`. Rounds once."""
        self.blocks.multiply(x, residual, ADD)


class NativeGated:
    """`Gated` by a kernel, for silu. `blocks`: of a weight and bias that `interleave` returned; `outputs`: of each half."""

    __slots__ = ("blocks", "num_bytes", "outputs")

    def __init__(self, blocks: Blocks, outputs: int) -> None:
        self.blocks = blocks
        self.outputs = outputs
        self.num_bytes = blocks.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Gated`."""
        y = x.new_empty(x.shape[0], self.outputs)
        self.blocks.multiply(x, y, GATED)
        return y

    def with_addition(self, x: Tensor, addition: Addition) -> Tensor:
        """See `Gated`."""
        projected = x.new_empty(x.shape[0], self.blocks.outputs)
        self.blocks.multiply(x, projected, PLAIN)
        addition.add(projected, x, alternates=True)
        y = x.new_empty(x.shape[0], self.outputs)
        sizes = _GateSizes(x.shape[0], self.outputs, projected.stride(0))
        self.blocks.library.functions.phalanx_gate(x.dtype == torch.bfloat16, projected.data_ptr(), y.data_ptr(), sizes)
        return y


def columns(y: Tensor, mode: int) -> int:
    """Returns the outputs of a weight that make y."""
    return y.shape[1] * (2 if mode == GATED else 1)


def interleave(weight: Tensor) -> Tensor:
    """Alternates zero-padded blocks of gates and ups."""
    halves = [F.pad(half, (0,) * (2 * half.dim() - 1) + (-half.shape[0] % BLOCK,)) for half in weight.chunk(2)]
    return torch.stack([half.view(-1, BLOCK, *half.shape[1:]) for half in halves], 1).flatten(0, 2)
