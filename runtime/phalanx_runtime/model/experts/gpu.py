"""`Experts` by Triton kernels: tiles, launches and the backend. `ExpertList` computes what they exclude."""

from collections.abc import Sequence
from dataclasses import astuple, dataclass
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.model.experts import packed
from phalanx_runtime.model.experts import triton_kernels as kernels
from phalanx_runtime.model.experts.gpu_adapters import add_factors, factor_variants, gate_with_factors
from phalanx_runtime.model.experts.sparse import (
    ChosenExperts,
    Expert,
    ExpertAdditions,
    ExpertLayouts,
    ExpertList,
    ExpertWeights,
    Routing,
)
from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.kernels.variant import KernelVariant, launch, num_blocks, power_of_two, variant_of
from phalanx_runtime.model.linear.gpu import LinearTile
from phalanx_runtime.model.linear.linear import DenseLinear, Linear, PlainGated
from phalanx_runtime.model.linear.packed.reference import DequantizedLinear
from phalanx_runtime.model.linear.packed.weight import PackedWeight
from phalanx_runtime.model.operators import operator
from phalanx_runtime.model.partition import Span

DTYPES = (torch.bfloat16, torch.float16, torch.float32)
ROUTE_WARPS = 1
WARPS = 4
MIN_BLOCK_PAIRS = 16
MAX_BLOCK_PAIRS = 1024
"""Pairs that a program of `sort_pairs` counts at once."""
COMBINE_BLOCK = 1024
"""Columns of a program of `combine_experts`."""


@dataclass(frozen=True, slots=True)
class ProductTile:
    """Tile of `multiply_experts` and its compilation."""

    block_rows: int
    block_weights: int
    """Rows of the weight; half of them are gates where the product is gated."""
    block_inputs: int
    num_warps: int
    num_stages: int


FEW_ROWS = ProductTile(block_rows=16, block_weights=128, block_inputs=64, num_warps=4, num_stages=4)
"""Decodes: the bytes of the weights bound the product."""
MANY_ROWS = ProductTile(block_rows=64, block_weights=128, block_inputs=64, num_warps=4, num_stages=3)
"""Prefill: the tensor cores bound it."""
FLOAT32 = ProductTile(block_rows=16, block_weights=64, block_inputs=32, num_warps=4, num_stages=1)
"""Wider tiles fill the registers."""
MIN_ROWS_PER_EXPERT = 24
"""Rows per expert from which `MANY_ROWS` wastes fewer tiles than it saves loads."""
TILES = (FLOAT32, FEW_ROWS, MANY_ROWS)
Tile = ProductTile | LinearTile


def tile_config(num_pairs: int, num_experts: int, dtype: torch.dtype, tiles: Sequence[Tile] = TILES) -> Tile:
    """Returns the tile: of fp32, few rows or many. It depends on the number of rows alone, as CUDA graphs require."""
    wide, few, many = tiles
    if dtype == torch.float32:
        return wide
    return many if num_pairs >= MIN_ROWS_PER_EXPERT * num_experts else few


def max_tiles(num_pairs: int, num_experts: int, block_rows: int) -> int:
    """Returns the number of tiles that suffices for every routing: each expert with rows may have one that is not full."""
    return (num_pairs + min(num_experts, num_pairs) * (block_rows - 1)) // block_rows


def route_constants(num_experts: int, per_token: int, norm_topk_prob: bool) -> dict[str, Any]:
    """Returns the compile-time arguments of `route_experts`."""
    return {
        "EXPERTS": num_experts,
        "EXPERTS_PADDED": power_of_two(num_experts),
        "PER_TOKEN": per_token,
        "PER_TOKEN_PADDED": power_of_two(per_token),
        "NORM_TOPK_PROB": norm_topk_prob,
    }


def sort_constants(num_pairs: int, num_experts: int, block_rows: int) -> dict[str, Any]:
    """Returns the compile-time arguments of `sort_pairs`."""
    return {
        "EXPERTS": num_experts,
        "BINS": power_of_two(num_experts + 1),
        "BLOCK_PAIRS": min(MAX_BLOCK_PAIRS, max(MIN_BLOCK_PAIRS, power_of_two(num_pairs))),
        "BLOCK_ROWS": block_rows,
    }


def multiply_constants(
    config: ProductTile, inputs: int, outputs: int, *, pairs_per_row: int, has_bias: bool, activation: Activation | None
) -> dict[str, Any]:
    """Returns the compile-time arguments of `multiply_experts`."""
    return {
        "INPUTS": inputs,
        "OUTPUTS": outputs,
        "PAIRS_PER_ROW": pairs_per_row,
        "BLOCK_ROWS": config.block_rows,
        "BLOCK_OUTPUTS": config.block_weights // (1 if activation is None else 2),
        "BLOCK_INPUTS": config.block_inputs,
        "HAS_BIAS": has_bias,
        "ACTIVATION": activation or "",
    }


def combine_constants(num_experts: int, size: int, per_token: int, adds: bool) -> dict[str, Any]:
    """Returns the compile-time arguments of `combine_experts`."""
    block = min(COMBINE_BLOCK, power_of_two(size))
    return {"EXPERTS": num_experts, "SIZE": size, "BLOCK": block, "PER_TOKEN": per_token, "ADDS": adds}


@operator("route_experts(Tensor logits, Tensor(a!) experts, Tensor(b!) weights, bool norm_topk_prob)")
def _route(logits: Tensor, experts: Tensor, weights: Tensor, norm_topk_prob: bool) -> None:
    constants = route_constants(logits.shape[1], experts.shape[1], norm_topk_prob)
    arguments = {"logits": logits, "experts": experts, "weights": weights, "logits_stride": logits.stride(0), **constants}
    launch(kernels.route_experts, (len(logits),), arguments, num_warps=ROUTE_WARPS)


@operator(
    "sort_pairs(Tensor experts, Tensor(a!) pairs, Tensor(b!) tile_experts, Tensor(c!) num_tiles, int first, int num_experts)"
)
def _sort(experts: Tensor, pairs: Tensor, tile_experts: Tensor, num_tiles: Tensor, first: int, num_experts: int) -> None:
    constants = sort_constants(experts.numel(), num_experts, pairs.shape[1])
    tensors = {"experts": experts, "pairs": pairs, "tile_experts": tile_experts, "num_tiles": num_tiles}
    arguments = {**tensors, "num_pairs": experts.numel(), "first": first, **constants}
    launch(kernels.sort_pairs, (num_experts,), arguments, num_warps=WARPS)


@operator(
    "multiply_experts(Tensor x, Tensor weight, Tensor? bias, Tensor(a!) out, Tensor[] tiles, int[] tile, int pairs_per_row, "
    "str? activation)"
)
def _multiply(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    out: Tensor,
    tiles: Sequence[Tensor],
    tile: Sequence[int],
    pairs_per_row: int,
    activation: Activation | None,
) -> None:
    """Lists: pairs, experts and number of tiles; the fields of a `ProductTile`."""
    config = ProductTile(*tile)
    constants = multiply_constants(
        config, x.shape[1], out.shape[1], pairs_per_row=pairs_per_row, has_bias=bias is not None, activation=activation
    )
    values = (x, weight, weight if bias is None else bias, out, *tiles, x.stride(0))
    arguments = {**dict(zip(kernels.multiply_experts.arg_names, values, strict=False)), **constants}
    grid = (len(tiles[0]), num_blocks(out.shape[1], constants["BLOCK_OUTPUTS"]))
    launch(kernels.multiply_experts, grid, arguments, num_warps=config.num_warps, num_stages=config.num_stages)


@operator(
    "combine_experts(Tensor outputs, Tensor experts, Tensor weights, Tensor(a!) out, int first, int num_experts, bool adds)"
)
def _combine(outputs: Tensor, experts: Tensor, weights: Tensor, out: Tensor, first: int, num_experts: int, adds: bool) -> None:
    constants = combine_constants(num_experts, out.shape[1], experts.shape[1], adds)
    tensors = {"outputs": outputs, "experts": experts, "weights": weights, "out": out}
    arguments = {**tensors, "out_stride": out.stride(0), "first": first, **constants}
    launch(kernels.combine_experts, (len(out), num_blocks(out.shape[1], constants["BLOCK"])), arguments, num_warps=WARPS)


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Experts of one layer on one rank."""

    hidden: int
    inner: int
    num_experts: int
    """Of the layer."""
    num_local: int
    """Of the rank."""
    routing: Routing
    activation: Activation
    has_bias: bool
    is_split: bool = False
    """Ranks have columns of the same experts: one of them adds the bias of the down product."""
    layouts: ExpertLayouts | None = None
    """Of packed weights."""
    has_adapters: bool = False
    """Whether adapters may change the experts."""


def expert_variants(shape: ExpertShape, dtype: torch.dtype) -> list[KernelVariant]:
    """Returns all variants of a layer with experts: few and many rows, whatever their number."""
    per_token = shape.routing.per_token
    tiles: Sequence[Tile] = TILES if shape.layouts is None else packed.TILES
    configs = tiles[:1] if dtype == torch.float32 else tiles[1:]
    route = {"logits": dtype, "experts": torch.int32, "weights": torch.float32, "logits_stride": shape.num_experts}
    route |= route_constants(shape.num_experts, per_token, shape.routing.norm_topk_prob)
    variants = [variant_of(kernels.route_experts, route, num_warps=ROUTE_WARPS)]
    combine = {"outputs": dtype, "experts": torch.int32, "weights": torch.float32, "out": dtype, "first": 1}
    for adds in (False, True):
        constants = combine_constants(shape.num_local, shape.hidden, per_token, adds)
        arguments = {**combine, "out_stride": shape.hidden, **constants}
        variants.append(variant_of(kernels.combine_experts, arguments, num_warps=WARPS))
    for config in configs:
        variants.append(_product_variant(shape, dtype, config, is_gated=True, has_bias=shape.has_bias))
        variants += _adapter_variants(shape, dtype, config) if shape.has_adapters else []
        down_biases = (True, False) if shape.has_bias and shape.is_split else (shape.has_bias,)
        variants += [_product_variant(shape, dtype, config, is_gated=False, has_bias=has_bias) for has_bias in down_biases]
        num_pairs = MIN_BLOCK_PAIRS
        while num_pairs <= MAX_BLOCK_PAIRS:
            constants = sort_constants(num_pairs, shape.num_local, config.block_rows)
            sort = {**dict.fromkeys(kernels.sort_pairs.arg_names, torch.int32), "num_pairs": 1, "first": 1, **constants}
            variants.append(variant_of(kernels.sort_pairs, sort, num_warps=WARPS))
            num_pairs *= 2
    return variants


def _adapter_variants(shape: ExpertShape, dtype: torch.dtype, config: Tile) -> list[KernelVariant]:
    """Returns the product with gates and ups, and what adds the adapters' factors."""
    own: dict[str, Any] = {"per_token": shape.routing.per_token, "activation": shape.activation}
    factors = factor_variants(shape.num_local, shape.hidden, shape.inner, dtype, **own, block_rows=config.block_rows)
    return [_product_variant(shape, dtype, config, is_gated=True, has_bias=shape.has_bias, is_activated=False), *factors]


def _product_variant(
    shape: ExpertShape, dtype: torch.dtype, config: Tile, *, is_gated: bool, has_bias: bool, is_activated: bool = True
) -> KernelVariant:
    """`is_activated`: False for gates and ups as they are."""
    inputs, outputs = (shape.hidden, shape.inner) if is_gated else (shape.inner, shape.hidden)
    outputs *= 1 if is_activated else 2
    constants: dict[str, Any] = {
        "pairs_per_row": shape.routing.per_token if is_gated else 1,
        "has_bias": has_bias,
        "activation": shape.activation if is_gated and is_activated else None,
    }
    if isinstance(config, LinearTile):
        assert shape.layouts is not None, "the tile is one of packed weights"
        layout, rows = (shape.layouts.gate_up, 2 * shape.inner) if is_gated else (shape.layouts.down, outputs)
        return packed.product_variant(rows, inputs, layout, dtype, config, **constants)
    arguments = {
        **dict.fromkeys(("x", "weight", "bias", "out"), dtype),
        **dict.fromkeys(("pairs", "tile_experts", "num_tiles"), torch.int32),
        "x_stride": inputs,
        **multiply_constants(config, inputs, outputs, **constants),
    }
    return variant_of(kernels.multiply_experts, arguments, num_warps=config.num_warps, num_stages=config.num_stages)


@dataclass(frozen=True, slots=True)
class Tiles:
    """Pairs sorted by expert, in tiles of one expert: see `triton_kernels`."""

    pairs: Tensor
    """[tiles, rows], int32; -1 in unused rows."""
    experts: Tensor
    """[tiles], int32: expert of each tile, counted from the rank's first."""
    count: Tensor
    """[1], int32: tiles in use."""


def route(logits: Tensor, routing: Routing) -> ChosenExperts:
    """Returns the experts with the largest logits, int32, as `choose_experts` does. logits: [tokens, experts]."""
    shape = (len(logits), routing.per_token)
    experts = torch.empty(shape, dtype=torch.int32, device=logits.device)
    weights = torch.empty(shape, dtype=torch.float32, device=logits.device)
    _route(logits=logits, experts=experts, weights=weights, norm_topk_prob=routing.norm_topk_prob)
    return ChosenExperts(experts, weights)


def sort_pairs(experts: Tensor, span: Span, block_rows: int) -> Tiles:
    """Sorts the pairs of the experts in `span` into tiles. experts: [tokens, per_token], int32."""
    num_tiles = max_tiles(experts.numel(), span.size, block_rows)
    shapes = ((num_tiles, block_rows), (num_tiles,), (1,))
    tiles = Tiles(*(torch.empty(shape, dtype=torch.int32, device=experts.device) for shape in shapes))
    _sort(experts, tiles.pairs, tile_experts=tiles.experts, num_tiles=tiles.count, first=span.start, num_experts=span.size)
    return tiles


class GroupedExperts:
    """`AdaptableExperts` in five launches, nine with adapters, without a wait of the host.

    float64 and steps without tokens use `ExpertList`.
    """

    __slots__ = ("_activation", "_routing", "_weights", "layouts", "num_bytes", "num_launched", "span")

    def __init__(self, weights: ExpertWeights, span: Span, routing: Routing, activation: Activation) -> None:
        """`weights`: of the experts in `span`, at least one, as `stack` makes them, contiguous."""
        self.span = span
        self.num_bytes = weights.num_bytes
        self.layouts = weights.layouts
        self.num_launched = 0
        """Kernels launched."""
        self._weights = weights
        self._routing = routing
        self._activation: Activation = activation

    def __call__(self, x: Tensor, logits: Tensor) -> Tensor:
        """See `Experts`."""
        if not self._is_supported(x):
            return self._reference()(x, logits)
        out = torch.empty_like(x)
        self._compute(x, logits, out, adds=False)
        return out

    def add_to(self, residual: Tensor, x: Tensor, logits: Tensor) -> None:
        """See `Experts`."""
        if not self._is_supported(x):
            self._reference().add_to(residual, x, logits)
        else:
            self._compute(x, logits, residual, adds=True)

    def with_additions(self, x: Tensor, logits: Tensor, additions: ExpertAdditions) -> Tensor:
        """See `AdaptableExperts`."""
        if not self._is_supported(x):
            return self._reference().with_additions(x, logits, additions)
        out = torch.empty_like(x)
        self._compute(x, logits, out, adds=False, additions=additions)
        return out

    def _reference(self) -> ExpertList:
        experts = [_expert(self._weights.expert(i), self._activation) for i in range(self.span.size)]
        return ExpertList(experts, self.span, self._routing)

    def _is_supported(self, x: Tensor) -> bool:
        return x.dtype in DTYPES and x.stride(1) == 1 and len(x) > 0

    def _compute(self, x: Tensor, logits: Tensor, out: Tensor, *, adds: bool, additions: ExpertAdditions | None = None) -> None:
        num_pairs = len(x) * self._routing.per_token
        config = tile_config(num_pairs, self.span.size, x.dtype, TILES if self.layouts is None else packed.TILES)
        outputs = torch.empty((num_pairs, x.shape[1]), dtype=x.dtype, device=x.device)
        self.num_launched += 5 if additions is None else 9
        chosen = route(logits, self._routing)
        sorted_pairs = sort_pairs(chosen.experts, self.span, config.block_rows)
        tiles = [sorted_pairs.pairs, sorted_pairs.experts, sorted_pairs.count]
        inner = self._inner(x, num_pairs, config, tiles, additions)
        shared: dict[str, Any] = {"tile": config, "tiles": tiles, "pairs_per_row": 1, "activation": None}
        _product(inner, self._weights.down, self._weights.down_bias, out=outputs, **shared)
        if additions is not None:
            add_factors(outputs, inner, additions.down, additions.slots, tiles=tiles)
        parts = (outputs, chosen.experts, chosen.weights)
        _combine(*parts, out=out, first=self.span.start, num_experts=self.span.size, adds=adds)

    def _inner(
        self, x: Tensor, num_pairs: int, config: Tile, tiles: Sequence[Tensor], additions: ExpertAdditions | None
    ) -> Tensor:
        """Returns activation(gate) * up of each pair, [pairs, columns]."""
        weights, activation = self._weights, None if additions is not None else self._activation
        columns = weights.inner * (1 if additions is None else 2)
        inner = torch.empty((num_pairs, columns), dtype=x.dtype, device=x.device)
        shared: dict[str, Any] = {"tile": config, "tiles": tiles, "pairs_per_row": num_pairs // len(x), "activation": activation}
        _product(x, weights.gate_up, weights.gate_up_bias, out=inner, **shared)
        if additions is None:
            return inner
        return gate_with_factors(inner, x, additions.gate_up, additions.slots, tiles=tiles, activation=self._activation)


def _product(x: Tensor, weight: Tensor | PackedWeight, bias: Tensor | None, *, tile: Tile, **more: Any) -> None:
    if isinstance(weight, PackedWeight):
        assert isinstance(tile, LinearTile)
        packed.multiply(x, weight, bias, tile=tile, **more)
    else:
        _multiply(x, weight, bias, tile=astuple(tile), **more)


def _expert(weights: ExpertWeights, activation: Activation) -> Expert:
    """Returns one expert in torch."""
    gate_up = PlainGated(_linear(weights.gate_up, weights.gate_up_bias), activation)
    return Expert(gate_up, _linear(weights.down, weights.down_bias))


def _linear(weight: Tensor | PackedWeight, bias: Tensor | None) -> Linear:
    return DenseLinear(weight, bias) if isinstance(weight, Tensor) else DequantizedLinear(weight, bias)
