"""Triton kernel of a dense linear of a single row, with a norm before it and bias, residual or gate after it."""

import triton
import triton.language as tl

from phalanx_runtime.model.kernels.arithmetic import await_inputs, gated


@triton.jit(do_not_specialize=["outputs"])
def multiply_row(
    x,
    weight,
    bias,
    norm,
    y,
    eps,
    outputs,
    inputs,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_INPUTS: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
    GATE: tl.constexpr,
    IS_EARLY: tl.constexpr,
):
    """Writes norm(x) W^T + b to y, adds it with ADD, or with GATE writes activation(first half) * second half.

    x: [inputs]; y: [outputs]; weight: [outputs, inputs], with GATE (1 silu, 2 gelu by tanh) twice as many rows: gate above up. A
    program has BLOCK_OUTPUTS outputs and all inputs. The norm's scale multiplies the sums, so that the inputs are read once;
    products are of inputs that no dtype rounded. IS_EARLY: see `await_inputs`; the first weights are read before. Bytes: the
    weight once, x and the norm's weight from the cache.
    """
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    column = tl.arange(0, BLOCK_INPUTS)
    is_output = output < outputs
    row = weight + output.to(tl.int64)[:, None] * inputs + column[None, :]
    up_row = row + outputs.to(tl.int64) * inputs
    is_weight = is_output[:, None] & (column < inputs)[None, :]
    tile = tl.load(row, mask=is_weight, other=0.0, eviction_policy="evict_first")
    if GATE > 0:
        up_tile = tl.load(up_row, mask=is_weight, other=0.0, eviction_policy="evict_first")
    if IS_EARLY:
        await_inputs()
    total = tl.zeros([BLOCK_OUTPUTS, BLOCK_INPUTS], tl.float32)
    up_total = tl.zeros([BLOCK_OUTPUTS, BLOCK_INPUTS], tl.float32)
    squares = tl.zeros([BLOCK_INPUTS], tl.float32)
    for start in range(0, inputs, BLOCK_INPUTS):
        is_column = start + column < inputs
        values = tl.load(x + start + column, mask=is_column, other=0.0).to(tl.float32)
        if HAS_NORM:
            squares += values * values
            values = values * tl.load(norm + start + column, mask=is_column, other=0.0).to(tl.float32)
        total += tile.to(tl.float32) * values[None, :]
        following = start + BLOCK_INPUTS
        is_weight = is_output[:, None] & (following + column < inputs)[None, :]
        tile = tl.load(row + following, mask=is_weight, other=0.0, eviction_policy="evict_first")
        if GATE > 0:
            up_total += up_tile.to(tl.float32) * values[None, :]
            up_tile = tl.load(up_row + following, mask=is_weight, other=0.0, eviction_policy="evict_first")

    dtype = y.dtype.element_ty
    result, up = tl.sum(total, 1), tl.sum(up_total, 1)
    if HAS_NORM:
        scale = tl.rsqrt(tl.sum(squares, 0) / inputs + eps)
        result, up = result * scale, up * scale
    if HAS_BIAS:
        result += tl.load(bias + output, mask=is_output, other=0.0).to(tl.float32)
        if GATE > 0:
            up += tl.load(bias + outputs + output, mask=is_output, other=0.0).to(tl.float32)
    if GATE > 0:
        result = gated(result.to(dtype).to(tl.float32), up.to(dtype).to(tl.float32), dtype, GATE == 1)
    if ADD:
        result += tl.load(y + output, mask=is_output, other=0.0).to(tl.float32)
    tl.store(y + output, result.to(dtype), mask=is_output)
