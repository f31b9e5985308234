"""Linear layers in torch: dense, prepacked for oneDNN, transposed, and int8 reference.

`DenseLinear` is the reference implementation of the others, equal within rounding. All linears of a 135M model in one step, fp32,
one thread of an AVX-512 Intel, ms: batch 1: dense 59, packed 68, transposed 51; batch 16: dense 136, packed 93.
"""

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.layers import gated
from phalanx_runtime.model.linear.cpu import quantized

PACK_BATCH = 16
"""Batch size of the packed layout: a typical decode step."""


class Linear(Protocol):
    """y = x W^T + b."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out]."""
        ...

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the result for x to `residual`, in place."""
        ...


class DenseLinear:
    """Plain linear layer."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out]."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the result for x to `residual`, in place."""
        residual.add_(self(x))


class PackedLinear:
    """A linear layer in oneDNN's packed layout, without the dense weight."""

    __slots__ = ("bias", "num_bytes", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_BATCH)
        self.bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out]."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(*(x, self.packed, self.bias, "none", [], ""))
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the result for x to `residual`, in place."""
        residual.add_(self(x))


class TwofoldLinear:
    """A packed linear layer with a transposed copy for single rows, which MKL multiplies fastest."""

    __slots__ = ("_packed", "bias", "num_bytes", "transposed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = PackedLinear(weight, bias)
        self.transposed = weight.t().contiguous()
        self.bias = bias
        self.num_bytes = self._packed.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out]."""
        if x.shape[0] > 1:
            return self._packed(x)
        return x @ self.transposed if self.bias is None else torch.addmm(self.bias, x, self.transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the result for x to `residual`, in place."""
        residual.add_(self(x))


class QuantizedLinear:
    """Reference implementation of the int8 CPU kernel: int8 weights with a scale per output, arithmetic in the dtype of x."""

    __slots__ = ("bias", "num_bytes", "scales", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.scales = quantized(weight)
        self.bias = bias
        self.num_bytes = self.weight.nbytes + self.scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out]."""
        y = F.linear(x, self.weight.to(x.dtype)).mul_(self.scales.to(x.dtype))
        return y if self.bias is None else y.add_(self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """Adds the result for x to `residual`, in place."""
        residual.add_(self(x))


class Gated(Protocol):
    """activation(x G^T) * (x U^T): gate G and up U of an MLP."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out / 2]."""
        ...


class PlainGated:
    """Reference implementation: one linear layer of G above U, then the activation."""

    __slots__ = ("_activation", "_linear", "num_bytes")

    def __init__(self, linear: Linear, activation: Activation) -> None:
        self._linear = linear
        self._activation: Activation = activation
        self.num_bytes = linear.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out / 2]."""
        return gated(self._linear(x), self._activation)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs weights of this dtype on this processor; some refuse bf16."""
    if not torch._C._has_mkldnn:
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), PACK_BATCH)
    except RuntimeError:
        return False
    return True
