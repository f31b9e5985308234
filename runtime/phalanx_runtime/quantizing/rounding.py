"""Rounds weights to integer codes so that a layer's outputs change little.

The scale of a group minimises the squared error of its weights, each weighted by the mean square of its input. Inputs are then
rounded one after the other, in descending order of their mean squares; those that follow compensate each error (GPTQ, Frantar et
al. 2023).
"""

from dataclasses import dataclass

import torch
from torch import Tensor

from phalanx_runtime.errors import ModelError

SHRINKS = tuple(1 - step / 40 for step in range(21))
"""Scales that are tried, as shares of the scale without clipping."""
DAMPING = 0.01
"""Added to the diagonal of the squares, as a share of its mean; ten times as much while they have no inverse."""
_DAMPINGS = 10
"""Dampings that are tried. The last ones dwarf the squares, whose inverse then exists."""
_BLOCK = 128
"""Inputs whose errors are compensated within the block first."""


@dataclass(frozen=True, slots=True)
class Grid:
    """Symmetric integer codes."""

    bits: int
    group: int | None
    """Inputs with a common scale; None: one scale per output."""

    @property
    def limit(self) -> int:
        """Codes are -limit to limit - 1."""
        return 1 << self.bits - 1

    def size(self, inputs: int) -> int:
        """Returns the inputs with a common scale."""
        return self.group or inputs


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight in integer codes."""

    codes: Tensor
    """int8 [outputs, inputs]."""
    scales: Tensor
    """[outputs, groups], in the dtype that is stored."""

    def dequantize(self) -> Tensor:
        """Returns fp32 [outputs, inputs]."""
        size = self.codes.shape[1] // self.scales.shape[1]
        return self.codes.float() * self.scales.float().repeat_interleave(size, 1)


def round_weight(weight: Tensor, squares: Tensor, grid: Grid, dtype: torch.dtype) -> Rounded:
    """Returns the codes of a weight, with scales in `dtype`.

    weight: [outputs, inputs], the inputs a multiple of the group. squares: fp32 [inputs, inputs], the sum of x x^T over inputs x.
    Raises ModelError if the squares are not finite.
    """
    weight, importance = weight.float(), squares.diagonal()
    scales = choose_scales(weight, importance, grid).to(dtype)
    scales.masked_fill_(scales == 0, torch.finfo(dtype).tiny)  # groups of zeros in fp16; 0 / 0 would spread to other groups
    wide = scales.float().repeat_interleave(grid.size(weight.shape[1]), 1)
    order = importance.argsort(descending=True, stable=True)
    codes = _compensated(weight[:, order], wide[:, order], _factor(squares[order][:, order]), grid.limit)
    return Rounded(codes[:, order.argsort()].contiguous(), scales)


def choose_scales(weight: Tensor, importance: Tensor, grid: Grid) -> Tensor:
    """Returns fp32 scales [outputs, groups]. importance: [inputs]."""
    size = grid.size(weight.shape[1])
    groups, shares = weight.view(len(weight), -1, size), importance.view(-1, size)
    widest = (groups.abs().amax(2) / (grid.limit - 0.5)).clamp_min(1e-30)
    best, least = widest, torch.full_like(widest, float("inf"))
    for shrink in SHRINKS:
        scales = widest * shrink
        rounded = (groups / scales[:, :, None]).round_().clamp_(-grid.limit, grid.limit - 1).mul_(scales[:, :, None])
        error = rounded.sub_(groups).square_().mul_(shares).sum(2)
        is_better = error < least
        best, least = torch.where(is_better, scales, best), torch.where(is_better, error, least)
    return best


def _factor(squares: Tensor) -> Tensor:
    """Returns the upper Cholesky factor of the inverse of the damped squares. Raises ModelError if they have none."""
    diagonal = squares.diagonal()
    mean = diagonal.mean().clamp_min(1e-30)
    if not bool(squares.isfinite().all() & mean.isfinite()):
        raise ModelError("the squares of its inputs are not finite in float32")
    for power in range(_DAMPINGS):
        damped = squares + torch.diag(torch.full_like(diagonal, float(DAMPING * 10**power * mean)))
        lower, failure = torch.linalg.cholesky_ex(damped)
        if not failure:
            factor: Tensor
            factor, failure = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not failure:
                return factor
    raise ModelError("the squares of its inputs have no inverse in float32")


def _compensated(weight: Tensor, scales: Tensor, factor: Tensor, limit: int) -> Tensor:
    """Rounds the inputs in order; overwrites `weight`. Returns int8 codes."""
    codes = torch.empty_like(weight, dtype=torch.int8)
    inputs = weight.shape[1]
    for first in range(0, inputs, _BLOCK):
        last = min(first + _BLOCK, inputs)
        errors = torch.empty_like(weight[:, first:last])
        for column in range(first, last):
            exact, scale = weight[:, column], scales[:, column]
            code = (exact / scale).round_().clamp_(-limit, limit - 1)
            codes[:, column] = code.to(torch.int8)
            error = (exact - code * scale) / factor[column, column]
            weight[:, column:last].addr_(error, factor[column, column:last], alpha=-1)
            errors[:, column - first] = error
        weight[:, last:].addmm_(errors, factor[first:last, last:], alpha=-1)
    return codes
