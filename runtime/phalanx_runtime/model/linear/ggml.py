"""Linear layers with weights as GGUF files have them, in C++: bytes stay packed in memory, sums are fp32.

Reference: `DequantizedLinear`, with the weights that the library `gguf` dequantises.
"""

import ctypes
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from gguf.constants import GGML_QUANT_SIZES
from torch import Tensor

from phalanx_runtime.model.ggml.weight import GgmlPart, GgmlWeight, Kind
from phalanx_runtime.model.linear.cpu import BLOCK, GGML, KernelArguments, columns
from phalanx_runtime.model.native.library import Library

_Sizes = ctypes.c_int64 * 7


@dataclass(frozen=True, slots=True)
class GgmlBlocks:
    """A part in the kernel's layout: words of two bytes of 16 outputs side by side, the last of them padded by zeros."""

    kind: Kind
    words: Tensor
    """int16 [blocks of outputs, blocks, words, 16]."""
    outputs: int

    def unpack(self) -> GgmlPart:
        """Returns the part as in the file."""
        rows = self.words.permute(0, 3, 1, 2).reshape(len(self.words) * BLOCK, -1)[: self.outputs]
        return GgmlPart(self.kind, rows.contiguous().view(torch.uint8))


def make_ggml_blocks(part: GgmlPart) -> GgmlBlocks:
    """Returns the part in the kernel's layout."""
    outputs, words = len(part.raw), GGML_QUANT_SIZES[part.kind][1] // 2
    padded = F.pad(part.raw, (0, 0, 0, -outputs % BLOCK)).view(torch.int16)
    blocks = padded.view(-1, BLOCK, padded.shape[1] // words, words).permute(0, 2, 3, 1).contiguous()
    return GgmlBlocks(part.kind, blocks, outputs)


@dataclass(frozen=True, slots=True, kw_only=True)
class GgmlProduct:
    """`Blocks` of a weight and a bias."""

    library: Library
    parts: tuple[GgmlBlocks, ...]
    table: Tensor
    """int64 [parts, 3]: for the kernel kind, address and outputs of each."""
    bias: Tensor | None
    """fp32, with padding for a whole block."""
    inputs: int
    """Of whole blocks."""
    skipped: int
    """As in `GgmlWeight`."""

    @property
    def outputs(self) -> int:
        """See `Blocks`."""
        return sum(part.outputs for part in self.parts)

    @property
    def num_bytes(self) -> int:
        """See `Blocks`."""
        return sum(part.words.nbytes for part in self.parts) + (0 if self.bias is None else self.bias.nbytes)

    @property
    def arguments(self) -> KernelArguments:
        """See `Blocks`. A rank that computes layers in one call has whole weights."""
        bias = 0 if self.bias is None else self.bias.data_ptr()
        return GGML, self.table.data_ptr(), 0, 0, 0, 0, 0, bias, self.inputs, len(self.parts), 0, 0, 0, 0

    def multiply(self, x: Tensor, y: Tensor, mode: int) -> None:
        """See `Blocks`."""
        if x.shape[1] < self.inputs:
            x = F.pad(x, (self.skipped, self.inputs - self.skipped - x.shape[1]))
        x = x if x.stride(-1) == 1 else x.contiguous()
        sizes = _Sizes(*(x.shape[0], columns(y, mode), self.inputs, x.stride(0), y.stride(0), mode, len(self.parts)))
        bias = None if self.bias is None else self.bias.data_ptr()
        arguments = (x.data_ptr(), self.table.data_ptr(), bias, y.data_ptr(), sizes)
        self.library.functions.phalanx_ggml(x.dtype == torch.bfloat16, *arguments)


def make_ggml_product(library: Library, weight: GgmlWeight, bias: Tensor | None) -> GgmlProduct:
    """Packs a weight and its bias."""
    parts = tuple(make_ggml_blocks(part) for part in weight.parts)
    size, num_bytes = GGML_QUANT_SIZES[weight.parts[0].kind]
    return GgmlProduct(
        library=library,
        parts=parts,
        table=torch.tensor([(part.kind, part.words.data_ptr(), part.outputs) for part in parts], dtype=torch.int64),
        bias=None if bias is None else F.pad(bias.float(), (0, BLOCK)),
        inputs=weight.parts[0].raw.shape[1] // num_bytes * size,
        skipped=weight.skipped,
    )


class GgmlRows:
    """Rows of a weight in one part, dequantised when they are read: an embedding. It shares the memory of a product."""

    __slots__ = ("_dtype", "_weight", "num_bytes")

    def __init__(self, weight: GgmlWeight | GgmlProduct, dtype: torch.dtype) -> None:
        self._weight = weight
        self._dtype = dtype
        self.num_bytes = weight.num_bytes

    def index_select(self, dim: int, index: Tensor) -> Tensor:
        """Returns rows, [n, inputs]. index: [n]."""
        weight = self._weight
        if isinstance(weight, GgmlWeight):
            (part,) = weight.parts
            return GgmlPart(part.kind, part.raw[index]).dequantize(self._dtype)
        (blocks,), index = weight.parts, index.contiguous()
        if len(index) and not 0 <= int(index.min()) <= int(index.max()) < blocks.outputs:
            raise IndexError(f"rows {index.tolist()} of {blocks.outputs}")
        rows = torch.empty(len(index), weight.inputs, dtype=self._dtype)
        numbers = (len(index), weight.inputs, rows.data_ptr())
        is_bf16, read = self._dtype == torch.bfloat16, weight.library.functions.phalanx_ggml_rows
        read(is_bf16, blocks.kind, blocks.words.data_ptr(), index.data_ptr(), *numbers)
        return rows
