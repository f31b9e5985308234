"""Triton kernels of a mixture of experts: routing, sorting of (token, expert) pairs into tiles, grouped products, weighted sums.

A pair is token * per_token + place among the token's experts. A tile is up to BLOCK_ROWS pairs of one expert. The device sorts
pairs into tiles; grids depend on the number of tokens alone, so that a CUDA graph contains the step, and programs beyond the last
tile end at once. Each pair has its own row of results, added in the order of the token's experts: no sum depends on other tokens.

Reference: `ExpertList`. Sources: MegaBlocks (Gale et al. 2022) for tiles of one expert, vLLM for tiles padded on the device.
"""

import triton
import triton.language as tl

from phalanx_runtime.model.kernels.arithmetic import gelu_exponent, times_sigmoid
from phalanx_runtime.model.linear.triton_kernels import dequantized, load_scale, load_words, scaled


@triton.jit
def route_experts(
    logits,
    experts,
    weights,
    logits_stride,
    EXPERTS: tl.constexpr,
    EXPERTS_PADDED: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    PER_TOKEN_PADDED: tl.constexpr,
    NORM_TOPK_PROB: tl.constexpr,
):
    """Writes the experts with the largest logits of token `program_id(0)` and their weights; the lower number wins a tie.

    logits: [tokens, EXPERTS] with a stride; experts (int32), weights (fp32): [tokens, PER_TOKEN].
    """
    token = tl.program_id(0).to(tl.int64)
    number = tl.arange(0, EXPERTS_PADDED)
    is_expert = number < EXPERTS
    left = tl.load(logits + token * logits_stride + number, mask=is_expert, other=float("-inf")).to(tl.float32)
    largest = tl.max(left, 0)
    divisor = tl.sum(tl.exp(left - largest), 0)
    place = tl.arange(0, PER_TOKEN_PADDED)
    chosen = tl.zeros([PER_TOKEN_PADDED], tl.int32)
    shares = tl.zeros([PER_TOKEN_PADDED], tl.float32)
    for i in range(PER_TOKEN):
        best = tl.max(left, 0)
        expert = tl.min(tl.where(left == best, number, EXPERTS - 1), 0)
        chosen = tl.where(place == i, expert, chosen)
        shares = tl.where(place == i, tl.exp(best - largest), shares)
        left = tl.where(number == expert, float("-inf"), left)
    if NORM_TOPK_PROB:
        divisor = tl.sum(shares, 0)
    is_place = place < PER_TOKEN
    tl.store(experts + token * PER_TOKEN + place, chosen, mask=is_place)
    tl.store(weights + token * PER_TOKEN + place, shares / divisor, mask=is_place)


@triton.jit(do_not_specialize=["num_pairs", "first"])
def sort_pairs(
    experts,
    pairs,
    tile_experts,
    num_tiles,
    num_pairs,
    first,
    EXPERTS: tl.constexpr,
    BINS: tl.constexpr,
    BLOCK_PAIRS: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """Writes the pairs of expert `first + program_id(0)` to its tiles, in order; unused rows of a tile are -1.

    experts: [num_pairs]; pairs: [tiles, BLOCK_ROWS]; tile_experts: [tiles], counted from `first`; num_tiles: [1]. All int32.
    EXPERTS: experts of this rank; BINS: a power of two above it. Each program counts all pairs: no program waits for another.
    """
    own = tl.program_id(0)
    bins = tl.arange(0, BINS)
    counts = tl.zeros([BINS], tl.int32)
    for start in range(0, num_pairs, BLOCK_PAIRS):
        pair = start + tl.arange(0, BLOCK_PAIRS)
        expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1) - first
        expert = tl.where((pair < num_pairs) & (expert >= 0) & (expert < EXPERTS), expert, EXPERTS)
        counts += tl.histogram(expert, BINS)
    tiles = tl.where(bins < EXPERTS, (counts + BLOCK_ROWS - 1) // BLOCK_ROWS, 0)
    first_tile = tl.sum(tl.where(bins < own, tiles, 0), 0)
    own_tiles = tl.sum(tl.where(bins == own, tiles, 0), 0)
    if own == 0:
        tl.store(num_tiles, tl.sum(tiles, 0))

    placed = 0
    for start in range(0, num_pairs, BLOCK_PAIRS):
        pair = start + tl.arange(0, BLOCK_PAIRS)
        expert = tl.load(experts + pair, mask=pair < num_pairs, other=-1) - first
        is_own = (pair < num_pairs) & (expert == own)
        rank = placed + tl.cumsum(is_own.to(tl.int32), 0) - 1
        tl.store(pairs + first_tile * BLOCK_ROWS + rank, pair, mask=is_own)
        placed += tl.sum(is_own.to(tl.int32), 0)
    row = placed + tl.arange(0, BLOCK_ROWS)
    tl.store(pairs + first_tile * BLOCK_ROWS + row, tl.full([BLOCK_ROWS], -1, tl.int32), mask=row < own_tiles * BLOCK_ROWS)
    for start in range(0, own_tiles, BLOCK_ROWS):
        tile = start + tl.arange(0, BLOCK_ROWS)
        tl.store(tile_experts + first_tile + tile, tl.full([BLOCK_ROWS], 0, tl.int32) + own, mask=tile < own_tiles)


@triton.jit
def activated(gates, up, ACTIVATION: tl.constexpr):
    """Returns activation(gates) * up: silu, gelu by tanh, or swigluoai, as `layers.gate`."""
    if ACTIVATION == "swigluoai":
        gates = tl.minimum(gates, 7.0)
        up = tl.minimum(tl.maximum(up, -7.0), 7.0) + 1.0
        exponent = 1.702 * gates
    elif ACTIVATION == "silu":
        exponent = gates
    else:
        exponent = gelu_exponent(gates)
    return times_sigmoid(gates, exponent) * up


@triton.jit
def multiply_experts(
    x,
    weight,
    bias,
    out,
    pairs,
    tile_experts,
    num_tiles,
    x_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Multiplies the rows of tile `program_id(0)` with BLOCK_OUTPUTS rows of their expert's weight.

    x: [rows, INPUTS] with a stride, row pair // PAIRS_PER_ROW for a pair; weight: [experts, rows, INPUTS]; bias: [experts, rows];
    out: [pairs, OUTPUTS]. Rows are OUTPUTS, or with ACTIVATION twice as many, gate above up, for activation(gate) * up.
    Bytes: the weight once per tile, the rows once per BLOCK_OUTPUTS. fp32 sums.
    """
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        is_gated: tl.constexpr = ACTIVATION != ""
        weight_rows: tl.constexpr = 2 * OUTPUTS if is_gated else OUTPUTS
        expert = tl.load(tile_experts + tile).to(tl.int64)
        pair = tl.load(pairs + tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))
        is_pair = pair >= 0
        x_row = (tl.where(is_pair, pair, 0) // PAIRS_PER_ROW).to(tl.int64) * x_stride
        output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        is_output = output < OUTPUTS
        weight_row = expert * weight_rows * INPUTS + tl.where(is_output, output, 0).to(tl.int64) * INPUTS
        total = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
        total_up = tl.zeros([BLOCK_ROWS, BLOCK_OUTPUTS], tl.float32)
        for start in range(0, INPUTS, BLOCK_INPUTS):
            column = start + tl.arange(0, BLOCK_INPUTS)
            is_column = column < INPUTS
            x_tile = tl.load(x + x_row[:, None] + column[None, :], mask=is_pair[:, None] & is_column[None, :], other=0.0)
            w_tile = tl.load(weight + weight_row[:, None] + column[None, :], mask=is_column[None, :], other=0.0)
            total = tl.dot(x_tile, tl.trans(w_tile), total, input_precision="ieee")
            if is_gated:
                up_tile = tl.load(
                    weight + OUTPUTS * INPUTS + weight_row[:, None] + column[None, :], mask=is_column[None, :], other=0.0
                )
                total_up = tl.dot(x_tile, tl.trans(up_tile), total_up, input_precision="ieee")
        if HAS_BIAS:
            total += tl.load(bias + expert * weight_rows + output, mask=is_output, other=0.0).to(tl.float32)[None, :]
            if is_gated:
                total_up += tl.load(bias + expert * weight_rows + OUTPUTS + output, mask=is_output, other=0.0).to(tl.float32)[
                    None, :
                ]
        if is_gated:
            total = activated(total, total_up, ACTIVATION)
        to = out + pair.to(tl.int64)[:, None] * OUTPUTS + output[None, :]
        tl.store(to, total.to(out.dtype.element_ty), mask=is_pair[:, None] & is_output[None, :])


@triton.jit
def multiply_packed_experts(
    x,
    words,
    scales,
    bias,
    out,
    pairs,
    tile_experts,
    num_tiles,
    x_stride,
    INPUTS: tl.constexpr,
    OUTPUTS: tl.constexpr,
    PAIRS_PER_ROW: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    WORDS: tl.constexpr,
    GROUPS: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
):
    """Multiplies as `multiply_experts`, by weights that it dequantises in registers: the left operand of the product.

    words: int32 [experts, rows, WORDS]; scales: [experts, rows, GROUPS], as in `PackedWeight`. GROUP: inputs with a common scale;
    0: one scale per row. Weights with scales are rounded to the dtype of x. Bytes: the words once per tile.
    """
    tile = tl.program_id(0)
    if tile < tl.load(num_tiles):
        is_gated: tl.constexpr = ACTIVATION != ""
        weight_rows: tl.constexpr = 2 * OUTPUTS if is_gated else OUTPUTS
        FIELDS: tl.constexpr = 4 if FORMAT == 8 or FORMAT == 9 or FORMAT == 24 else 8
        SPAN: tl.constexpr = FIELDS * WIDTH
        SPANS: tl.constexpr = (INPUTS + SPAN - 1) // SPAN
        dtype = x.dtype.element_ty
        first_row = tl.load(tile_experts + tile).to(tl.int64) * weight_rows
        pair = tl.load(pairs + tile * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS))
        is_pair = pair >= 0
        x_row = (tl.where(is_pair, pair, 0) // PAIRS_PER_ROW).to(tl.int64) * x_stride
        output = tl.program_id(1) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
        is_output = output < OUTPUTS
        row = first_row + tl.where(is_output, output, 0)
        word = tl.arange(0, WIDTH)
        total = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
        total_up = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
        weight_row, scale_row = words + row[:, None] * WORDS, scales + row * GROUPS
        for span in range(SPANS):
            gates, high_gates = load_words(
                weight_row, span, SPANS, word[None, :], mask=is_output[:, None], WIDTH=WIDTH, FORMAT=FORMAT
            )
            if is_gated:
                ups, high_ups = load_words(
                    weight_row + OUTPUTS * WORDS, span, SPANS, word[None, :], mask=is_output[:, None], WIDTH=WIDTH, FORMAT=FORMAT
                )
            for field in tl.static_range(FIELDS):
                first = span * SPAN + field * WIDTH
                column = first + word
                is_value = is_pair[:, None] & (column < INPUTS)[None, :]
                values = tl.load(x + x_row[:, None] + column[None, :], mask=is_value, other=0.0)
                scaled_column = tl.minimum(first, INPUTS - 1)
                weights = dequantized(gates, high_gates, field, FORMAT)
                if GROUP > 0:
                    scale, offset = load_scale(scale_row, scaled_column, INPUTS, mask=is_output, FORMAT=FORMAT, GROUP=GROUP)
                    weights = scaled(weights, scale[:, None], offset[:, None], FORMAT)
                total += tl.dot(weights.to(dtype), tl.trans(values), input_precision="ieee")
                if is_gated:
                    weights = dequantized(ups, high_ups, field, FORMAT)
                    if GROUP > 0:
                        scale, offset = load_scale(
                            scale_row + OUTPUTS * GROUPS, scaled_column, INPUTS, mask=is_output, FORMAT=FORMAT, GROUP=GROUP
                        )
                        weights = scaled(weights, scale[:, None], offset[:, None], FORMAT)
                    total_up += tl.dot(weights.to(dtype), tl.trans(values), input_precision="ieee")
        if GROUP == 0:
            total *= tl.load(scales + row)[:, None]
            if is_gated:
                total_up *= tl.load(scales + row + OUTPUTS)[:, None]
        if HAS_BIAS:
            total += tl.load(bias + row).to(tl.float32)[:, None]
            if is_gated:
                total_up += tl.load(bias + row + OUTPUTS).to(tl.float32)[:, None]
        if is_gated:
            total = activated(total, total_up, ACTIVATION)
        to = out + pair.to(tl.int64)[None, :] * OUTPUTS + output[:, None]
        tl.store(to, total.to(out.dtype.element_ty), mask=is_pair[None, :] & is_output[:, None])


@triton.jit(do_not_specialize=["first"])
def combine_experts(
    outputs,
    experts,
    weights,
    out,
    out_stride,
    first,
    EXPERTS: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    PER_TOKEN: tl.constexpr,
    ADDS: tl.constexpr,
):
    """Writes, or with ADDS adds, the weighted sum of the outputs of this rank's experts to token `program_id(0)`.

    outputs: [pairs, SIZE]; experts, weights: [tokens, PER_TOKEN]; out: [tokens, SIZE] with a stride; BLOCK columns per program.
    Bytes: PER_TOKEN + 1 rows of SIZE, one more with ADDS. fp32 sums in the order of the token's experts.
    """
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < SIZE
    dtype = out.dtype.element_ty
    total = tl.zeros([BLOCK], tl.float32)
    for i in range(PER_TOKEN):
        pair = token * PER_TOKEN + i
        expert = tl.load(experts + pair) - first
        size = tl.where((expert >= 0) & (expert < EXPERTS), SIZE, 0)  # a rank reads no pair of another rank's experts
        value = tl.load(outputs + pair * SIZE + column, mask=column < size, other=0.0).to(tl.float32)
        total += tl.load(weights + pair) * value
    to = out + token * out_stride + column
    if ADDS:
        total = total.to(dtype).to(tl.float32) + tl.load(to, mask=is_column, other=0.0).to(tl.float32)
    tl.store(to, total.to(dtype), mask=is_column)
