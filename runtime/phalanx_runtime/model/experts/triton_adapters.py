"""Triton kernels of what adapters add to grouped products: x A^T, and its product with B.

Rows of a tile, pairs of one expert as `sort_pairs` has them, are one group for each adapter among them. A program computes its
tile's groups in turn, in which rows of others are zeros, so no sum depends on them. It ends at once beyond the last tile, and
reads no factors of an adapter that does not change the expert. The device has the slot of each token: a CUDA graph contains the
step.
"""

import triton
import triton.language as tl

from phalanx_runtime.model.experts.triton_kernels import activated


@triton.jit
def pair_slots(slots, pair, num_slots, PER_TOKEN: tl.constexpr):
    """Returns the slot of each pair's token, int32; num_slots for one without an adapter, and for an unused row."""
    is_pair = pair >= 0
    slot = tl.load(slots + tl.where(is_pair, pair, 0) // PER_TOKEN, mask=is_pair, other=-1).to(tl.int32)
    return tl.where(slot >= 0, slot, num_slots)


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "num_ranks"])
def shrink_experts(
    x,
    a,
    ranks,
    slots,
    pairs,
    tile_experts,
    num_tiles,
    sums,
    x_stride,
    inputs,
    num_pairs,
    num_slots,
    num_ranks,
    EXPERTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """Writes x A^T of tile `program_id(0)` for BLOCK_RANKS ranks of linear `program_id(2)`.

    x: [rows, inputs] with a stride, row pair // PAIRS_PER_ROW for a pair; a: [linears, EXPERTS, num_slots, num_ranks, inputs];
    ranks: int64 [linears, EXPERTS, num_slots]; slots: int64 [tokens], -1 without an adapter; sums: fp32 [linears, num_pairs,
    num_ranks], written for pairs with an adapter; those of ranks that an adapter lacks are never read. fp32 sums.
    """
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        first_rank, linear = tl.program_id(1) * BLOCK_RANKS, tl.program_id(2)
        pair = tl.load(pairs + tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))
        left = pair_slots(slots, pair, num_slots, PER_TOKEN)
        is_adapted = left < num_slots
        x_row = (tl.where(is_adapted, pair, 0) // PAIRS_PER_ROW).to(tl.int64) * x_stride
        first_group = (linear * EXPERTS + tl.load(tile_experts + tile)) * num_slots
        rank = first_rank + tl.arange(0, BLOCK_RANKS)
        is_rank = rank < num_ranks
        column = tl.arange(0, BLOCK_INPUTS)
        own = x + x_row[:, None] + column[None, :]
        total = tl.zeros([BLOCK_ROWS, BLOCK_RANKS], tl.float32)
        slot = tl.min(left, 0)
        while slot < num_slots:
            is_own = left == slot
            num_own = tl.load(ranks + first_group + slot)
            factor = a + ((first_group + slot).to(tl.int64) * num_ranks + rank)[None, :] * inputs + column[:, None]
            for first in range(0, tl.where(first_rank < num_own, inputs, 0), BLOCK_INPUTS):
                is_column = first + column < inputs
                values = tl.load(own + first, mask=is_own[:, None] & is_column[None, :], other=0.0)
                weights = tl.load(factor + first, mask=is_column[:, None] & is_rank[None, :], other=0.0)
                total = tl.dot(values, weights, total, input_precision="ieee")
            left = tl.where(is_own, num_slots, left)
            slot = tl.min(left, 0)
        place = sums + (linear * num_pairs + pair).to(tl.int64)[:, None] * num_ranks + rank[None, :]
        tl.store(place, total, mask=is_adapted[:, None] & is_rank[None, :])


@triton.jit
def expanded(
    sums, b, ranks, pair, left, output, first_group, num_slots, num_ranks, OUTPUTS: tl.constexpr, BLOCK_RANKS: tl.constexpr
):
    """Returns sums, rounded to the dtype of B, times B. left: slot of each row; output: columns of B."""
    column = tl.arange(0, BLOCK_RANKS)
    total = tl.zeros([left.shape[0], output.shape[0]], tl.float32)
    slot = tl.min(left, 0)
    while slot < num_slots:
        is_own = left == slot
        num_own = tl.load(ranks + first_group + slot).to(tl.int32)
        factor = b + (first_group + slot).to(tl.int64) * num_ranks * OUTPUTS
        for first in range(0, num_own, BLOCK_RANKS):
            rank = first + column
            is_rank = rank < num_own
            own = sums + pair.to(tl.int64)[:, None] * num_ranks + rank[None, :]
            values = tl.load(own, mask=is_own[:, None] & is_rank[None, :], other=0.0).to(b.dtype.element_ty)
            is_weight = is_rank[:, None] & (output < OUTPUTS)[None, :]
            weights = tl.load(factor + rank[:, None] * OUTPUTS + output[None, :], mask=is_weight, other=0.0)
            total = tl.dot(values, weights, total, input_precision="ieee")
        left = tl.where(is_own, num_slots, left)
        slot = tl.min(left, 0)
    return total


@triton.jit(do_not_specialize=["num_pairs", "num_slots", "num_ranks"])
def expand_experts(
    sums,
    b,
    ranks,
    slots,
    pairs,
    tile_experts,
    num_tiles,
    gates,
    out,
    num_pairs,
    num_slots,
    num_ranks,
    EXPERTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Adds sums, rounded to the dtype of B, times B to pairs of tile `program_id(0)`, for BLOCK_OUTPUTS columns.

    out: [num_pairs, OUTPUTS]. With ACTIVATION, gates, [num_pairs, 2 * OUTPUTS] with gate before up, get what is added, and
    activation(gate) * up of all pairs of the tile is written to out. b: [linears, EXPERTS, num_slots, num_ranks, OUTPUTS]; other
    tensors as in `shrink_experts`. The result is rounded once.
    """
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        is_gated: tl.constexpr = ACTIVATION != ""
        pair = tl.load(pairs + tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))
        slot = pair_slots(slots, pair, num_slots, PER_TOKEN)
        group = tl.load(tile_experts + tile) * num_slots
        output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        total = expanded(
            sums,
            b,
            ranks,
            pair,
            left=slot,
            output=output,
            first_group=group,
            num_slots=num_slots,
            num_ranks=num_ranks,
            OUTPUTS=OUTPUTS,
            BLOCK_RANKS=BLOCK_RANKS,
        )
        place = pair.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
        if is_gated:
            is_place = (pair >= 0)[:, None] & (output < OUTPUTS)[None, :]
            gate = gates + pair.to(tl.int64)[:, None] * (2 * OUTPUTS) + output[None, :]
            total += tl.load(gate, mask=is_place, other=0.0).to(tl.float32)
            group += EXPERTS * num_slots
            up = expanded(
                sums,
                b,
                ranks,
                num_pairs + pair,
                left=slot,
                output=output,
                first_group=group,
                num_slots=num_slots,
                num_ranks=num_ranks,
                OUTPUTS=OUTPUTS,
                BLOCK_RANKS=BLOCK_RANKS,
            )
            up += tl.load(gate + OUTPUTS, mask=is_place, other=0.0).to(tl.float32)
            total = activated(total, up, ACTIVATION)
        else:
            is_place = (slot < num_slots)[:, None] & (output < OUTPUTS)[None, :]
            total += tl.load(out + place, mask=is_place, other=0.0).to(tl.float32)
        tl.store(out + place, total.to(out.dtype.element_ty), mask=is_place)
