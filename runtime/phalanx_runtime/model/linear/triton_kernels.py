"""Triton kernels of linears with quantised weights. Reference: `DequantizedLinear`.

Weights are read once, as words of `PackedWeight`, and dequantised in registers. Products have fp32 sums; each result is rounded
once. Every kernel writes y, or adds to it with ADD.
"""

import triton
import triton.language as tl

from phalanx_runtime.model.ggml import triton_codes


@triton.jit
def load_words(row, span, spans, word, mask, WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """Returns words `word` of a span, and those of the second plane of formats that have one."""
    if FORMAT >= 16:
        words, high = triton_codes.load_planes(row, span, spans, word, mask=mask, WIDTH=WIDTH, FORMAT=FORMAT)
    else:
        words = tl.load(row + span * WIDTH + word, mask=mask, other=0)
        high = words
    return words, high


@triton.jit
def dequantized(words, high, field: tl.constexpr, FORMAT: tl.constexpr):
    """Returns field `field` of int32 words in fp32, before its scale; integers of FORMAT 4, 6 and 7 plus 16.

    FORMAT: 4 (int4), 5 (mxfp4: e2m1), 6 and 7 (float16_int4, bfloat16_int4), 8 (int8), 9 (fp8: e4m3), 10 (nvfp4: e2m1), 11
    (table4: the codes), from 16 on those of GGUF. Integers are the leading mantissa bits of 16 + value or 256 + value: no
    conversion, which has a fraction of the rate. e4m3 and e2m1 bits are shifted into an fp32 with an exponent that is 120 or 126
    too small, exact for subnormal values too.
    """
    if FORMAT >= 16:
        values = triton_codes.code_values(words, high, field, FORMAT)
    elif FORMAT == 5 or FORMAT == 10:
        code = words >> (4 * field)
        bits = ((code & 8) << 28) | ((code & 7) << 22)
        values = bits.to(tl.float32, bitcast=True) * 8.507059173023462e37
    elif FORMAT == 11:
        values = (words >> (4 * field)) & 0xF
    elif FORMAT < 8:
        bits = ((words >> (4 * field)) & 0xF) << 19 | 0x41800000
        values = bits.to(tl.float32, bitcast=True)
    elif FORMAT == 8:
        bits = ((words >> (8 * field)) & 0xFF) << 15 | 0x43800000
        values = bits.to(tl.float32, bitcast=True) - 384.0
    else:
        values = e4m3((words >> (8 * field)) & 0xFF)
    return values


@triton.jit
def e4m3(byte):
    """Returns numbers in e4m3, int32 of 0 to 255, in fp32."""
    bits = ((byte & 0x80) << 24) | ((byte & 0x7F) << 20)
    return bits.to(tl.float32, bitcast=True) * 1.329227995784916e36


@triton.jit
def scale_and_offset(stored, FORMAT: tl.constexpr):
    """Returns scale and offset in fp32 of what a format stores; the offset of those with one, for values plus 16."""
    if FORMAT == 4:  # two bfloat16
        scale = (stored << 16).to(tl.float32, bitcast=True)
        offset = (stored & -65536).to(tl.float32, bitcast=True) - 16.0 * scale
    elif FORMAT == 5:  # e8m0
        bits = stored.to(tl.int32)
        scale = tl.where(bits == 0, 0x00400000, bits << 23).to(tl.float32, bitcast=True)
        offset = scale
    elif FORMAT < 8:  # a scale and a zero point
        if FORMAT == 6:
            scale = (stored & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
        else:
            scale = (stored << 16).to(tl.float32, bitcast=True)
        offset = (-16.0 - (stored >> 16).to(tl.float32)) * scale
    else:
        scale = stored
        offset = stored
    return scale, offset


@triton.jit
def load_scale(row, column, inputs, mask, FORMAT: tl.constexpr, GROUP: tl.constexpr):
    """Returns scale and offset of the group of input `column`, in fp32. row: pointers to the scales of outputs that exist."""
    if FORMAT >= 16:
        scale, offset = triton_codes.load_scale(row, column, inputs, mask=mask, FORMAT=FORMAT)
    elif FORMAT == 10:
        stored = tl.load(row.to(tl.pointer_type(tl.int8), bitcast=True) + column // GROUP, mask=mask, other=0).to(tl.int32) & 0xFF
        factor = tl.load(row + tl.cdiv(tl.cdiv(inputs, GROUP), 4), mask=mask, other=0).to(tl.float32, bitcast=True)
        scale = e4m3(stored) * factor
        offset = scale
    elif FORMAT == 11:  # the place of the values
        scale = tl.load(row + column // GROUP, mask=mask, other=0.0)
        offset = row + tl.cdiv(inputs, GROUP)
    else:
        scale, offset = scale_and_offset(tl.load(row + column // GROUP, mask=mask, other=0), FORMAT)
    return scale, offset


@triton.jit
def scaled(values, scale, offset, FORMAT: tl.constexpr):
    """Returns values with their scale, and their offset if the format has one. Shapes: broadcast to values."""
    if FORMAT == 11:
        values = tl.load(offset + values)
    values = values * scale
    if FORMAT == 4 or FORMAT == 6 or FORMAT == 7 or FORMAT == 19 or FORMAT == 23 or FORMAT == 26 or FORMAT == 28 or FORMAT == 29:
        values = values + offset
    return values


NUMBERS = ("num_rows", "outputs", "num_groups")
"""Arguments that no load depends on."""


@triton.jit(do_not_specialize=[*NUMBERS])
def multiply_rows(
    x,
    words,
    scales,
    bias,
    y,
    num_rows,
    outputs,
    inputs,
    num_groups,
    x_stride,
    word_stride,
    y_stride,
    ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    BLOCK_SPANS: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Multiplies up to ROWS rows without tensor cores: a program has BLOCK_OUTPUTS outputs and all inputs.

    x: [num_rows, inputs], y: [num_rows, outputs], with strides; words: [outputs, word_stride]. GROUP: inputs
    with a common scale, a multiple of WIDTH; 0: one scale per output. Bytes: the weight once, x from the cache.
    """
    FIELDS: tl.constexpr = 4 if FORMAT == 8 or FORMAT == 9 or FORMAT == 24 else 8
    SPAN: tl.constexpr = FIELDS * WIDTH
    spans = tl.cdiv(inputs, SPAN)
    row = tl.arange(0, ROWS)[:, None, None, None]
    output = (tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS))[None, :, None, None]
    word = tl.arange(0, WIDTH)[None, None, None, :]
    is_row, is_output = row < num_rows, output < outputs
    existing = tl.minimum(output, outputs - 1).to(tl.int64)
    weight_row = words + existing * word_stride
    scale_row = scales + existing * num_groups
    total = tl.zeros([ROWS, BLOCK_OUTPUTS, BLOCK_SPANS, WIDTH], tl.float32)
    for start in range(0, spans, BLOCK_SPANS):
        span = (start + tl.arange(0, BLOCK_SPANS))[None, None, :, None]
        is_scale = is_output & (span < spans)
        tile, high = load_words(weight_row, span, spans, word, mask=is_scale, WIDTH=WIDTH, FORMAT=FORMAT)
        if GROUP > 0 and GROUP % SPAN == 0:
            scale, offset = load_scale(scale_row, span * SPAN, inputs, mask=is_scale, FORMAT=FORMAT, GROUP=GROUP)
        for field in tl.static_range(FIELDS):
            column = span * SPAN + field * WIDTH + word
            values = tl.load(x + row * x_stride + column, mask=is_row & (column < inputs), other=0.0).to(tl.float32)
            weights = dequantized(tile, high, field, FORMAT)
            if GROUP > 0:
                if GROUP % SPAN != 0:
                    first = tl.minimum(span * SPAN + field * WIDTH, inputs - 1)
                    scale, offset = load_scale(scale_row, first, inputs, mask=is_scale, FORMAT=FORMAT, GROUP=GROUP)
                weights = scaled(weights, scale, offset, FORMAT)
            total += weights * values
    sums = tl.sum(tl.sum(total, 3), 2)
    row, output = tl.arange(0, ROWS)[:, None], (tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS))[None, :]
    finish(
        sums,
        row=row,
        output=output,
        num_rows=num_rows,
        outputs=outputs,
        scales=scales,
        bias=bias,
        y=y,
        y_stride=y_stride,
        GROUP=GROUP,
        HAS_BIAS=HAS_BIAS,
        ADD=ADD,
    )


@triton.jit
def finish(
    sums,
    row,
    output,
    num_rows,
    outputs,
    scales,
    bias,
    y,
    y_stride,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Scales sums of whole outputs (GROUP 0), adds bias and residual, and writes them. row, output: broadcast to sums."""
    is_stored = (row < num_rows) & (output < outputs)
    if GROUP == 0:
        sums = sums * tl.load(scales + output, mask=output < outputs, other=0.0)
    if HAS_BIAS:
        sums += tl.load(bias + output, mask=output < outputs, other=0.0).to(tl.float32)
    target = y + row.to(tl.int64) * y_stride + output
    if ADD:
        sums += tl.load(target, mask=is_stored, other=0.0).to(tl.float32)
    tl.store(target, sums.to(y.dtype.element_ty), mask=is_stored)


@triton.jit(do_not_specialize=[*NUMBERS])
def multiply_tiles(
    x,
    words,
    scales,
    bias,
    y,
    partial,
    arrivals,
    num_rows,
    outputs,
    inputs,
    num_groups,
    x_stride,
    word_stride,
    y_stride,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_OUTPUTS: tl.constexpr,
    SPLITS: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    ADD: tl.constexpr,
):
    """Multiplies tiles on tensor cores, with the weights as the left operand, which stays in registers.

    Arguments as in `multiply_rows`. A program has BLOCK_OUTPUTS outputs of BLOCK_ROWS rows and a split of the inputs. The last
    split of a tile to arrive sums all of them in their order. partial: fp32 [SPLITS, tiles, BLOCK_OUTPUTS, BLOCK_ROWS];
    arrivals: int32, 0 for each tile, and again afterwards. Scales of groups round the weights to the dtype of x; one scale per
    output multiplies the sums. Bytes: the weight once for each BLOCK_ROWS rows.
    """
    FIELDS: tl.constexpr = 4 if FORMAT == 8 or FORMAT == 9 or FORMAT == 24 else 8
    SPAN: tl.constexpr = FIELDS * WIDTH
    dtype = x.dtype.element_ty
    row = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    output = tl.program_id(0) * BLOCK_OUTPUTS + tl.arange(0, BLOCK_OUTPUTS)
    word = tl.arange(0, WIDTH)
    is_row, is_output = row < num_rows, output < outputs
    x_row = x + row.to(tl.int64)[:, None] * x_stride
    existing = tl.minimum(output, outputs - 1).to(tl.int64)
    weight_row = words + existing[:, None] * word_stride
    scale_row = scales + existing * num_groups
    sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
    spans = tl.cdiv(inputs, SPAN)
    per_split = tl.cdiv(spans, SPLITS)
    first_span = tl.program_id(2) * per_split
    for span in range(first_span, tl.minimum(first_span + per_split, spans)):
        tile, high = load_words(weight_row, span, spans, word[None, :], mask=is_output[:, None], WIDTH=WIDTH, FORMAT=FORMAT)
        if GROUP > 0 and GROUP % SPAN == 0:
            scale, offset = load_scale(scale_row, span * SPAN, inputs, mask=is_output, FORMAT=FORMAT, GROUP=GROUP)
        for field in tl.static_range(FIELDS):
            first = span * SPAN + field * WIDTH
            column = first + word
            values = tl.load(x_row + column[None, :], mask=is_row[:, None] & (column < inputs)[None, :], other=0.0)
            weights = dequantized(tile, high, field, FORMAT)
            if GROUP > 0:
                if GROUP % SPAN != 0:
                    scale, offset = load_scale(
                        scale_row, tl.minimum(first, inputs - 1), inputs, mask=is_output, FORMAT=FORMAT, GROUP=GROUP
                    )
                weights = scaled(weights, scale[:, None], offset[:, None], FORMAT)
            sums += tl.dot(weights.to(dtype), tl.trans(values), input_precision="ieee")
    if SPLITS > 1:
        tile_index = tl.program_id(1) * tl.num_programs(0) + tl.program_id(0)
        num_tiles = tl.num_programs(0) * tl.num_programs(1)
        cell = tl.arange(0, BLOCK_OUTPUTS)[:, None] * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[None, :]
        own = partial + tile_index.to(tl.int64) * (BLOCK_OUTPUTS * BLOCK_ROWS) + cell
        split_stride = num_tiles.to(tl.int64) * (BLOCK_OUTPUTS * BLOCK_ROWS)
        tl.store(own + tl.program_id(2) * split_stride, sums)
        tl.debug_barrier()  # all stores of the program precede its arrival
        if tl.atomic_add(arrivals + tile_index, 1) == SPLITS - 1:
            tl.store(arrivals + tile_index, 0)
            sums = tl.zeros([BLOCK_OUTPUTS, BLOCK_ROWS], tl.float32)
            for split in range(SPLITS):
                sums += tl.load(own + split * split_stride, cache_modifier=".cg")
            finish(
                sums,
                row=row[None, :],
                output=output[:, None],
                num_rows=num_rows,
                outputs=outputs,
                scales=scales,
                bias=bias,
                y=y,
                y_stride=y_stride,
                GROUP=GROUP,
                HAS_BIAS=HAS_BIAS,
                ADD=ADD,
            )
    else:
        finish(
            sums,
            row=row[None, :],
            output=output[:, None],
            num_rows=num_rows,
            outputs=outputs,
            scales=scales,
            bias=bias,
            y=y,
            y_stride=y_stride,
            GROUP=GROUP,
            HAS_BIAS=HAS_BIAS,
            ADD=ADD,
        )
