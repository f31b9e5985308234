"""Triton kernels of compressed pages: how keys and values are rounded as they are written, and what attention reads.

FORMAT is a number of `FORMAT_NUMBERS`. Reference: `page_format`, whose codes and scales of values are the same, bit by bit; keys
are the same but for the order of sums in their Hadamard transform.
"""

import triton
import triton.language as tl

from phalanx_runtime.model.kernels.arithmetic import (
    down_to_bfloat16,
    from_e4m3,
    nearest_integer,
    to_bfloat16,
    to_e4m3,
    weighted,
)

PLAIN: tl.constexpr = tl.constexpr(0)
FP8: tl.constexpr = tl.constexpr(2)
INT4: tl.constexpr = tl.constexpr(3)


@triton.jit
def decoded(codes, dtype: tl.constexpr, FORMAT: tl.constexpr):
    """Returns the numbers of int8 or fp8 codes, before their scale."""
    if FORMAT == FP8:
        numbers = from_e4m3(codes.to(tl.int32)).to(dtype)
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
def hadamard(x, ROWS: tl.constexpr, DIM_PADDED: tl.constexpr, STAGES: tl.constexpr):
    """Returns [ROWS, DIM_PADDED] in fp32 times Sylvester's matrix of 1 and -1 for each 2 ** STAGES dimensions.

    Each stage puts sums of neighbours before their differences, so that all stages have one form (Pease 1968).
    """
    SIZE: tl.constexpr = 1 << STAGES
    COUNT: tl.constexpr = ROWS * DIM_PADDED // SIZE
    x = tl.reshape(x, [COUNT, SIZE])
    for _ in tl.static_range(STAGES):
        first, second = tl.split(tl.reshape(x, [COUNT, SIZE // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), [0, 2, 1]), [COUNT, SIZE])
    return tl.reshape(x, [ROWS, DIM_PADDED])


@triton.jit
def divisor(scale):
    """Zeros become 1: their codes are zeros."""
    return tl.where(scale == 0.0, 1.0, scale)


@triton.jit
def write_scaled(x, codes, scales, slot, dim, is_kept, DIM: tl.constexpr, FORMAT: tl.constexpr):
    """Writes [rows, dim] in fp32 to the rows `slot` of int8 or fp8 pages."""
    largest: tl.constexpr = 448.0 if FORMAT == FP8 else 127.0
    scale = to_bfloat16(tl.div_rn(tl.max(tl.abs(x), 1), largest))
    ratio = tl.div_rn(x, divisor(scale.to(tl.float32))[:, None])
    ratio = tl.minimum(tl.maximum(ratio, -largest), largest)
    if FORMAT == FP8:
        rounded = to_e4m3(ratio).to(tl.uint8)
    else:
        rounded = nearest_integer(ratio).to(tl.int8)
    is_stored = is_kept[:, None] & (dim < DIM)[None, :]
    tl.store(codes + (slot * DIM)[:, None] + dim[None, :], rounded, mask=is_stored)
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
    ratio = tl.minimum(tl.maximum(tl.div_rn(x - offset, divisor(scale)), 0.0), 15.0)
    rounded = nearest_integer(ratio) & 0xF
    high = tl.gather(rounded, (tl.minimum(dim + HALF, DIM_PADDED - 1)[None, :] + rounded * 0), 1)
    is_stored = is_kept[:, None] & (dim < HALF)[None, :]
    tl.store(codes + (slot * HALF)[:, None] + dim[None, :], (rounded | (high << 4)).to(tl.uint8), mask=is_stored)


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
):
    """As `prepare_heads`, for compressed pages: also transforms queries and keys, which it writes to `out`, and rounds to codes.

    qk: [tokens, heads + kv_heads, DIM], v: [tokens, kv_heads, DIM], with a stride of tokens; out: as qk, contiguous. cos, sin:
    [tokens, 2 * HALF]. `factor` of the Hadamard transform, which has STAGES. A slot below 0 writes no row: padding of a CUDA
    graph. Programs: as `prepare_heads`. Bytes per token: 2 * (heads + kv_heads) * DIM elements, values, codes and scales.
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
    x = hadamard(x.to(tl.float32), ROWS=BLOCK_HEADS, DIM_PADDED=DIM_PADDED, STAGES=STAGES)
    x = tl.fma(x, factor, 0.0).to(dtype)  # a product alone would be fused with the difference to an offset
    out_row = out + (token * (heads + kv_heads) + head)[:, None] * DIM
    tl.store(out_row + dim[None, :], x, mask=is_loaded)

    if block >= query_blocks:
        slot = tl.load(slots + token * kv_heads + member, mask=is_head, other=-1).to(tl.int64)
        is_kept = is_head & (slot >= 0)
        value = tl.load(v + token * v_stride + member[:, None] * DIM + dim[None, :], mask=is_loaded, other=0.0)
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
