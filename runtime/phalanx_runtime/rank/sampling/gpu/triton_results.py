"""Triton kernels of what follows sampling: logprobs of the tokens, and the draft tokens that they accept."""

import triton
import triton.language as tl

INFINITY = tl.constexpr(float("inf"))


@triton.jit(do_not_specialize=["num_blocks"])
def tally_logprobs(
    logits,
    tokens,
    maxima,
    sums,
    ranks,
    stride,
    vocab_size,
    num_blocks,
    BLOCK: tl.constexpr,
):
    """Writes maximum, sum of exponentials below it, and number of logits above the token's, of a block of one draw.

    logits: [draws, vocab_size], raw, read once. maxima, sums, ranks: [draws, num_blocks].
    """
    draw = tl.program_id(0)
    block = tl.program_id(1)
    logits += draw.to(tl.int64) * stride
    own = tl.load(logits + tl.maximum(tl.load(tokens + draw), 0)).to(tl.float32)
    token = block * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(logits + token, mask=token < vocab_size, other=-INFINITY).to(tl.float32)
    maximum = tl.max(values, 0)
    base = tl.where(maximum > -INFINITY, maximum, 0.0)
    place = draw * num_blocks + block
    tl.store(maxima + place, maximum)
    tl.store(sums + place, tl.sum(tl.exp(values - base), 0))
    tl.store(ranks + place, tl.sum((values > own).to(tl.int32), 0))


@triton.jit(do_not_specialize=["num_blocks"])
def merge_logprobs(
    logits,
    tokens,
    maxima,
    sums,
    ranks,
    normalizers,
    logprobs,
    token_ranks,
    stride,
    num_blocks,
    BLOCKS_PADDED: tl.constexpr,
):
    """Writes log-sum-exp, the token's logprob and its rank for draw `program_id(0)`. Reads 12 * num_blocks bytes."""
    draw = tl.program_id(0)
    block = tl.arange(0, BLOCKS_PADDED)
    is_block = block < num_blocks
    place = draw * num_blocks + block
    block_maxima = tl.load(maxima + place, mask=is_block, other=-INFINITY)
    maximum = tl.max(block_maxima, 0)
    total = tl.sum(tl.load(sums + place, mask=is_block, other=0.0) * tl.exp(block_maxima - maximum), 0)
    normalizer = maximum + tl.log(total)
    own = tl.load(logits + draw.to(tl.int64) * stride + tl.maximum(tl.load(tokens + draw), 0)).to(tl.float32)
    tl.store(normalizers + draw, normalizer)
    tl.store(logprobs + draw, own - normalizer)
    tl.store(token_ranks + draw, tl.sum(tl.load(ranks + place, mask=is_block, other=0), 0))


@triton.jit(do_not_specialize=["num_draws", "num_nodes"])
def accept_drafts(
    drafts,
    parents,
    sampled,
    rows,
    accepted,
    output,
    num_tokens,
    last_tokens,
    num_draws,
    num_nodes,
    HAS_PARENTS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Writes the run of each draw: accepted nodes, tokens and their number, and `last_tokens` of its row.

    drafts, parents, accepted: [draws, num_nodes]. sampled, output: [draws, num_nodes + 1]. Entries past a run are -1. A thread
    walks one draw and reads each node once: parents precede children, so the first match is `VerificationRun`'s.
    """
    draw = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_draw = draw < num_draws
    sampled += draw * (num_nodes + 1)
    output += draw * (num_nodes + 1)
    current = tl.full([BLOCK], -1, tl.int32)
    depth = tl.zeros([BLOCK], tl.int32)
    target = tl.load(sampled, mask=is_draw, other=-1)
    last = target
    tl.store(output, target, mask=is_draw)
    for node in range(num_nodes):
        tl.store(accepted + draw * num_nodes + node, tl.full([BLOCK], -1, tl.int32), mask=is_draw)
        tl.store(output + node + 1, tl.full([BLOCK], -1, output.dtype.element_ty), mask=is_draw)
        draft = tl.load(drafts + draw * num_nodes + node, mask=is_draw, other=-1)
        is_next = (draft >= 0) & (draft == target)
        if HAS_PARENTS:
            is_next = is_next & (tl.load(parents + draw * num_nodes + node, mask=is_draw, other=-2) == current)
        else:
            is_next = is_next & (current == node - 1)
        current = tl.where(is_next, node, current)
        tl.store(accepted + draw * num_nodes + depth, current, mask=is_next)
        depth += is_next.to(tl.int32)
        target = tl.load(sampled + 1 + current, mask=is_draw, other=-1)
        last = tl.where(target >= 0, target, last)
        tl.store(output + depth, target, mask=is_next)
    tl.store(num_tokens + draw, depth + (target >= 0).to(tl.int32), mask=is_draw)
    row = tl.load(rows + draw, mask=is_draw, other=-1)
    tl.store(last_tokens + row, tl.maximum(last, 0).to(last_tokens.dtype.element_ty), mask=row >= 0)
