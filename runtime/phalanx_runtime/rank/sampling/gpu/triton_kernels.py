"""Triton kernels of sampling: from raw logits to tokens without a sort and without the host.

    scan_logits      per block   highest logit / T; in rows without filters also the token that wins with its noise
    sample_kept      per block   in rows with filters the kept token that wins with its noise, after `triton_thresholds`
    select_tokens    per row     the winner of all blocks

Logits / T are computed again by each kernel that needs them, and not stored. Bytes read per token: 2 or 4 of logits, and in rows
that have them 4 of a count, 4 of a bias and 1/8 of a mask.

Source: Gumbel-max sampling with the keyed noise of `gumbel`.
"""

import triton
import triton.language as tl

from phalanx_runtime.rank.sampling.gpu.triton_rows import (
    FILTERS,
    PENALTIES,
    add_output_token,
    is_filtered,
    row_noise,
    scaled_logits,
)
from phalanx_runtime.rank.sampling.gpu.triton_thresholds import TALLIES

INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _store_winner(values, first, best_values, best_tokens, place):
    """Stores the highest value of a block and its lowest token."""
    best, at = tl.max(values, 0, return_indices=True, return_indices_tie_break_left=True)
    tl.store(best_values + place, best)
    tl.store(best_tokens + place, first + at)


@triton.jit(do_not_specialize=["num_blocks"])
def scan_logits(
    logits,
    rows,
    indices,
    floats,
    integers,
    seeds,
    counts,
    bias,
    masks,
    maxima,
    tallies,
    best_values,
    best_tokens,
    stride,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Writes the winner of block `program_id(1)` of draw `program_id(0)`, with filters its maximum, and clears `tallies`.

    logits: [draws, vocabulary], read once. rows, indices: [draws]. best_values, best_tokens, maxima: [draws, num_blocks].
    """
    draw = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.load(rows + draw)
    place = draw * num_blocks + block
    first = block * BLOCK
    if row < 0:
        tl.store(best_values + place, -INFINITY)
    else:
        index = tl.load(indices + draw)
        state = (floats, integers, counts, bias, masks)
        token = first + tl.arange(0, BLOCK)
        logits += draw.to(tl.int64) * stride
        values = scaled_logits(logits, state, row, index, token, vocab_size=vocab_size, FEATURES=FEATURES)
        has_filters = False
        if FILTERS & FEATURES:
            has_filters = is_filtered(floats, integers, row, vocab_size)
            tl.store(maxima + place, tl.max(values, 0))
            if block == 0:
                lane = tl.arange(0, 128)
                tl.store(tallies + draw * TALLIES + lane, tl.zeros([128], tl.int64), mask=lane < TALLIES)
        if not has_filters:
            _store_winner(values + row_noise(floats, seeds, row, index, token), first, best_values, best_tokens, place)


@triton.jit(do_not_specialize=["num_blocks"])
def sample_kept(
    logits,
    rows,
    indices,
    floats,
    integers,
    seeds,
    counts,
    bias,
    masks,
    maxima,
    thresholds,
    best_values,
    best_tokens,
    stride,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Writes the winner of the block's kept tokens, in rows with filters. Reads the logits of blocks with a kept token."""
    draw = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.load(rows + draw)
    if row >= 0:
        if is_filtered(floats, integers, row, vocab_size):
            place = draw * num_blocks + block
            threshold = tl.load(thresholds + draw)
            if tl.load(maxima + place) >= threshold:
                index = tl.load(indices + draw)
                state = (floats, integers, counts, bias, masks)
                token = block * BLOCK + tl.arange(0, BLOCK)
                logits += draw.to(tl.int64) * stride
                values = scaled_logits(logits, state, row, index, token, vocab_size=vocab_size, FEATURES=FEATURES)
                values = tl.where(values >= threshold, values, -INFINITY)
                values += row_noise(floats, seeds, row, index, token)
                _store_winner(values, block * BLOCK, best_values, best_tokens, place)
            else:
                tl.store(best_values + place, -INFINITY)


@triton.jit(do_not_specialize=["num_blocks"])
def select_tokens(
    rows,
    integers,
    counts,
    best_values,
    best_tokens,
    tokens,
    last_tokens,
    vocab_size,
    num_blocks,
    BLOCKS_PADDED: tl.constexpr,
    FEATURES: tl.constexpr,
    IS_FINAL: tl.constexpr,
):
    """Writes the token of draw `program_id(0)`: the lowest with the highest value, -1 without one. Reads 8 * num_blocks bytes.

    `IS_FINAL`: also writes the row's entry of `last_tokens` and counts the token.
    """
    draw = tl.program_id(0)
    block = tl.arange(0, BLOCKS_PADDED)
    is_block = block < num_blocks
    values = tl.load(best_values + draw * num_blocks + block, mask=is_block, other=-INFINITY)
    candidates = tl.load(best_tokens + draw * num_blocks + block, mask=is_block, other=vocab_size)
    best = tl.max(values, 0)
    token = tl.min(tl.where(values == best, candidates, vocab_size), 0)
    token = tl.where(best > -INFINITY, token, -1)
    tl.store(tokens + draw, token.to(tokens.dtype.element_ty))
    row = tl.load(rows + draw)
    if IS_FINAL:
        if row >= 0:
            tl.store(last_tokens + row, tl.maximum(token, 0).to(last_tokens.dtype.element_ty))
            if PENALTIES & FEATURES:
                add_output_token(counts, integers, row, token, vocab_size)
