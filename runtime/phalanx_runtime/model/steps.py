"""The small steps between the linears of a decoder block, as one seam: torch's are the twin of those compiled for CPU."""

from typing import Protocol

from torch import Tensor

from phalanx_runtime.model.layers import rms_norm
from phalanx_runtime.model.rope import Angles, rotate


class Steps(Protocol):
    """Norm and rotation."""

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [tokens, size], normalised over the last dimension."""
        ...

    def turned(self, x: Tensor, angles: Angles) -> Tensor:
        """x: [tokens, heads, dim], turned; maybe in place."""
        ...


class TorchSteps:
    """`Steps` in plain torch."""

    __slots__ = ()

    def norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x: [tokens, size], normalised over the last dimension."""
        return rms_norm(x, weight, eps)

    def turned(self, x: Tensor, angles: Angles) -> Tensor:
        """x: [tokens, heads, dim], turned."""
        return rotate(x, angles)
