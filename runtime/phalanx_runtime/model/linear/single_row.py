"""Dense linears of a single row on a GPU, in one launch each with the norm before and the activation or residual after them.

Reference: `DenseLinear` and `TorchOps`. From two rows on, torch's products on tensor cores are faster.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import astuple, dataclass
from functools import cache
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.model.kernels.variant import KernelVariant, launch, num_blocks, variant_of
from phalanx_runtime.model.linear.linear import DenseLinear, PlainGated
from phalanx_runtime.model.linear.triton_row import multiply_row
from phalanx_runtime.model.operators import operator

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
GATES: dict[str, int] = {"silu": 1, "gelu_tanh": 2}
"""By activation: constant of the kernel."""


@dataclass(frozen=True, slots=True)
class RowTile:
    """Tile of `multiply_row`."""

    block_outputs: int
    block_inputs: int
    num_warps: int


WIDE: Mapping[str, RowTile] = {"": RowTile(2, 1024, 4), "add": RowTile(4, 2048, 8), "gate": RowTile(2, 2048, 8)}
NARROW: Mapping[str, RowTile] = {"": RowTile(4, 512, 4), "add": RowTile(4, 1024, 8), "gate": RowTile(8, 512, 4)}
"""Tiles of more than `MAX_NARROW` inputs, and of up to as many. `python -m bench.gpu.tiles` compares them with others."""
MAX_NARROW = 1024


def row_tile(inputs: int, form: str) -> RowTile:
    """Returns the tile of a weight with this number of inputs. `form`: "", "add" or a key of `GATES`."""
    tiles = WIDE if inputs > MAX_NARROW else NARROW
    return tiles["gate" if form in GATES else form]


@cache
def row_constants(tile: RowTile, *, has_norm: bool, has_bias: bool, form: str) -> dict[str, Any]:
    """Returns the compile-time arguments. `form`: "", "add" or a key of `GATES`."""
    return {
        "BLOCK_OUTPUTS": tile.block_outputs,
        "BLOCK_INPUTS": tile.block_inputs,
        "HAS_NORM": has_norm,
        "HAS_BIAS": has_bias,
        "ADD": form == "add",
        "GATE": GATES.get(form, 0),
    }


@operator("multiply_row(Tensor x, Tensor weight, Tensor? bias, Tensor? norm, Tensor(a!) y, float eps, str form, int[] tile)")
def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    norm: Tensor | None,
    y: Tensor,
    eps: float,
    form: str,
    tile: Sequence[int],
) -> None:
    """`tile`: the fields of a `RowTile`."""
    inputs, outputs, config = x.shape[1], y.shape[1], RowTile(*tile)
    arguments = {
        "x": x,
        "weight": weight,
        "bias": x if bias is None else bias,
        "norm": x if norm is None else norm,
        "y": y,
        "eps": eps,
        "outputs": outputs,
        "inputs": inputs,
        **row_constants(config, has_norm=norm is not None, has_bias=bias is not None, form=form),
    }
    launch(multiply_row, (num_blocks(outputs, config.block_outputs),), arguments, num_warps=config.num_warps)


def row_variant(inputs: int, dtype: torch.dtype, norm: torch.dtype | None, *, has_bias: bool, form: str) -> KernelVariant:
    """Returns the variant of contiguous weights. `norm`: dtype of the norm's weight, if any; `form`: as in `row_tile`."""
    tile = row_tile(inputs, form)
    arguments = {
        **dict.fromkeys(("x", "weight", "bias", "y"), dtype),
        "norm": dtype if norm is None else norm,
        "eps": 0.0,
        "outputs": 1,
        "inputs": inputs,
        **row_constants(tile, has_norm=norm is not None, has_bias=has_bias, form=form),
    }
    return variant_of(multiply_row, arguments, num_warps=tile.num_warps)


class TritonRowLinears:
    """`RowLinears` by the kernel."""

    __slots__ = ("_tile_of", "num_launched")

    def __init__(self, tile_of: Callable[[int, str], RowTile] = row_tile) -> None:
        self.num_launched = 0
        """Kernels launched."""
        self._tile_of = tile_of

    def supports(self, x: Tensor) -> bool:
        """See `RowLinears`."""
        return len(x) == 1 and x.dtype in DTYPES

    def project(self, x: Tensor, norm: Tensor | None, linear: DenseLinear, eps: float) -> Tensor:
        """See `RowLinears`."""
        return self._multiply(x, linear, norm, x.new_empty((1, len(linear.weight))), eps=eps)

    def gate(self, x: Tensor, norm: Tensor | None, gated: PlainGated, eps: float) -> Tensor:
        """See `RowLinears`."""
        linear = gated.linear
        assert isinstance(linear, DenseLinear)
        return self._multiply(x, linear, norm, x.new_empty((1, len(linear.weight) // 2)), eps=eps, form=gated.activation)

    def add(self, linear: DenseLinear, x: Tensor, residual: Tensor) -> None:
        """See `RowLinears`."""
        self._multiply(x, linear, None, residual, form="add")

    def _multiply(
        self, x: Tensor, linear: DenseLinear, norm: Tensor | None, y: Tensor, *, eps: float = 0.0, form: str = ""
    ) -> Tensor:
        self.num_launched += 1
        assert linear.weight.is_contiguous(), "the loader makes contiguous weights"
        tile = astuple(self._tile_of(x.shape[1], form))
        _multiply(x=x, weight=linear.weight, bias=linear.bias, norm=norm, y=y, eps=eps, form=form, tile=tile)
        return y
