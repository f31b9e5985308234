"""What adapters add to grouped products, by Triton: two launches for each product. Reference: `ExpertList.with_additions`."""

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from phalanx_runtime.model.experts import triton_adapters as kernels
from phalanx_runtime.model.experts.sparse import ExpertFactors
from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.kernels.variant import KernelVariant, launch, num_blocks, variant_of
from phalanx_runtime.model.operators import operator

BLOCK_RANKS, BLOCK_BYTES = 16, 256
"""Tiles: ranks, the smallest of tensor cores; inputs or outputs, half of them gates where the product is gated. Not tuned."""
_NUM_WARPS = 4
_TENSORS = "Tensor[] tiles, Tensor slots, Tensor ranks"


def _shrink_constants(
    num_experts: int, dtype: torch.dtype, *, per_token: int, pairs_per_row: int, block_rows: int
) -> dict[str, Any]:
    sizes = {"EXPERTS": num_experts, "PER_TOKEN": per_token, "PAIRS_PER_ROW": pairs_per_row}
    return {**sizes, "BLOCK_ROWS": block_rows, "BLOCK_RANKS": BLOCK_RANKS, "BLOCK_INPUTS": BLOCK_BYTES // dtype.itemsize}


def _expand_constants(
    num_experts: int, outputs: int, dtype: torch.dtype, *, per_token: int, block_rows: int, activation: Activation | None
) -> dict[str, Any]:
    block = BLOCK_BYTES // dtype.itemsize // (1 if activation is None else 2)
    sizes = {"EXPERTS": num_experts, "OUTPUTS": outputs, "PER_TOKEN": per_token, "BLOCK_ROWS": block_rows}
    return {**sizes, "BLOCK_RANKS": BLOCK_RANKS, "BLOCK_OUTPUTS": block, "ACTIVATION": activation or ""}


@operator(f"shrink_experts(Tensor x, Tensor a, {_TENSORS}, Tensor(a!) sums, int pairs_per_row)")
def _shrink(
    x: Tensor, a: Tensor, tiles: Sequence[Tensor], slots: Tensor, ranks: Tensor, sums: Tensor, pairs_per_row: int
) -> None:
    """Lists: pairs, experts and number of tiles."""
    linears, num_experts, num_slots, num_ranks, inputs = a.shape
    own = {"per_token": sums.shape[1] // len(slots), "pairs_per_row": pairs_per_row, "block_rows": tiles[0].shape[1]}
    values = (x, a, ranks, slots, *tiles, sums, x.stride(0), inputs, sums.shape[1], num_slots, num_ranks)
    arguments = dict(zip(kernels.shrink_experts.arg_names, values, strict=False))
    grid = (len(tiles[0]), num_blocks(num_ranks, BLOCK_RANKS), linears)
    constants = _shrink_constants(num_experts, x.dtype, **own)
    launch(kernels.shrink_experts, grid, {**arguments, **constants}, num_warps=_NUM_WARPS, num_stages=1)


@operator(f"expand_experts(Tensor sums, Tensor b, {_TENSORS}, Tensor? gates, Tensor(a!) out, str? activation)")
def _expand(
    sums: Tensor,
    b: Tensor,
    tiles: Sequence[Tensor],
    slots: Tensor,
    ranks: Tensor,
    gates: Tensor | None,
    out: Tensor,
    activation: Activation | None,
) -> None:
    """Lists: pairs, experts and number of tiles."""
    _, num_experts, num_slots, num_ranks, outputs = b.shape
    own: dict[str, Any] = {"per_token": len(out) // len(slots), "block_rows": tiles[0].shape[1], "activation": activation}
    constants = _expand_constants(num_experts, outputs, b.dtype, **own)
    values = (sums, b, ranks, slots, *tiles, out if gates is None else gates, out, len(out), num_slots, num_ranks)
    arguments = dict(zip(kernels.expand_experts.arg_names, values, strict=False))
    grid = (len(tiles[0]), num_blocks(outputs, constants["BLOCK_OUTPUTS"]))
    launch(kernels.expand_experts, grid, {**arguments, **constants}, num_warps=_NUM_WARPS, num_stages=1)


def _sums(x: Tensor, factors: ExpertFactors, slots: Tensor, tiles: Sequence[Tensor], num_pairs: int) -> Tensor:
    """Returns x A^T, fp32 [linears, pairs, ranks]."""
    linears, _, _, num_ranks, _ = factors.a.shape
    sums = torch.empty(linears, num_pairs, num_ranks, dtype=torch.float32, device=x.device)
    _shrink(x, factors.a, tiles, slots, ranks=factors.ranks, sums=sums, pairs_per_row=num_pairs // len(x))
    return sums


def gate_with_factors(
    gates: Tensor, x: Tensor, factors: ExpertFactors, slots: Tensor, *, tiles: Sequence[Tensor], activation: Activation
) -> Tensor:
    """Returns activation(gate) * up of the pairs of tiles, with what adapters add to both, [pairs, columns].

    gates: [pairs, 2 * columns], gate before up; x: [tokens, in]; slots: as in `StepAdapters`; tiles: as in `gpu.Tiles`.
    """
    out = gates.new_empty(len(gates), gates.shape[1] // 2)
    sums = _sums(x, factors, slots, tiles, len(gates))
    _expand(sums, factors.b, tiles, slots, ranks=factors.ranks, gates=gates, out=out, activation=activation)
    return out


def add_factors(y: Tensor, x: Tensor, factors: ExpertFactors, slots: Tensor, *, tiles: Sequence[Tensor]) -> None:
    """Adds what adapters add to pairs of tiles, in place. y: [pairs, out]; x: [pairs, in]; others as in `gate_with_factors`."""
    sums = _sums(x, factors, slots, tiles, len(y))
    _expand(sums, factors.b, tiles, slots, ranks=factors.ranks, gates=None, out=y, activation=None)


def factor_variants(
    num_experts: int, hidden: int, inner: int, dtype: torch.dtype, *, per_token: int, block_rows: int, activation: Activation
) -> list[KernelVariant]:
    """Returns the variants of one tile: of gate and up, and of down. num_experts: of the rank."""
    shared = {"per_token": per_token, "block_rows": block_rows}
    tiles = dict.fromkeys(("pairs", "tile_experts", "num_tiles"), torch.int32)
    numbers: dict[str, Any] = {**tiles, **dict.fromkeys(("ranks", "slots"), torch.int64), "sums": torch.float32}
    numbers |= {"num_pairs": 1, "num_slots": 1, "num_ranks": 1}
    variants = []
    for inputs, outputs, own in ((hidden, inner, activation), (inner, hidden, None)):
        constants = _shrink_constants(num_experts, dtype, **shared, pairs_per_row=1 if own is None else per_token)
        shrink = {**numbers, "x": dtype, "a": dtype, "x_stride": inputs, "inputs": inputs, **constants}
        variants.append(variant_of(kernels.shrink_experts, shrink, num_warps=_NUM_WARPS, num_stages=1))
        constants = _expand_constants(num_experts, outputs, dtype, **shared, activation=own)
        expand = {**numbers, **dict.fromkeys(("b", "gates", "out"), dtype), **constants}
        variants.append(variant_of(kernels.expand_experts, expand, num_warps=_NUM_WARPS, num_stages=1))
    return variants
