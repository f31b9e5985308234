"""Triton kernels of what adapters add to a linear: x A^T, and its product with B.

A program has up to BLOCK_ROWS tokens of a piece, `[slot, start, stop]`: tokens rows[start], ..., rows[stop - 1] of the step. It
ends at once if these are fewer, or if the slot has no factors of the linear.
"""

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["num_ranks"])
def shrink_rows(
    x,
    a,
    ranks,
    rows,
    pieces,
    sums,
    x_stride,
    inputs,
    num_ranks,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
):
    """Writes x A^T of the rows of a piece to sums, fp32 [rows, num_ranks]. x: [tokens, inputs]; a: [slots, num_ranks, inputs]."""
    piece = pieces + 3 * tl.program_id(0)
    slot, start, stop = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    first_row, first_rank, num_own = start + tl.program_id(2) * BLOCK_ROWS, tl.program_id(1) * BLOCK_RANKS, tl.load(ranks + slot)
    if (first_row < stop) & (first_rank < num_own):
        row = first_row + tl.arange(0, BLOCK_ROWS)
        rank = first_rank + tl.arange(0, BLOCK_RANKS)
        is_row, is_rank = row < stop, rank < num_own
        token = tl.load(rows + row, mask=is_row, other=0)
        column = tl.arange(0, BLOCK_INPUTS)
        own = x + token[:, None] * x_stride + column[None, :]
        factor = a + (slot * num_ranks + rank).to(tl.int64)[None, :] * inputs + column[:, None]
        total = tl.zeros([BLOCK_ROWS, BLOCK_RANKS], tl.float32)
        for first in range(0, inputs, BLOCK_INPUTS):
            is_column = first + column < inputs
            values = tl.load(own + first, mask=is_row[:, None] & is_column[None, :], other=0.0)
            weights = tl.load(factor + first, mask=is_column[:, None] & is_rank[None, :], other=0.0)
            total = tl.dot(values, weights, total, input_precision="ieee")
        place = sums + row[:, None] * num_ranks + rank[None, :]
        tl.store(place, total, mask=is_row[:, None] & is_rank[None, :])


@triton.jit(do_not_specialize=["num_ranks"])
def expand_rows(
    sums,
    b,
    ranks,
    rows,
    pieces,
    y,
    y_stride,
    outputs,
    num_ranks,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_RANKS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
):
    """Adds sums, rounded to the dtype of B, times B to rows of y. b: [slots, num_ranks, outputs]; y: [tokens, outputs]."""
    piece = pieces + 3 * tl.program_id(0)
    slot, start, stop = tl.load(piece), tl.load(piece + 1), tl.load(piece + 2)
    first_row, num_own = start + tl.program_id(2) * BLOCK_ROWS, tl.load(ranks + slot)
    if (first_row < stop) & (num_own > 0):
        row = first_row + tl.arange(0, BLOCK_ROWS)
        output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        is_row, is_output = row < stop, output < outputs
        token = tl.load(rows + row, mask=is_row, other=0)
        column = tl.arange(0, BLOCK_RANKS)
        total = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
        for first in range(0, num_own, BLOCK_RANKS):
            rank = first + column
            is_rank = rank < num_own
            own = tl.load(sums + row[:, None] * num_ranks + rank[None, :], mask=is_row[:, None] & is_rank[None, :], other=0.0)
            factor = b + (slot * num_ranks + rank).to(tl.int64)[:, None] * outputs + output[None, :]
            weights = tl.load(factor, mask=is_rank[:, None] & is_output[None, :], other=0.0)
            total = tl.dot(own.to(b.dtype.element_ty), weights, total, input_precision="ieee")
        place, is_place = y + token[:, None] * y_stride + output[None, :], is_row[:, None] & is_output[None, :]
        before = tl.load(place, mask=is_place, other=0.0).to(tl.float32)
        tl.store(place, (before + total).to(y.dtype.element_ty), mask=is_place)
