"""Triton kernels of filters: the lowest value that top-k, top-p and min-p keep, without a sort.

    narrow_cut           per block   count and mass above 16 edges below the row's maximum; twice, the second time in one interval
    gather_candidates    per block   the values in the interval that has the cut of top-k or top-p
    find_threshold       per row     bisection over the bits of these values

A block of logits is read as in `triton_kernels`. Rows without top-k and top-p return at once. Masses are sums of 64-bit integers,
exp(x - maximum) * 2^40: atomic additions in any order give the same bits.

Source: radix selection (Alabi et al. 2012) by bisection of ordered float bits; filters as in `filters`.
"""

import triton
import triton.language as tl

from phalanx_runtime.rank.sampling.gpu.triton_rows import FLOATS, INTEGERS, LOG_MIN_P, TOP_K, TOP_P, scaled_logits

EDGES = tl.constexpr(16)
"""Edges of a round of `narrow_cut`."""
TALLIES = tl.constexpr(80)
"""Integers per draw: counts and masses of the first round, of the second round, number of candidates, padding."""
GATHERED = tl.constexpr(64)
UNIT = tl.constexpr(1099511627776.0)
"""Of masses: 2^40."""
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def _row_maximum(maxima, draw, num_blocks, BLOCKS_PADDED: tl.constexpr):
    block = tl.arange(0, BLOCKS_PADDED)
    return tl.max(tl.load(maxima + draw * num_blocks + block, mask=block < num_blocks, other=-INFINITY), 0)


@triton.jit
def _mass_target(total, top_p):
    """Returns the integer mass at which top-p is reached; at least the smallest unit."""
    return tl.maximum((total.to(tl.float32) * top_p).to(tl.int64), 1)


@triton.jit
def _unit_mass(values, top):
    return (tl.exp(values - top) * UNIT).to(tl.int64)


@triton.jit
def _edge_distances(interval, lane, ROUND: tl.constexpr):
    """Returns how far edges are below the maximum: exact in float32, so that each kernel computes the same edges.

    First round: lane^2 / 16, and infinity. Second round: 16 steps from edge `interval` - 1 of the first to edge `interval`.
    """
    last = lane == EDGES - 1
    if ROUND == 0:
        distances = tl.where(last, INFINITY, tl.cast(lane * lane, tl.float32) * 0.0625)
    else:
        step = tl.cast(lane + 1, tl.float32)
        before = tl.cast(interval - 1, tl.float32)
        inner = before * before * 0.0625 + step * (2 * before + 1) * 0.00390625
        outer = tl.where(last, INFINITY, 12.25 + step * step * 0.25)
        distances = tl.where(interval < EDGES - 1, inner, outer)
    return distances


@triton.jit
def _first_reached(tallies, top_k, top_p, ROUND: tl.constexpr, vocab_size):
    """Returns the first edge of a round at which the count reaches top-k, or without top-k the mass reaches top-p."""
    is_by_count = top_k < vocab_size
    lane = tl.arange(0, EDGES)
    sums = tl.load(tallies + ROUND * 2 * EDGES + tl.where(is_by_count, 0, EDGES) + lane)
    target = tl.where(is_by_count, top_k.to(tl.int64), _mass_target(tl.load(tallies + 2 * EDGES - 1), top_p))
    return tl.minimum(EDGES - tl.sum((sums >= target).to(tl.int32), 0), EDGES - 1)


@triton.jit
def _cut_interval(tallies, top, top_k, top_p, vocab_size):
    """Returns the interval [low, high) of the cut, and the count and mass of the values from `high` on.

    With top-k and top-p `high` is infinite: the mass of top-p is over the values that top-k keeps.
    """
    first = _first_reached(tallies, top_k, top_p, 0, vocab_size)
    second = _first_reached(tallies, top_k, top_p, 1, vocab_size)
    is_inner = second > 0
    low = top - _edge_distances(first, second, 1)
    high = top - tl.where(is_inner, _edge_distances(first, second - 1, 1), _edge_distances(first, first - 1, 0))
    above = tallies + tl.where(is_inner, 2 * EDGES + second - 1, tl.maximum(first - 1, 0))
    is_open = ((top_k < vocab_size) & (top_p < 1.0)) | (first == 0)
    low = tl.where(first == 0, top, low)
    return low, tl.where(is_open, INFINITY, high), tl.load(above), tl.load(above + EDGES)


@triton.jit
def _ordered_key(value):
    """Returns the bits of a float as an integer of the same order. It is its own inverse on integers."""
    bits = value.to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _keyed_float(key):
    return (key ^ ((key >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)


@triton.jit(do_not_specialize=["num_blocks"])
def narrow_cut(
    logits,
    rows,
    indices,
    floats,
    integers,
    counts,
    bias,
    masks,
    maxima,
    tallies,
    stride,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    ROUND: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Adds to `tallies` how many values of the block reach each edge, and their mass. tallies: [draws, TALLIES].

    Reads the logits of rows with top-k or top-p; in the second round only blocks that reach the lowest edge.
    """
    draw = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.load(rows + draw)
    if row >= 0:
        top_k = tl.load(integers + row * INTEGERS + TOP_K)
        top_p = tl.load(floats + row * FLOATS + TOP_P)
        if (top_k < vocab_size) | (top_p < 1.0):
            top = _row_maximum(maxima, draw, num_blocks, BLOCKS_PADDED)
            tally = tallies + draw * TALLIES
            interval = 1
            lowest = -INFINITY
            if ROUND == 1:
                interval = _first_reached(tally, top_k, top_p, 0, vocab_size)
                lowest = top - _edge_distances(0, interval, 0)
            if (top > -INFINITY) & (interval > 0) & (tl.load(maxima + draw * num_blocks + block) >= lowest):
                index = tl.load(indices + draw)
                state = (floats, integers, counts, bias, masks)
                token = block * BLOCK + tl.arange(0, BLOCK)
                logits += draw.to(tl.int64) * stride
                values = scaled_logits(logits, state, row, index, token, vocab_size=vocab_size, FEATURES=FEATURES)
                masses = tl.exp(values - top)
                tally += ROUND * 2 * EDGES
                for edge in range(0, EDGES):
                    is_above = (values >= top - _edge_distances(interval, edge, ROUND)) & (token < vocab_size)
                    mass = tl.sum(tl.where(is_above, masses, 0.0), 0)
                    tl.atomic_add(tally + edge, tl.sum(is_above.to(tl.int32), 0).to(tl.int64), sem="relaxed")
                    tl.atomic_add(tally + EDGES + edge, (mass * UNIT).to(tl.int64), sem="relaxed")


@triton.jit(do_not_specialize=["num_blocks"])
def gather_candidates(
    logits,
    rows,
    indices,
    floats,
    integers,
    counts,
    bias,
    masks,
    maxima,
    tallies,
    candidates,
    stride,
    vocab_size,
    num_blocks,
    capacity,
    BLOCK: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Appends the block's values in the interval of the cut to `candidates` and counts them. candidates: [draws, capacity].

    Values that find no room are counted only. Reads the logits of blocks that reach the interval, writes 4 bytes per candidate.
    """
    draw = tl.program_id(0)
    block = tl.program_id(1)
    row = tl.load(rows + draw)
    if row >= 0:
        top_k = tl.load(integers + row * INTEGERS + TOP_K)
        top_p = tl.load(floats + row * FLOATS + TOP_P)
        highest = tl.load(maxima + draw * num_blocks + block)
        if ((top_k < vocab_size) | (top_p < 1.0)) & (highest > -INFINITY):
            top = _row_maximum(maxima, draw, num_blocks, BLOCKS_PADDED)
            tally = tallies + draw * TALLIES
            low, high, _, _ = _cut_interval(tally, top, top_k, top_p, vocab_size)
            if highest >= low:
                index = tl.load(indices + draw)
                state = (floats, integers, counts, bias, masks)
                token = block * BLOCK + tl.arange(0, BLOCK)
                logits += draw.to(tl.int64) * stride
                values = scaled_logits(logits, state, row, index, token, vocab_size=vocab_size, FEATURES=FEATURES)
                is_candidate = (values >= low) & (values < high) & (values > -INFINITY)  # excluded tokens have no mass
                number = is_candidate.to(tl.int32)
                before = tl.atomic_add(tally + GATHERED, tl.sum(number, 0).to(tl.int64), sem="relaxed")
                slot = tl.minimum(before, vocab_size).to(tl.int32) + tl.cumsum(number, 0) - number
                tl.store(candidates + draw.to(tl.int64) * capacity + slot, values, mask=is_candidate & (slot < capacity))


@triton.jit
def _sum_from(edge, top, size, source, draw_state, vocab_size, BLOCK: tl.constexpr, FEATURES: tl.constexpr):
    """Returns the count and mass of the values from `edge` on.

    source: whether the candidates are all listed, these, and the logits, which are read if not. draw_state: state, row, index.
    """
    is_listed, candidates, logits = source
    state, row, index = draw_state
    number = tl.zeros([BLOCK], tl.int32)
    mass = tl.zeros([BLOCK], tl.int64)
    for start in range(0, size, BLOCK):
        place = start + tl.arange(0, BLOCK)
        if is_listed:
            values = tl.load(candidates + place, mask=place < size, other=-INFINITY)
        else:
            values = scaled_logits(logits, state, row, index, place, vocab_size=vocab_size, FEATURES=FEATURES)
        is_above = values >= edge
        number += is_above.to(tl.int32)
        mass += tl.where(is_above, _unit_mass(values, top), 0)
    return tl.sum(number, 0).to(tl.int64), tl.sum(mass, 0)


@triton.jit(do_not_specialize=["num_blocks"])
def find_threshold(
    logits,
    rows,
    indices,
    floats,
    integers,
    counts,
    bias,
    masks,
    maxima,
    tallies,
    candidates,
    thresholds,
    stride,
    vocab_size,
    num_blocks,
    capacity,
    BLOCK: tl.constexpr,
    BLOCKS_PADDED: tl.constexpr,
    FEATURES: tl.constexpr,
):
    """Writes the lowest value that the filters of draw `program_id(0)` keep. thresholds: [draws].

    The cut is the highest key at which the count or mass from it on reaches its target. Each of top-k and top-p reads the
    candidates at most 32 times, 4 bytes each.
    """
    draw = tl.program_id(0)
    row = tl.load(rows + draw)
    if row >= 0:
        top = _row_maximum(maxima, draw, num_blocks, BLOCKS_PADDED)
        top_k = tl.load(integers + row * INTEGERS + TOP_K)
        top_p = tl.load(floats + row * FLOATS + TOP_P)
        threshold = top + tl.load(floats + row * FLOATS + LOG_MIN_P)
        if ((top_k < vocab_size) | (top_p < 1.0)) & (top > -INFINITY):
            draw_state = ((floats, integers, counts, bias, masks), row, tl.load(indices + draw))
            tally = tallies + draw * TALLIES
            low, high, above_count, above_mass = _cut_interval(tally, top, top_k, top_p, vocab_size)
            gathered = tl.load(tally + GATHERED)
            is_listed = gathered <= capacity
            place = draw.to(tl.int64)
            source = (is_listed, candidates + place * capacity, logits + place * stride)
            size = tl.where(is_listed, gathered, vocab_size).to(tl.int32)
            is_partial = is_listed & (high < INFINITY)
            above_count = tl.where(is_partial, above_count, 0)
            above_mass = tl.where(is_partial, above_mass, 0)
            by_mass = top_k >= vocab_size
            target = tl.where(by_mass, _mass_target(tl.load(tally + 2 * EDGES - 1), top_p), top_k.to(tl.int64))
            cut = _ordered_key(low)
            end = tl.where(high < INFINITY, _ordered_key(high), _ordered_key(top) + 1)
            num_cuts = 1 + ((top_k < vocab_size) & (top_p < 1.0)).to(tl.int32)
            for phase in range(num_cuts):
                while cut + 1 < end:
                    middle = (cut & end) + ((cut ^ end) >> 1)
                    edge = _keyed_float(middle)
                    number, mass = _sum_from(
                        edge, top, size, source, draw_state, vocab_size=vocab_size, BLOCK=BLOCK, FEATURES=FEATURES
                    )
                    is_reached = tl.where(by_mass, mass + above_mass, number + above_count) >= target
                    cut = tl.where(is_reached, middle, cut)
                    end = tl.where(is_reached, end, middle)
                if phase + 1 < num_cuts:
                    edge = _keyed_float(cut + 1)
                    number, mass = _sum_from(
                        edge, top, size, source, draw_state, vocab_size=vocab_size, BLOCK=BLOCK, FEATURES=FEATURES
                    )
                    total = mass + (top_k - number) * _unit_mass(_keyed_float(cut), top)
                    target = _mass_target(total, top_p)
                    by_mass = by_mass | (phase == 0)
                    end = _ordered_key(top) + 1
            threshold = tl.maximum(threshold, _keyed_float(cut))
        tl.store(thresholds + draw, threshold)
