"""Triton kernels of compressed pages: how keys and values are rounded as they are written, and what attention reads.

FORMAT is a number of `FORMAT_NUMBERS`. References: `page_format` and `feedback`, whose codes and scales are the same, bit by bit,
but for the order of sums in the Hadamard transform of keys, and with a calibration of values.
"""

import triton
import triton.language as tl

from phalanx_runtime.model.kernels.arithmetic import (
    divisor,
    down_to_bfloat16,
    from_e2m5,
    nearest_integer,
    to_bfloat16,
    to_e2m5,
    transformed,
    weighted,
)

PLAIN: tl.constexpr = tl.constexpr(0)
FP8: tl.constexpr = tl.constexpr(2)
INT4: tl.constexpr = tl.constexpr(3)


@triton.jit
def decoded(codes, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the numbers of int8 or fp8 codes, before their scale."""
    if FORMAT == FP8:
        numbers = from_e2m5(codes.to(tl.int32)).to(dtype)
    else:
        numbers = codes.to(tl.float32).to(dtype)
    return numbers


@triton.jit
def dequantized(
    numbers, scales, row, dim, is_key, dtype: tl.constexpr, FIRST: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr
):
    """Returns the half of heads from dimension FIRST on, of int4 codes [keys, dims]. `row`: of the pages' scales."""
    GROUP: tl.constexpr = DIM // GROUPS
    first: tl.constexpr = FIRST // GROUP
    pairs = scales + row * (2 * GROUPS)
    scale = tl.load(pairs + first, mask=is_key, other=0.0).to(tl.float32)[:, None]
    offset = tl.load(pairs + GROUPS + first, mask=is_key, other=0.0).to(tl.float32)[:, None]
    for group in tl.static_range(first + 1, (FIRST + DIM // 2 - 1) // GROUP + 1):
        is_member = ((FIRST + dim) // GROUP == group)[None, :]
        scale = tl.where(is_member, tl.load(pairs + group, mask=is_key, other=0.0).to(tl.float32)[:, None], scale)
        offset = tl.where(is_member, tl.load(pairs + GROUPS + group, mask=is_key, other=0.0).to(tl.float32)[:, None], offset)
    return (numbers.to(tl.float32) * scale + offset).to(dtype)


@triton.jit
def unpacked(codes, scales, row, dim, is_key, dtype: tl.constexpr, DIM: tl.constexpr, GROUPS: tl.constexpr):
    """Returns both halves of heads of int4 codes, [keys, dims] each."""
    low = dequantized(codes & 0xF, scales=scales, row=row, dim=dim, is_key=is_key, dtype=dtype, FIRST=0, DIM=DIM, GROUPS=GROUPS)
    high = dequantized(
        codes >> 4, scales=scales, row=row, dim=dim, is_key=is_key, dtype=dtype, FIRST=DIM // 2, DIM=DIM, GROUPS=GROUPS
    )
    return low, high


@triton.jit
def whole_scale(x, FORMAT: tl.constexpr):
    """Returns the bf16 scale of each of [rows, dims] in fp32, for int8 or fp8."""
    largest: tl.constexpr = 7.875 if FORMAT == FP8 else 127.0
    return to_bfloat16(tl.div_rn(tl.max(tl.abs(x), 1), largest))


@triton.jit
def nearest_code(ratio, FORMAT: tl.constexpr):
    """Returns the nearest code of each number over its scale, in the low bits of int32, and its number."""
    if FORMAT == FP8:
        code = to_e2m5(tl.minimum(tl.maximum(ratio, -7.875), 7.875))
        number = from_e2m5(code)
    else:
        lowest: tl.constexpr = 0.0 if FORMAT == INT4 else -127.0
        highest: tl.constexpr = 15.0 if FORMAT == INT4 else 127.0
        code = nearest_integer(tl.minimum(tl.maximum(ratio, lowest), highest))
        number = code.to(tl.float32, bitcast=True) - 12582912.0
    return code, number


@triton.jit
def write_scaled(x, codes, scales, slot, dim, is_kept, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Writes [rows, dim] in fp32 to the rows `slot` of int8 or fp8 pages."""
    scale = whole_scale(x, FORMAT=FORMAT)
    code, _ = nearest_code(tl.div_rn(x, divisor(scale.to(tl.float32))[:, None]), FORMAT=FORMAT)
    is_stored = is_kept[:, None] & (dim < DIM)[None, :]
    tl.store(codes + (slot * DIM)[:, None] + dim[None, :], code.to(codes.dtype.element_ty), mask=is_stored)
    tl.store(scales + slot, scale, mask=is_kept)


@triton.jit
def write_grouped(
    x,
    codes,
    scales,
    slot,
    dim,
    is_kept,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Writes [rows, DIM_PADDED] in fp32 to the rows `slot` of int4 pages."""
    HALF: tl.constexpr = DIM // 2
    scale, offset = x * 0.0, x * 0.0
    for group in tl.static_range(GROUPS):
        is_member = ((dim // (DIM // GROUPS) == group) & (dim < DIM))[None, :]
        lowest = down_to_bfloat16(tl.min(tl.where(is_member, x, float("inf")), 1))
        largest = tl.max(tl.where(is_member, x, float("-inf")), 1)
        step = to_bfloat16(tl.div_rn(largest - lowest.to(tl.float32), 15.0))
        tl.store(scales + slot * (2 * GROUPS) + group, step, mask=is_kept)
        tl.store(scales + slot * (2 * GROUPS) + GROUPS + group, lowest, mask=is_kept)
        scale = tl.where(is_member, step.to(tl.float32)[:, None], scale)
        offset = tl.where(is_member, lowest.to(tl.float32)[:, None], offset)
    code, _ = nearest_code(tl.div_rn(x - offset, divisor(scale)), FORMAT=INT4)
    low = code & 0xF
    high = tl.gather(low, (tl.minimum(dim + HALF, DIM_PADDED - 1)[None, :] + low * 0), 1)
    is_stored = is_kept[:, None] & (dim < HALF)[None, :]
    tl.store(codes + (slot * HALF)[:, None] + dim[None, :], (low | (high << 4)).to(tl.uint8), mask=is_stored)


@triton.jit
def write_codes(
    x,
    codes,
    scales,
    slot,
    dim,
    is_kept,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
):
    """Writes keys or values, [rows, DIM_PADDED] in fp32, to the rows `slot` of pages, where `is_kept`."""
    if FORMAT == INT4:
        write_grouped(
            x,
            codes=codes,
            scales=scales,
            slot=slot,
            dim=dim,
            is_kept=is_kept,
            DIM=DIM,
            DIM_PADDED=DIM_PADDED,
            GROUPS=GROUPS,
        )
    else:
        write_scaled(x, codes=codes, scales=scales, slot=slot, dim=dim, is_kept=is_kept, DIM=DIM, FORMAT=FORMAT)


@triton.jit(do_not_specialize=["heads", "kv_heads", "query_blocks"])
def compress_heads(
    qk,
    v,
    out,
    k_codes,
    v_codes,
    k_scales,
    v_scales,
    slots,
    cos,
    sin,
    q_norm,
    k_norm,
    eps,
    factor,
    qk_stride,
    v_stride,
    heads,
    kv_heads,
    query_blocks,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    HALF: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    HAS_ROTARY: tl.constexpr,
    HAS_NORM: tl.constexpr,
    IS_CALIBRATED: tl.constexpr,
):
    """As `prepare_heads`, for compressed pages: also transforms queries and keys, which it writes to `out`, and rounds to codes.

    qk: [tokens, heads + kv_heads, DIM], v: [tokens, kv_heads, DIM], with a stride of tokens; out: as qk, contiguous. cos, sin:
    [tokens, 2 * HALF]. `factor` of the Hadamard transform, which has STAGES. A slot below 0 writes no row: padding of a CUDA
    graph. Programs: as `prepare_heads`. Bytes per token: 2 * (heads + kv_heads) * DIM elements, values, codes and scales.

    IS_CALIBRATED: values are transformed too, `out` has them after the keys, and `round_in_turn` writes the codes.
    """
    token = tl.program_id(0).to(tl.int64)
    block = tl.program_id(1)
    is_query = block < query_blocks
    member = tl.where(is_query, block, block - query_blocks) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    is_head = member < tl.where(is_query, heads, kv_heads)
    head = tl.where(is_query, member, heads + member)
    dtype = qk.dtype.element_ty
    dim = tl.arange(0, DIM_PADDED)
    is_loaded = is_head[:, None] & (dim < DIM)[None, :]
    row = qk + token * qk_stride + head[:, None] * DIM
    x = tl.load(row + dim[None, :], mask=is_loaded, other=0.0)
    is_rotated = dim < 2 * HALF
    pair = tl.where(dim < HALF, dim + HALF, dim - HALF)
    if HAS_ROTARY:
        other = tl.load(row + pair[None, :], mask=is_head[:, None] & is_rotated[None, :], other=0.0)
    if HAS_NORM:
        norm = k_norm
        if is_query:
            norm = q_norm
        wide = x.to(tl.float32)
        scale = tl.rsqrt(tl.sum(wide * wide, 1) / DIM + eps)[:, None]
        x = weighted(wide, scale, tl.load(norm + dim, mask=dim < DIM, other=0.0)[None, :], dtype)
        if HAS_ROTARY:
            weight = tl.load(norm + pair, mask=is_rotated, other=0.0)[None, :]
            other = weighted(other.to(tl.float32), scale, weight, dtype)
    if HAS_ROTARY:
        angle = token * 2 * HALF + dim
        cosine = tl.load(cos + angle, mask=is_rotated, other=1.0).to(tl.float32)[None, :]
        sine = tl.load(sin + angle, mask=is_rotated, other=0.0).to(tl.float32)[None, :]
        x = (x.to(tl.float32) * cosine + other.to(tl.float32) * sine).to(dtype)
    x = transformed(x, factor, dtype=dtype, ROWS=BLOCK_HEADS, DIM_PADDED=DIM_PADDED, STAGES=STAGES)
    width = heads + kv_heads
    if IS_CALIBRATED:
        width += kv_heads
    out_row = out + (token * width + head)[:, None] * DIM
    tl.store(out_row + dim[None, :], x, mask=is_loaded)

    if block >= query_blocks:
        value = tl.load(v + token * v_stride + member[:, None] * DIM + dim[None, :], mask=is_loaded, other=0.0)
        if IS_CALIBRATED:
            value = transformed(value, factor, dtype=dtype, ROWS=BLOCK_HEADS, DIM_PADDED=DIM_PADDED, STAGES=STAGES)
            tl.store(out_row + kv_heads * DIM + dim[None, :], value, mask=is_loaded)
        else:
            slot = tl.load(slots + token * kv_heads + member, mask=is_head, other=-1).to(tl.int64)
            is_kept = is_head & (slot >= 0)
            write_codes(
                x.to(tl.float32),
                codes=k_codes,
                scales=k_scales,
                slot=slot,
                dim=dim,
                is_kept=is_kept,
                DIM=DIM,
                DIM_PADDED=DIM_PADDED,
                FORMAT=FORMAT,
                GROUPS=GROUPS,
            )
            write_codes(
                value.to(tl.float32),
                codes=v_codes,
                scales=v_scales,
                slot=slot,
                dim=dim,
                is_kept=is_kept,
                DIM=DIM,
                DIM_PADDED=DIM_PADDED,
                FORMAT=FORMAT,
                GROUPS=GROUPS,
            )


@triton.jit
def packed_scales(x, place, is_dim, margin, DIM: tl.constexpr, GROUPS: tl.constexpr, FORMAT: tl.constexpr):
    """Returns scale and offset by dimension of [rows, dims] in fp32: bf16 numbers in the high and the low half of int32.

    place: dimension of each column. margin: of each row, the share of the range that codes of int4 leave out at each end.
    """
    packed = x.to(tl.int32, bitcast=True) * 0
    if FORMAT == INT4:
        for group in tl.static_range(GROUPS):
            is_member = ((place // (DIM // GROUPS) == group) & is_dim)[None, :]
            low = tl.min(tl.where(is_member, x, float("inf")), 1)
            high = tl.max(tl.where(is_member, x, float("-inf")), 1)
            left_out = tl.fma(high - low, margin, 0.0)
            offset = down_to_bfloat16(low + left_out).to(tl.float32)
            scale = to_bfloat16(tl.div_rn((high - left_out) - offset, 15.0)).to(tl.float32)
            both = scale.to(tl.int32, bitcast=True) | ((offset.to(tl.int32, bitcast=True) >> 16) & 0xFFFF)
            packed = tl.where(is_member, both[:, None], packed)
    else:
        scale = whole_scale(x, FORMAT=FORMAT).to(tl.float32)
        packed += scale.to(tl.int32, bitcast=True)[:, None]
    return packed


@triton.jit
def scale_and_offset(packed):
    """Returns both numbers of `packed_scales` in fp32."""
    return (packed & -65536).to(tl.float32, bitcast=True), (packed << 16).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["tokens", "kv_heads"])
def round_in_turn(
    x,
    k_codes,
    v_codes,
    k_scales,
    v_scales,
    slots,
    k_shift,
    v_shift,
    k_order,
    v_order,
    k_triangle,
    v_triangle,
    k_weights,
    v_weights,
    tokens,
    kv_heads,
    stride,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    TOKENS: tl.constexpr,
    TRIALS: tl.constexpr,
    TRIALS_PADDED: tl.constexpr,
    MARGIN: tl.constexpr,
):
    """Writes codes and scales of calibrated keys and values, [tokens, 2 * kv_heads, DIM] with a stride of tokens, after their
    transform: `feedback.encode_with_feedback` of each.

    A program rounds TOKENS tokens of a head, each with TRIALS scales whose margins are multiples of MARGIN. Columns are in the
    order of rounding; rows are tokens and their trials, of which the one with the smallest error is stored. Products are no part
    of fused sums, so that codes are those of the reference. Programs: blocks of tokens, then heads of keys and of values.
    """
    CODES: tl.constexpr = DIM // 2 if FORMAT == INT4 else DIM
    part = tl.program_id(1)
    codes, scales, shift, order, triangle, weights = k_codes, k_scales, k_shift, k_order, k_triangle, k_weights
    head = part
    if part >= kv_heads:
        codes, scales, shift, order, triangle, weights = v_codes, v_scales, v_shift, v_order, v_triangle, v_weights
        head = part - kv_heads
    row = tl.arange(0, TOKENS * TRIALS_PADDED)
    token, trial = tl.program_id(0).to(tl.int64) * TOKENS + row // TRIALS_PADDED, row % TRIALS_PADDED
    is_token = token < tokens
    dim = tl.arange(0, DIM_PADDED)
    is_dim = dim < DIM
    place = tl.load(order + head * DIM + dim, mask=is_dim, other=0).to(tl.int32)
    numbers = x + (token * stride)[:, None] + part * DIM + place[None, :]
    left = tl.load(numbers, mask=is_token[:, None] & is_dim[None, :], other=0.0).to(tl.float32)
    left -= tl.load(shift + head * DIM + place, mask=is_dim, other=0.0)[None, :]
    margin = trial.to(tl.float32) * MARGIN
    packed = packed_scales(left, place, is_dim=is_dim, margin=margin, DIM=DIM, GROUPS=GROUPS, FORMAT=FORMAT)

    total = margin * 0.0
    found = packed * 0
    for i in range(DIM):
        is_turn = (dim == i)[None, :]
        number = tl.sum(tl.where(is_turn, left.to(tl.int32, bitcast=True), 0), 1).to(tl.float32, bitcast=True)
        scale, offset = scale_and_offset(tl.sum(tl.where(is_turn, packed, 0), 1))
        code, nearest = nearest_code(tl.div_rn(number - offset, divisor(scale)), FORMAT=FORMAT)
        error = number - (tl.fma(nearest, scale, 0.0) + offset)
        total += tl.fma(tl.fma(error, error, 0.0), tl.load(weights + head * DIM + i), 0.0)
        factors = tl.load(triangle + (head * DIM + i) * DIM + dim, mask=is_dim, other=0.0)
        left -= tl.fma(error[:, None], factors[None, :], 0.0)
        target = tl.load(order + head * DIM + i).to(tl.int32)
        if FORMAT == INT4:
            code = (code & 0xF) << tl.where(target >= CODES, 4, 0)
            target = target % CODES
        found = tl.where((dim == target)[None, :], found | code[:, None], found)

    slot = tl.load(slots + token * kv_heads + head, mask=is_token, other=-1).to(tl.int64)
    is_kept = slot >= 0
    if TRIALS > 1:
        error = tl.where((trial < TRIALS) & (total == total), total, float("inf"))
        best = tl.argmin(tl.reshape(error, [TOKENS, TRIALS_PADDED]), 1)  # the first one of equal ones
        best = tl.reshape(best[:, None] + tl.zeros([TOKENS, TRIALS_PADDED], tl.int32), [TOKENS * TRIALS_PADDED])
        is_kept = is_kept & (trial == best)
    is_stored = is_kept[:, None] & (dim < CODES)[None, :]
    tl.store(codes + (slot * CODES)[:, None] + dim[None, :], found.to(codes.dtype.element_ty), mask=is_stored)
    for group in tl.static_range(GROUPS):
        is_first = (is_dim & (place == group * (DIM // GROUPS)))[None, :]
        scale, offset = scale_and_offset(tl.sum(tl.where(is_first, packed, 0), 1))
        if FORMAT == INT4:
            tl.store(scales + slot * (2 * GROUPS) + group, to_bfloat16(scale), mask=is_kept)
            tl.store(scales + slot * (2 * GROUPS) + GROUPS + group, to_bfloat16(offset), mask=is_kept)
        else:
            tl.store(scales + slot, to_bfloat16(scale), mask=is_kept)
