"""Triton kernels of paged attention: decodes, prefill chunks and trees of draft tokens.

One program computes a block of queries of one request and one KV head over one split of the request's keys. The query heads of a
KV head are rows of the same tile, so keys are read once per KV head.

    rows of a tile     block_queries * group, padded to a power of two
    splits             of a decode min(max_splits, keys / MIN_SPLIT_KEYS), computed on the device; `merge_splits` combines them by
                       log-sum-exp. Chunks have no splits: their blocks fill the device
    programs           first `max_splits` per decode, then one per block of a chunk: a mixed step is one launch
    bytes per block    2 * keys * head_dim * element size, read once

Sources: FlashAttention-2 (Dao 2023) for the online softmax, Flash-Decoding (Dao et al. 2023) for splits.
"""

import triton
import triton.language as tl

from phalanx_runtime.model.attention.page_kernels import FP8, INT4, PLAIN, decoded, unpacked
from phalanx_runtime.model.kernels.arithmetic import await_inputs, transformed

REQUESTS = ("tables", "starts", "lengths", "tree_sizes", "tree_levels", "ancestors", "block_requests", "block_offsets")
"""Arrays that are read by single words."""
NUMBERS = ("num_decodes", "max_splits", "kv_heads", "heads", "window", "table_stride", "level_stride")


@triton.jit
def softcapped(logits, softcap):
    """Returns softcap * tanh(logits / softcap)."""
    ratio = logits / softcap
    power = tl.exp(-2.0 * tl.abs(ratio))
    return softcap * tl.where(ratio < 0, -1.0, 1.0) * (1.0 - power) / (1.0 + power)


@triton.jit
def store_attended(
    attended,
    out,
    partial,
    out_row,
    part_row,
    dim,
    is_stored,
    num_splits,
    HAS_SPLITS: tl.constexpr,
):
    """Writes the rows of a tile to `out`, or with several splits to `partial`."""
    if not HAS_SPLITS:
        tl.store(out + out_row[:, None] + dim[None, :], attended.to(out.dtype.element_ty), mask=is_stored)
    else:
        if num_splits == 1:
            tl.store(out + out_row[:, None] + dim[None, :], attended.to(out.dtype.element_ty), mask=is_stored)
        else:
            tl.store(partial + part_row[:, None] + dim[None, :], attended, mask=is_stored)


@triton.jit
def visible_keys(
    key,
    query,
    position,
    branch,
    tree_start,
    window,
    num_before,
    levels,
    is_key,
    HAS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
):
    """Returns whether each query attends to each key. `num_before`: tokens before the request's first query."""
    if HAS_TREE:
        node = key - tree_start
        is_ancestor = ((branch[:, None] >> tl.minimum(tl.maximum(node, 0), 31)[None, :]) & 1) == 1
        before = (key[None, :] < tree_start) & (key[None, :] <= num_before + query[:, None])
        is_visible = is_key[None, :] & (before | ((node >= 0)[None, :] & is_ancestor))
        if HAS_WINDOW:
            is_node = is_key & (node >= 0)
            key_level = tl.load(levels + node, mask=is_node, other=0)
            key_position = tl.where(is_node, tree_start + key_level, key)
            is_visible = is_visible & (key_position[None, :] > position[:, None] - window)
    else:
        is_visible = is_key[None, :] & (key[None, :] <= position[:, None])
        if HAS_WINDOW:
            is_visible = is_visible & (key[None, :] > position[:, None] - window)
    return is_visible


@triton.jit(do_not_specialize=[*REQUESTS, *NUMBERS])
def paged_attention(
    q,
    k_cache,
    v_cache,
    out,
    partial,
    partial_lse,
    tables,
    starts,
    lengths,
    tree_sizes,
    tree_levels,
    ancestors,
    block_requests,
    block_offsets,
    sinks,
    k_scales,
    v_scales,
    num_decodes,
    max_splits,
    kv_heads,
    scale,
    softcap,
    window,
    q_stride,
    table_stride,
    level_stride,
    GROUP: tl.constexpr,
    GROUP_ROWS: tl.constexpr,
    DIM: tl.constexpr,
    PART: tl.constexpr,
    PART_PADDED: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUPS: tl.constexpr,
    PAGE: tl.constexpr,
    BLOCK_QUERIES: tl.constexpr,
    BLOCK_KEYS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    HAS_SPLITS: tl.constexpr,
    HAS_TREE: tl.constexpr,
    HAS_WINDOW: tl.constexpr,
    HAS_SOFTCAP: tl.constexpr,
    HAS_SINKS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Writes `out`, or with several splits `partial` and `partial_lse`. Logits are in units of log 2.

    PART: codes of a head in a tile. Two int4 codes share a byte, so that a head has two parts.
    """
    if IS_EARLY:
        await_inputs()
    LARGEST: tl.constexpr = 7.875 if FORMAT == FP8 else 127.0
    program, kv_head = tl.program_id(0), tl.program_id(1)
    block, split, num_splits = program, 0, 1
    if HAS_SPLITS:
        is_decode = program < num_decodes * max_splits
        block = tl.where(is_decode, program // max_splits, program - num_decodes * (max_splits - 1))
        split = tl.where(is_decode, program % max_splits, 0)
    request, offset = tl.load(block_requests + block), tl.load(block_offsets + block)
    first = tl.load(starts + request)
    count = tl.load(starts + request + 1) - first
    length = tl.load(lengths + request)
    num_keys = tl.minimum(length, length - count + offset + BLOCK_QUERIES)
    tree_start = length
    if HAS_TREE:
        tree_start = length - tl.load(tree_sizes + request)
        num_keys = tl.where(num_keys > tree_start, length, num_keys)
    if HAS_SPLITS:
        num_splits = tl.where(is_decode, tl.maximum(1, tl.minimum(max_splits, tl.cdiv(num_keys, SPLIT_KEYS))), 1)
    if split < num_splits:
        keys_per_split = tl.cdiv(tl.cdiv(num_keys, num_splits), BLOCK_KEYS) * BLOCK_KEYS
        low = split * keys_per_split
        high = tl.minimum(low + keys_per_split, num_keys)

        row = tl.arange(0, BLOCK_QUERIES * GROUP_ROWS)
        query, member = offset + row // GROUP_ROWS, row % GROUP_ROWS
        is_query = (query < count) & (member < GROUP)
        head = kv_head * GROUP + member
        token = first + query
        dim = tl.arange(0, PART_PADDED)
        is_part = is_query[:, None] & (dim < PART)[None, :]
        q_rows = q + token[:, None] * q_stride + head[:, None] * DIM + dim[None, :]
        q_tile = tl.load(q_rows, mask=is_part, other=0.0)
        if FORMAT == INT4:
            q_high = tl.load(q_rows + PART, mask=is_part, other=0.0)
        position, branch = length - count + query, query
        if HAS_TREE:
            branch = tl.load(ancestors + token, mask=is_query, other=0)
            if HAS_WINDOW:
                in_tree = is_query & (position >= tree_start)
                query_level = tl.load(tree_levels + request * level_stride + position - tree_start, mask=in_tree, other=0)
                position = tl.where(in_tree, tree_start + query_level, position)
        if HAS_WINDOW:
            lowest = length - count + offset
            if HAS_TREE:
                lowest = tl.minimum(lowest, tree_start)
            low = tl.maximum(low, tl.maximum(0, lowest + 1 - window) // BLOCK_KEYS * BLOCK_KEYS)

        maximum = tl.full([BLOCK_QUERIES * GROUP_ROWS], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_QUERIES * GROUP_ROWS], tl.float32)
        weighted = tl.zeros([BLOCK_QUERIES * GROUP_ROWS, PART_PADDED], tl.float32)
        if FORMAT == INT4:
            weighted_high = tl.zeros([BLOCK_QUERIES * GROUP_ROWS, PART_PADDED], tl.float32)
        if HAS_SINKS:  # the first split has the sink
            sink = tl.load(sinks + head, mask=is_query, other=0.0).to(tl.float32) * 1.4426950408889634
            maximum, total = tl.where(split == 0, sink, maximum), tl.where(split == 0, total + 1.0, total)
        for key_start in range(low, high, BLOCK_KEYS):
            key = key_start + tl.arange(0, BLOCK_KEYS)
            is_key = key < high
            page = tl.load(tables + request * table_stride + key // PAGE, mask=is_key, other=0).to(tl.int64)
            cache_row = (page * kv_heads + kv_head) * PAGE + key % PAGE
            codes = cache_row[:, None] * PART + dim[None, :]
            is_loaded = is_key[:, None] & (dim < PART)[None, :]
            k_tile = tl.load(k_cache + codes, mask=is_loaded, other=0)
            if FORMAT == INT4:
                k_low, k_high = unpacked(
                    k_tile, k_scales, row=cache_row, dim=dim, is_key=is_key, dtype=q_tile.dtype, DIM=DIM, GROUPS=GROUPS
                )
                logits = tl.dot(q_tile, tl.trans(k_low), input_precision="ieee")
                logits = tl.dot(q_high, tl.trans(k_high), acc=logits, input_precision="ieee") * scale
            elif FORMAT != PLAIN:
                k_scale = tl.load(k_scales + cache_row, mask=is_key, other=0.0).to(tl.float32) * scale
                k_tile = decoded(k_tile, dtype=q_tile.dtype, FORMAT=FORMAT)
                logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * k_scale[None, :]
            else:
                logits = tl.dot(q_tile, tl.trans(k_tile), input_precision="ieee") * scale
            if HAS_SOFTCAP:
                logits = softcapped(logits, softcap)
            logits = logits * 1.4426950408889634
            is_visible = visible_keys(
                key,
                query=query,
                position=position,
                branch=branch,
                tree_start=tree_start,
                window=window,
                num_before=length - count,
                levels=tree_levels + request * level_stride,
                is_key=is_key,
                HAS_TREE=HAS_TREE,
                HAS_WINDOW=HAS_WINDOW,
            )
            logits = tl.where(is_visible, logits, float("-inf"))
            new_maximum = tl.maximum(maximum, tl.max(logits, 1))
            base = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
            weights = tl.exp2(logits - base[:, None])
            decay = tl.exp2(maximum - base)
            v_tile = tl.load(v_cache + codes, mask=is_loaded, other=0)
            weighted = weighted * decay[:, None]
            if FORMAT == INT4:
                v_low, v_high = unpacked(
                    v_tile, v_scales, row=cache_row, dim=dim, is_key=is_key, dtype=q_tile.dtype, DIM=DIM, GROUPS=GROUPS
                )
                weighted += tl.dot(weights.to(v_low.dtype), v_low, input_precision="ieee")
                weighted_high = weighted_high * decay[:, None] + tl.dot(weights.to(v_high.dtype), v_high, input_precision="ieee")
            elif FORMAT != PLAIN:
                v_scale = tl.load(v_scales + cache_row, mask=is_key, other=0.0).to(tl.float32) * LARGEST
                v_tile = decoded(v_tile, dtype=q_tile.dtype, FORMAT=FORMAT)
                weighted += tl.dot((weights * v_scale[None, :]).to(v_tile.dtype), v_tile, input_precision="ieee")
            else:
                weighted += tl.dot(weights.to(v_tile.dtype), v_tile, input_precision="ieee")
            total = total * decay + tl.sum(weights, 1)
            maximum = new_maximum

        divisor = tl.where(total > 0, total, 1.0)
        out_row = token * kv_heads * GROUP + head
        part = out_row * max_splits + split
        if HAS_SPLITS:
            if num_splits > 1:
                tl.store(partial_lse + part, tl.where(total > 0, maximum + tl.log2(divisor), float("-inf")), mask=is_query)
        if FORMAT == INT4:
            store_attended(
                weighted_high / divisor[:, None],
                out=out + PART,
                partial=partial + PART,
                out_row=out_row * DIM,
                part_row=part * DIM,
                dim=dim,
                is_stored=is_part,
                num_splits=num_splits,
                HAS_SPLITS=HAS_SPLITS,
            )
        elif FORMAT != PLAIN:
            divisor = divisor * LARGEST
        store_attended(
            weighted / divisor[:, None],
            out=out,
            partial=partial,
            out_row=out_row * DIM,
            part_row=part * DIM,
            dim=dim,
            is_stored=is_part,
            num_splits=num_splits,
            HAS_SPLITS=HAS_SPLITS,
        )


@triton.jit(do_not_specialize=[*REQUESTS, *NUMBERS])
def merge_splits(
    out,
    partial,
    partial_lse,
    lengths,
    heads,
    max_splits,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    SPLITS: tl.constexpr,
    SPLIT_KEYS: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Merges the splits of decode request `program_id(0)`, head `program_id(1)`: at most SPLITS. Reads DIM floats of each."""
    if IS_EARLY:
        await_inputs()
    request = tl.program_id(0)
    row = request * heads + tl.program_id(1)
    num_splits = tl.minimum(max_splits, tl.cdiv(tl.load(lengths + request), SPLIT_KEYS))
    if num_splits > 1:
        split = tl.arange(0, SPLITS)
        dim = tl.arange(0, DIM_PADDED)
        is_split = split < num_splits
        lse = tl.load(partial_lse + row * max_splits + split, mask=is_split, other=float("-inf"))
        weights = tl.exp2(lse - tl.max(lse, 0))
        part = (row * max_splits + split)[:, None] * DIM + dim[None, :]
        values = tl.load(partial + part, mask=is_split[:, None] & (dim < DIM)[None, :], other=0.0)
        attended = tl.sum(values * weights[:, None], 0) / tl.sum(weights, 0)
        tl.store(out + row * DIM + dim, attended.to(out.dtype.element_ty), mask=dim < DIM)


@triton.jit(do_not_specialize=["heads"])
def restore_heads(
    x,
    shift,
    factor,
    heads,
    DIM: tl.constexpr,
    DIM_PADDED: tl.constexpr,
    BLOCK_HEADS: tl.constexpr,
    STAGES: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Adds the shift of values, [kv_heads, DIM], to attention's result, [tokens, heads, DIM], and transforms it back, in place.

    Programs: tokens, then blocks of BLOCK_HEADS heads, of which GROUP share a KV head. Reference: `PagedAttention`.
    """
    head = tl.program_id(1) * BLOCK_HEADS + tl.arange(0, BLOCK_HEADS)
    dim = tl.arange(0, DIM_PADDED)
    is_loaded = (head < heads)[:, None] & (dim < DIM)[None, :]
    row = x + (tl.program_id(0).to(tl.int64) * heads + head)[:, None] * DIM + dim[None, :]
    shifts = tl.load(shift + (head // GROUP)[:, None] * DIM + dim[None, :], mask=is_loaded, other=0.0)
    wide = tl.load(row, mask=is_loaded, other=0.0).to(tl.float32) + shifts
    dtype = x.dtype.element_ty
    restored = transformed(wide, factor, dtype=dtype, ROWS=BLOCK_HEADS, DIM_PADDED=DIM_PADDED, STAGES=STAGES)
    tl.store(row, restored, mask=is_loaded)
