"""Linear layers in torch. `DenseLinear` is the reference.

All linears of a 135M model, fp32, one thread of an AVX-512 Intel, ms: batch 1: dense 59, packed 68, transposed 51; batch 16:
dense 136, packed 93.
"""

from collections.abc import Callable, Sequence
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.layers import gate
from phalanx_runtime.model.linear.cpu import Addition, quantize

PACK_BATCH = 16
"""Batch size to optimise for."""


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
        """Adds the result to `residual`, in place. residual: [tokens, out]; x: [tokens, in]."""
        ...


class DenseLinear:
    """`Linear` by `F.linear`."""

    __slots__ = ("bias", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        return self.weight.nbytes + (0 if self.bias is None else self.bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return F.linear(x, self.weight, self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`. One launch on a GPU, without a bias."""
        if self.bias is None:
            residual.addmm_(x, self.weight.t())
        else:
            residual.add_(self(x))


class PackedLinear:
    """`Linear` in oneDNN's packed layout."""

    __slots__ = ("bias", "num_bytes", "packed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(weight, PACK_BATCH)
        self.bias = bias
        self.num_bytes = weight.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y: Tensor = torch.ops.mkldnn._linear_pointwise(*(x, self.packed, self.bias, "none", [], ""))
        return y

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`."""
        residual.add_(self(x))


class TwofoldLinear:
    """`PackedLinear` with a transposed copy for single rows."""

    __slots__ = ("_packed", "bias", "num_bytes", "transposed")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self._packed = PackedLinear(weight, bias)
        self.transposed = weight.t().contiguous()
        self.bias = bias
        self.num_bytes = self._packed.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        if x.shape[0] > 1:
            return self._packed(x)
        return x @ self.transposed if self.bias is None else torch.addmm(self.bias, x, self.transposed)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`."""
        residual.add_(self(x))


class QuantizedLinear:
    """Reference of the int8 kernel, with arithmetic in the dtype of x."""

    __slots__ = ("bias", "num_bytes", "scales", "weight")

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight, self.scales = quantize(weight)
        self.bias = bias
        self.num_bytes = self.weight.nbytes + self.scales.nbytes + (0 if bias is None else bias.nbytes)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        y = F.linear(x, self.weight.to(x.dtype)).mul_(self.scales.to(x.dtype))
        return y if self.bias is None else y.add_(self.bias)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`."""
        residual.add_(self(x))


class StackedLinear:
    """`Linear` of several ones, whose outputs follow one another."""

    __slots__ = ("linears", "num_bytes")

    def __init__(self, linears: Sequence[Linear]) -> None:
        self.linears = linears
        self.num_bytes = sum(linear.num_bytes for linear in linears)

    def __call__(self, x: Tensor) -> Tensor:
        """See `Linear`."""
        return torch.cat([linear(x) for linear in self.linears], 1)

    def add_to(self, residual: Tensor, x: Tensor) -> None:
        """See `Linear`."""
        residual.add_(self(x))


class Gated(Protocol):
    """activation(x G^T) * (x U^T), with gate G above up U."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its parameters."""
        ...

    def __call__(self, x: Tensor) -> Tensor:
        """x: [tokens, in]. Returns [tokens, out / 2]."""
        ...

    def with_addition(self, x: Tensor, addition: Addition) -> Tensor:
        """As a call, with what is added to [gate up] before the activation."""
        ...


Gate = Callable[[Tensor, Activation], Tensor]
"""Returns activation(gate) * up from [gate up]."""


class PlainGated:
    """`Gated` by a `Linear` and `gate`, as in `DecoderOps`."""

    __slots__ = ("_gate", "activation", "linear", "num_bytes")

    def __init__(self, linear: Linear, activation: Activation, gate: Gate = gate) -> None:
        self.linear = linear
        self.activation: Activation = activation
        self._gate = gate
        self.num_bytes = linear.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        """See `Gated`."""
        return self._gate(self.linear(x), self.activation)

    def with_addition(self, x: Tensor, addition: Addition) -> Tensor:
        """See `Gated`."""
        y = self.linear(x)
        addition.add(y, x)
        return self._gate(y, self.activation)


def can_pack(dtype: torch.dtype) -> bool:
    """Whether oneDNN packs this dtype on this processor."""
    if not torch._C._has_mkldnn:
        return False
    try:
        torch.ops.mkldnn._reorder_linear_weight(torch.zeros(16, 16, dtype=dtype), PACK_BATCH)
    except RuntimeError:
        return False
    return True
