"""Triton kernels between the linears of a decoder layer. Reference of each: the method of its name in `TorchOps`.

Each reads its inputs once and writes its results once. Sums and products have fp32; results round where the reference rounds.
"""

import triton
import triton.language as tl

from phalanx_runtime.model.kernels.arithmetic import await_inputs, gated, weighted


@triton.jit
def sum_parts(part_0, part_1, part_2, part_3, part_4, part_5, part_6, part_7, offset, is_column, PARTS: tl.constexpr):
    """Returns the sum of the first PARTS parts at `offset`, in their order, as fp32."""
    total = tl.load(part_0 + offset, mask=is_column, other=0.0).to(tl.float32)
    total += tl.load(part_1 + offset, mask=is_column, other=0.0).to(tl.float32)
    if PARTS > 2:
        total += tl.load(part_2 + offset, mask=is_column, other=0.0).to(tl.float32)
    if PARTS > 3:
        total += tl.load(part_3 + offset, mask=is_column, other=0.0).to(tl.float32)
    if PARTS > 4:
        total += tl.load(part_4 + offset, mask=is_column, other=0.0).to(tl.float32)
    if PARTS > 5:
        total += tl.load(part_5 + offset, mask=is_column, other=0.0).to(tl.float32)
    if PARTS > 6:
        total += tl.load(part_6 + offset, mask=is_column, other=0.0).to(tl.float32)
    if PARTS > 7:
        total += tl.load(part_7 + offset, mask=is_column, other=0.0).to(tl.float32)
    return total


@triton.jit
def add_parts_norm(
    x,
    part_0,
    part_1,
    part_2,
    part_3,
    part_4,
    part_5,
    part_6,
    part_7,
    after,
    before,
    out,
    eps,
    x_stride,
    SIZE: tl.constexpr,
    SIZE_PADDED: tl.constexpr,
    PARTS: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
):
    """As `add_norm`, of the sum of 2 to 8 parts. Parts: [rows, SIZE], contiguous; those of other ranks are in their memory.

    Bytes: PARTS + 3 rows, of which PARTS - 1 come from other GPUs.
    """
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PADDED)
    is_column = column < SIZE
    dtype = x.dtype.element_ty
    offset = row * SIZE + column
    added = sum_parts(
        part_0=part_0,
        part_1=part_1,
        part_2=part_2,
        part_3=part_3,
        part_4=part_4,
        part_5=part_5,
        part_6=part_6,
        part_7=part_7,
        offset=offset,
        is_column=is_column,
        PARTS=PARTS,
    )
    added = added.to(dtype).to(tl.float32)
    if HAS_AFTER:
        scale = tl.rsqrt(tl.sum(added * added, 0) / SIZE + eps)
        added = weighted(added, scale, tl.load(after + column, mask=is_column, other=0.0), dtype).to(tl.float32)
    total = (tl.load(x + row * x_stride + column, mask=is_column, other=0.0).to(tl.float32) + added).to(dtype)
    tl.store(x + row * x_stride + column, total, mask=is_column)
    if HAS_BEFORE:
        values = total.to(tl.float32)
        scale = tl.rsqrt(tl.sum(values * values, 0) / SIZE + eps)
        normed = weighted(values, scale, tl.load(before + column, mask=is_column, other=0.0), dtype)
        tl.store(out + offset, normed, mask=is_column)


@triton.jit
def add_norm(
    x,
    y,
    after,
    before,
    out,
    eps,
    x_stride,
    y_stride,
    size,
    SIZE_PADDED: tl.constexpr,
    HAS_SUM: tl.constexpr,
    HAS_AFTER: tl.constexpr,
    HAS_BEFORE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Writes x + y (or x + norm(y, after)) to x with HAS_SUM, then norm(x, before) to `out` with HAS_BEFORE.

    x, y: [rows, size] with strides; out: [rows, size]; a row per program. Bytes: up to four rows, in one pass over memory.
    """
    if IS_EARLY:
        await_inputs()
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, SIZE_PADDED)
    is_column = column < size
    dtype = x.dtype.element_ty
    values = tl.load(x + row * x_stride + column, mask=is_column, other=0.0).to(tl.float32)
    if HAS_SUM:
        added = tl.load(y + row * y_stride + column, mask=is_column, other=0.0).to(tl.float32)
        if HAS_AFTER:
            scale = tl.rsqrt(tl.sum(added * added, 0) / size + eps)
            added = weighted(added, scale, tl.load(after + column, mask=is_column, other=0.0), dtype).to(tl.float32)
        total = (values + added).to(dtype)
        tl.store(x + row * x_stride + column, total, mask=is_column)
        values = total.to(tl.float32)
    if HAS_BEFORE:
        scale = tl.rsqrt(tl.sum(values * values, 0) / size + eps)
        normed = weighted(values, scale, tl.load(before + column, mask=is_column, other=0.0), dtype)
        tl.store(out + row * size + column, normed, mask=is_column)


@triton.jit
def gate(
    gate_up,
    out,
    row_stride,
    size,
    BLOCK: tl.constexpr,
    IS_SILU: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Writes activation(gate) * up: silu, or gelu by tanh.

    gate_up: [rows, 2 * size] with a stride; out: [rows, size]; BLOCK columns of a row per program. Bytes: 3 rows of `size`.
    """
    if IS_EARLY:
        await_inputs()
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = column < size
    dtype = gate_up.dtype.element_ty
    gates = tl.load(gate_up + row * row_stride + column, mask=is_column, other=0.0).to(tl.float32)
    up = tl.load(gate_up + row * row_stride + size + column, mask=is_column, other=0.0).to(tl.float32)
    tl.store(out + row * size + column, gated(gates, up, dtype, IS_SILU).to(dtype), mask=is_column)


@triton.jit(do_not_specialize=["heads", "kv_heads", "query_blocks"])
def prepare_heads(
    qk,
    v,
    k_cache,
    v_cache,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    qk_stride,
    v_stride,
    heads,
    kv_heads,
    query_blocks,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    HALF_PADDED: tl.constexpr,
    REST_PADDED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Writes normalised and rotated queries and keys in place, and keys and values to the rows `slots` of the pages.

    qk: [tokens, heads + kv_heads, DIM], v: [tokens, kv_heads, DIM], with a stride of tokens. cos, sin: [tokens, 2 * HALF].
    Pages: rows of DIM elements. A slot below 0 writes no row: padding of a CUDA graph. BLOCK_HEADS heads of a token per program,
    first queries (`query_blocks` programs a token), then keys with their values. A head has HALF pairs (d, d + HALF), then
    DIM - 2 * HALF dimensions that do not rotate. Bytes per token: 2 * (heads + 2 * kv_heads) * DIM elements, and the keys again.
    """
    if IS_EARLY:
        await_inputs()
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    is_query = block < query_blocks
    member = tl.where(is_query, block, block - query_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = member < tl.where(is_query, heads, kv_heads)
    dtype = qk.dtype.element_ty

    pair = tl.arange(0, HALF_PADDED)
    rest_dim = 2 * HALF + tl.arange(0, REST_PADDED)
    is_pair = is_head[:, None] & (pair < HALF)[None, :]
    is_rest = is_head[:, None] & (rest_dim < DIM)[None, :]
    row = qk + token * qk_stride + tl.where(is_query, member, heads + member)[:, None] * DIM
    low = tl.load(row + pair[None, :], mask=is_pair, other=0.0)
    high = tl.load(row + HALF + pair[None, :], mask=is_pair, other=0.0)
    if 2 * HALF < DIM:
        rest = tl.load(row + rest_dim[None, :], mask=is_rest, other=0.0)
    if HAS_NORM:
        norm = k_norm
        if is_query:
            norm = q_norm
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        squares = tl.sum(wide_low * wide_low + wide_high * wide_high, 1)
        if 2 * HALF < DIM:
            wide_rest = rest.to(tl.float32)
            squares += tl.sum(wide_rest * wide_rest, 1)
        scale = tl.rsqrt(squares / DIM + eps)[:, None]
        low = weighted(wide_low, scale, tl.load(norm + pair, mask=pair < HALF, other=0.0)[None, :], dtype)
        high = weighted(wide_high, scale, tl.load(norm + HALF + pair, mask=pair < HALF, other=0.0)[None, :], dtype)
        if 2 * HALF < DIM:
            rest = weighted(wide_rest, scale, tl.load(norm + rest_dim, mask=rest_dim < DIM, other=0.0)[None, :], dtype)
            tl.store(row + rest_dim[None, :], rest, mask=is_rest)
    if HAS_ROTARY:
        angle = token * 2 * HALF + pair
        cos_low = tl.load(cos + angle, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        cos_high = tl.load(cos + angle + HALF, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        sin_low = tl.load(sin + angle, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        sin_high = tl.load(sin + angle + HALF, mask=pair < HALF, other=0.0).to(tl.float32)[None, :]
        wide_low, wide_high = low.to(tl.float32), high.to(tl.float32)
        low = (wide_low * cos_low + wide_high * sin_low).to(dtype)
        high = (wide_high * cos_high + wide_low * sin_high).to(dtype)
    if HAS_NORM or HAS_ROTARY:
        tl.store(row + pair[None, :], low, mask=is_pair)
        tl.store(row + HALF + pair[None, :], high, mask=is_pair)

    if block >= query_blocks:
        slot = tl.load(slots + token * kv_heads + member, mask=is_head, other=-1).to(tl.int64)
        is_kept = is_head & (slot >= 0)
        page_row = (slot * DIM)[:, None]
        tl.store(k_cache + page_row + pair[None, :], low, mask=is_kept[:, None] & is_pair)
        tl.store(k_cache + page_row + HALF + pair[None, :], high, mask=is_kept[:, None] & is_pair)
        if 2 * HALF < DIM:
            tl.store(k_cache + page_row + rest_dim[None, :], rest, mask=is_kept[:, None] & is_rest)
        dim = tl.arange(0, DIM_PADDED)
        is_value = is_kept[:, None] & (dim < DIM)[None, :]
        value = tl.load(v + token * v_stride + member[:, None] * DIM + dim[None, :], mask=is_value, other=0.0)
        tl.store(v_cache + page_row + dim[None, :], value, mask=is_value)
