"""Rounding of weights against rounding to nearest, on inputs with and without correlation."""

import pytest
import torch
from torch import Tensor

from phalanx_runtime.errors import ModelError
from phalanx_runtime.quantizing.rounding import Grid, round_weight

SHAPE = (48, 128)
GRIDS = {"4 bits in groups": Grid(4, 32), "8 bits": Grid(8, None)}


def noise(*shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape)))


def nearest(weight: Tensor, scales: Tensor, limit: int) -> Tensor:
    wide = scales.float().repeat_interleave(weight.shape[1] // scales.shape[1], 1)
    return (weight / wide).round().clamp(-limit, limit - 1)


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_independent_inputs_are_rounded_to_nearest(grid: Grid) -> None:
    weight = noise(*SHAPE)
    rounded = round_weight(weight, torch.diag(noise(SHAPE[1]).square() + 0.1), grid, torch.bfloat16)
    assert rounded.scales.dtype == torch.bfloat16 and rounded.scales.shape == (48, 4 if grid.group else 1)
    assert torch.equal(rounded.codes.float(), nearest(weight, rounded.scales, grid.limit))
    assert (rounded.dequantize() - weight).std() < 1.5 / grid.limit


@pytest.mark.parametrize("grid", GRIDS.values(), ids=GRIDS)
def test_later_inputs_compensate_errors(grid: Grid) -> None:
    weight, inputs = noise(*SHAPE), noise(400, 32) @ noise(32, SHAPE[1]) + 0.3 * noise(400, SHAPE[1])
    rounded = round_weight(weight, inputs.t() @ inputs, grid, torch.float32)
    plain = nearest(weight, rounded.scales, grid.limit) * rounded.scales.repeat_interleave(grid.size(SHAPE[1]), 1)
    exact = inputs @ weight.t()
    ours, theirs = ((inputs @ one.t() - exact).square().mean() for one in (rounded.dequantize(), plain))
    assert ours < 0.5 * theirs


def test_inputs_that_never_vary_are_rounded() -> None:
    weight, inputs = noise(*SHAPE), noise(50, SHAPE[1])
    inputs[:, :40] = 0
    inputs[:, 41] = inputs[:, 42]
    for squares in (inputs.t() @ inputs, torch.zeros(SHAPE[1], SHAPE[1])):
        rounded = round_weight(weight, squares, Grid(4, 32), torch.float32)
        assert bool(rounded.dequantize().isfinite().all()) and bool((rounded.scales > 0).all())


def test_groups_of_zeros_change_no_other_group() -> None:
    weight, zeros = noise(4, SHAPE[1]), noise(4, SHAPE[1])
    zeros[:, 32:64] = 0
    squares = torch.diag(noise(SHAPE[1]).square() + 0.1)
    exact, rounded = (round_weight(one, squares, Grid(4, 32), torch.float16).dequantize() for one in (weight, zeros))
    assert not rounded[:, 32:64].any()
    assert torch.equal(rounded[:, 64:], exact[:, 64:]) and torch.equal(rounded[:, :32], exact[:, :32])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 3e38])
def test_inputs_that_are_not_finite_are_refused(value: float) -> None:
    with pytest.raises(ModelError, match="the squares of its inputs are not finite"):
        round_weight(noise(*SHAPE), torch.diag(torch.full((SHAPE[1],), value)), Grid(4, 32), torch.float32)
