"""Linear layers with int8 weights and inputs that are rounded to int8 for each token, in C++.

Each row of x has the scale maximum / 127; sums of products are exact.
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.model.linear.cpu import BLOCK, ROUNDED, KernelArguments, columns
from phalanx_runtime.model.linear.integer import IntWeight
from phalanx_runtime.model.native.library import Library

QUAD = 4
"""Inputs that the kernel multiplies at once."""
_Sizes = ctypes.c_int64 * 6


def can_round(weight: IntWeight) -> bool:
    """Whether the kernel supports the weight: 8 bits with a scale per output, made for rounded inputs, computed in bf16."""
    is_plain = weight.zeros is None and weight.offsets is None and weight.scales.shape[1] == 1
    return weight.rounds_inputs and weight.bits == 8 and is_plain and weight.dtype == torch.bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundedBlocks:
    """A weight in the kernel's layout; sizes exclude padding."""

    library: Library
    values: Tensor
    """int8 [blocks, quads, 16, 4]."""
    sums: Tensor
    """int32 [outputs, padded]: of the values of each output."""
    scales: Tensor
    bias: Tensor | None
    outputs: int
    inputs: int

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        return sum(part.nbytes for part in (self.values, self.sums, self.scales, self.bias) if part is not None)

    @property
    def arguments(self) -> KernelArguments:
        """See `Blocks`."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        addresses = (part.data_ptr() for part in (self.values, self.scales, self.sums))
        return ROUNDED, *addresses, 0, 0, 0, bias, self.inputs, 0, 0, 0, 0, 0

    def multiply(self, x: Tensor, y: Tensor, mode: int) -> None:
        """See `Blocks`."""
        x = x if x.stride(-1) == 1 else x.contiguous()
        self.library.functions.phalanx_rounded(
            *(
                x.dtype == torch.bfloat16,
                x.data_ptr(),
                self.values.data_ptr(),
                self.sums.data_ptr(),
                self.scales.data_ptr(),
                None if self.bias is None else self.bias.data_ptr(),
                y.data_ptr(),
                _Sizes(*(x.shape[0], columns(y, mode), self.inputs, x.stride(0), y.stride(0), mode)),
            ),
        )


def make_rounded_blocks(library: Library, weight: IntWeight, bias: Tensor | None) -> RoundedBlocks:
    """Packs a weight that `can_round`."""
    outputs, inputs = weight.codes.shape
    rows = -outputs % BLOCK
    values = F.pad((weight.codes ^ 128).view(torch.int8), (0, -inputs % QUAD, 0, rows))
    return RoundedBlocks(
        library=library,
        values=values.view(-1, BLOCK, values.shape[1] // QUAD, QUAD).transpose(1, 2).contiguous(),
        sums=values.sum(1, dtype=torch.int32),
        scales=F.pad(weight.scales[:, 0].float(), (0, rows)),
        bias=None if bias is None else F.pad(bias.float(), (0, rows)),
        outputs=outputs,
        inputs=inputs,
    )
