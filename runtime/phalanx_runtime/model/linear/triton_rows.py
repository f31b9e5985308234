"""Triton kernels that write rows: those of packed weights, and activations rounded to e4m3."""

import triton
import triton.language as tl

from phalanx_runtime.model.linear.triton_kernels import dequantized, load_scale, load_words, scaled


@triton.jit(do_not_specialize=["num_groups"])
def read_rows(
    index,
    words,
    scales,
    out,
    inputs,
    num_groups,
    word_stride,
    BLOCK_SPANS: tl.constexpr,
    WIDTH: tl.constexpr,
    FORMAT: tl.constexpr,
    GROUP: tl.constexpr,
):
    """Writes rows of a weight to out, [rows, inputs], rounded to its dtype. A program has BLOCK_SPANS spans of a row.

    index: the row of the weight for each row of out. Other arguments as in `triton_kernels.multiply_rows`. Bytes: the rows,
    packed and in out.
    """
    FIELDS: tl.constexpr = 4 if FORMAT == 8 or FORMAT == 9 or FORMAT == 24 else 8
    SPAN: tl.constexpr = FIELDS * WIDTH
    spans = tl.cdiv(inputs, SPAN)
    row = tl.load(index + tl.program_id(0)).to(tl.int64) + tl.zeros([BLOCK_SPANS, 1], tl.int64)
    span = (tl.program_id(1) * BLOCK_SPANS + tl.arange(0, BLOCK_SPANS))[:, None]
    word = tl.arange(0, WIDTH)[None, :]
    is_span = span < spans
    tile, high = load_words(words + row * word_stride, span, spans, word, mask=is_span, WIDTH=WIDTH, FORMAT=FORMAT)
    for field in tl.static_range(FIELDS):
        first = span * SPAN + field * WIDTH
        scale, offset = load_scale(
            scales + row * num_groups, tl.minimum(first, inputs - 1), inputs, mask=is_span, FORMAT=FORMAT, GROUP=GROUP
        )
        values = scaled(dequantized(tile, high, field, FORMAT), scale, offset, FORMAT)
        to = out + tl.program_id(0).to(tl.int64) * inputs + first + word
        tl.store(to, values.to(out.dtype.element_ty), mask=first + word < inputs)


@triton.jit
def quantize_rows(
    x,
    words,
    scales,
    inputs,
    x_stride,
    word_stride,
    WIDTH: tl.constexpr,
    BLOCK_WORDS: tl.constexpr,
):
    """Rounds each row to e4m3 with its own scale, to nearest even: maximum / 448.

    x: [rows, inputs] with a stride; words: int32 [rows, word_stride] in the order of `PackedWeight`; scales: fp32 [rows]. A row
    per program. Bytes: the row twice, the second time from the cache, and a byte per input.
    """
    row = tl.program_id(0).to(tl.int64)
    maximum = tl.zeros([2 * BLOCK_WORDS], tl.float32)
    for start in range(0, inputs, 2 * BLOCK_WORDS):
        column = start + tl.arange(0, 2 * BLOCK_WORDS)
        values = tl.load(x + row * x_stride + column, mask=column < inputs, other=0.0).to(tl.float32)
        maximum = tl.maximum(maximum, tl.abs(values))
    scale = tl.maximum(tl.max(maximum, 0), 1e-30) / 448.0
    tl.store(scales + row, scale)
    for start in range(0, word_stride, BLOCK_WORDS):
        word = start + tl.arange(0, BLOCK_WORDS)
        packed = tl.zeros([BLOCK_WORDS], tl.int32)
        for field in tl.static_range(4):
            column = word // WIDTH * (4 * WIDTH) + field * WIDTH + word % WIDTH
            values = tl.load(x + row * x_stride + column, mask=column < inputs, other=0.0).to(tl.float32) / scale
            # The inverse of `dequantized`: e4m3 values have the leading bits of fp32 with an exponent that is 120 smaller.
            bits = (tl.minimum(tl.abs(values), 448.0) * 7.52316384526264e-37).to(tl.int32, bitcast=True)
            magnitude = (bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20
            packed = packed | ((magnitude | tl.where(values < 0, 0x80, 0)) << (8 * field))
        tl.store(words + row * word_stride + word, packed, mask=word < word_stride)
