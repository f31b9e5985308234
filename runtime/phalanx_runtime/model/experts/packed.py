"""Products of experts with packed weights by Triton: tiles, the launch and its variants. Reference: `DequantizedLinear`."""

from collections.abc import Sequence
from dataclasses import astuple
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.model.experts import triton_kernels as kernels
from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.kernels.variant import KernelVariant, launch, num_blocks, variant_of
from phalanx_runtime.model.linear.gpu import LinearTile, constants_of
from phalanx_runtime.model.linear.packed.weight import PackedFormat, PackedLayout, PackedWeight
from phalanx_runtime.model.operators import operator

FEW_ROWS = LinearTile(block_outputs=64, block_rows=16, num_warps=4, num_stages=4)
"""Of decodes. Its outputs are rows of the weight: half of them are gates where the product is gated."""
MANY_ROWS = LinearTile(block_outputs=128, block_rows=64, num_warps=4, num_stages=3)
"""Of prefill."""
FLOAT32 = LinearTile(block_outputs=64, block_rows=16, num_warps=4, num_stages=1)
TILES = (FLOAT32, FEW_ROWS, MANY_ROWS)
"""As `gpu.tile_config` expects them."""


def multiply_constants(
    tile: LinearTile, weight: PackedWeight, *, pairs_per_row: int, has_bias: bool, activation: Activation | None
) -> dict[str, Any]:
    """Returns the compile-time arguments of `multiply_packed_experts`. `weight`: of all experts."""
    halves = 1 if activation is None else 2
    constants = constants_of(weight, has_bias=has_bias, add=False)
    return {
        "INPUTS": weight.inputs,
        "OUTPUTS": weight.outputs // halves,
        "PAIRS_PER_ROW": pairs_per_row,
        "BLOCK_ROWS": tile.block_rows,
        "BLOCK_OUTPUTS": tile.block_outputs // halves,
        "WORDS": weight.words.shape[-1],
        "GROUPS": weight.scales.shape[-1],
        **{name: constants[name] for name in ("WIDTH", "FORMAT", "GROUP", "HAS_BIAS")},
        "ACTIVATION": activation or "",
    }


@operator(
    "multiply_packed_experts(Tensor x, Tensor words, Tensor scales, Tensor? bias, Tensor(a!) out, Tensor[] tiles, str format, "
    "int[] layout, int[] tile, int pairs_per_row, str? activation)"
)
def _multiply(
    x: Tensor,
    words: Tensor,
    scales: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiles: Sequence[Tensor],
    format: PackedFormat,
    layout: Sequence[int],
    tile: Sequence[int],
    pairs_per_row: int,
    activation: Activation | None,
) -> None:
    """Lists: pairs, experts and number of tiles; group and width; the fields of a `LinearTile`."""
    config, (group, width) = LinearTile(*tile), layout
    sizes = {"outputs": words.shape[1], "inputs": x.shape[1]}
    weight = PackedWeight(words=words, scales=scales, format=format, group=group, width=width, **sizes)
    constants = multiply_constants(config, weight, pairs_per_row=pairs_per_row, has_bias=bias is not None, activation=activation)
    values = (x, words, scales, x if bias is None else bias, out, *tiles, x.stride(0))
    arguments = {**dict(zip(kernels.multiply_packed_experts.arg_names, values, strict=False)), **constants}
    grid = (len(tiles[0]), num_blocks(out.shape[1], constants["BLOCK_OUTPUTS"]))
    launch(kernels.multiply_packed_experts, grid, arguments, num_warps=config.num_warps, num_stages=config.num_stages)


def multiply(
    x: Tensor,
    weight: PackedWeight,
    bias: Tensor | None,
    out: Tensor,
    *,
    tiles: Sequence[Tensor],
    tile: LinearTile,
    pairs_per_row: int,
    activation: Activation | None,
) -> None:
    """Multiplies the rows of tiles by the weights of their experts."""
    layout, config = [weight.group, weight.width], astuple(tile)
    more: dict[str, Any] = {"pairs_per_row": pairs_per_row, "activation": activation}
    _multiply(
        x, weight.words, weight.scales, bias, out=out, tiles=tiles, format=weight.format, layout=layout, tile=config, **more
    )


def product_variant(
    rows: int,
    inputs: int,
    layout: PackedLayout,
    dtype: torch.dtype,
    tile: LinearTile,
    *,
    pairs_per_row: int,
    has_bias: bool,
    activation: Activation | None,
) -> KernelVariant:
    """Returns the variant of one product. rows: of the weight of one expert."""
    weight = _empty(rows, inputs, layout)
    constants = multiply_constants(tile, weight, pairs_per_row=pairs_per_row, has_bias=has_bias, activation=activation)
    arguments = {
        **dict.fromkeys(("x", "bias", "out"), dtype),
        "words": torch.int32,
        "scales": weight.scales.dtype,
        **dict.fromkeys(("pairs", "tile_experts", "num_tiles"), torch.int32),
        "x_stride": inputs,
        **constants,
    }
    order = {name: arguments[name] for name in kernels.multiply_packed_experts.arg_names}
    return variant_of(kernels.multiply_packed_experts, order, num_warps=tile.num_warps, num_stages=tile.num_stages)


def _empty(rows: int, inputs: int, layout: PackedLayout) -> PackedWeight:
    """Returns a weight of this shape without memory."""
    num_words, num_scales = layout.row_sizes(inputs)
    scales = torch.empty((rows, num_scales), dtype=layout.scale_dtype, device="meta")
    words = torch.empty((rows, num_words), dtype=torch.int32, device="meta")
    more: dict[str, Any] = {"format": layout.format, "group": layout.group, "width": layout.width}
    return PackedWeight(words=words, scales=scales, outputs=rows, inputs=inputs, **more)
