"""Layers of a single row, whose time is that of reading weights and of launches: norms, residuals and gates in the linears.

Four launches instead of seven beside attention, on one rank. The linears of `DenseLinear` and `PlainGated` are supported, without
norms after the halves of a layer.
"""

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from phalanx_runtime.model.linear.linear import DenseLinear, Gated, Linear, PlainGated


@dataclass(frozen=True, slots=True, kw_only=True)
class DenseLayer:
    """The linears of a supported layer, with the norms before them."""

    attention_in: Tensor | None
    qkv: DenseLinear
    o: DenseLinear
    mlp_in: Tensor | None
    gate_up: PlainGated
    down: DenseLinear


class RowLinears(Protocol):
    """Linears of a single row in one launch each. Implemented in `linear.single_row`."""

    def supports(self, x: Tensor) -> bool:
        """Returns whether x, [rows, hidden], is a single row of a supported dtype."""
        ...

    def project(self, x: Tensor, norm: Tensor | None, linear: DenseLinear, eps: float) -> Tensor:
        """Returns the linear of x, normalised by `norm`. x: [1, in]."""
        ...

    def gate(self, x: Tensor, norm: Tensor | None, gated: PlainGated, eps: float) -> Tensor:
        """Returns the gated half of the MLP of x, normalised by `norm`. x: [1, in]."""
        ...

    def add(self, linear: DenseLinear, x: Tensor, residual: Tensor) -> None:
        """Adds the linear of x to `residual` in place. x: [1, in]; residual: [1, out]."""
        ...


def dense_layer(
    *, attention_in: Tensor | None, qkv: Linear, o: Linear, mlp_in: Tensor | None, gate_up: Gated | None, down: Linear
) -> DenseLayer | None:
    """Returns the linears of a layer, if they are supported."""
    if not isinstance(gate_up, PlainGated) or not isinstance(gate_up.linear, DenseLinear) or gate_up.activation == "swigluoai":
        return None
    if not (isinstance(qkv, DenseLinear) and isinstance(o, DenseLinear) and isinstance(down, DenseLinear)):
        return None
    return DenseLayer(attention_in=attention_in, qkv=qkv, o=o, mlp_in=mlp_in, gate_up=gate_up, down=down)
