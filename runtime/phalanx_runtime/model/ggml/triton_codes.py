"""Codes and scales of `codes.LAYOUTS` in Triton kernels. FORMAT: 16 and the number that GGUF files have for the format.

Pointers are to int32 words and scales, as `pack_planes` and `split_blocks` return them.
"""

import triton
import triton.language as tl


@triton.jit
def load_planes(row, span, spans, word, mask, WIDTH: tl.constexpr, FORMAT: tl.constexpr):
    """Returns words `word` of a span, int32, of the low plane and of the high one. row: pointers to the words of outputs."""
    LOW: tl.constexpr = 2 if FORMAT == 26 or FORMAT == 27 else 8 if FORMAT == 24 else 4
    at = span * WIDTH + word
    if LOW == 2:
        low = tl.load(row.to(tl.pointer_type(tl.int16), bitcast=True) + at, mask=mask, other=0).to(tl.int32)
    else:
        low = tl.load(row + at, mask=mask, other=0)
    if FORMAT == 30:  # q6_k
        high = tl.load(row.to(tl.pointer_type(tl.int16), bitcast=True) + spans * (WIDTH * LOW // 2) + at, mask=mask, other=0)
        high = high.to(tl.int32)
    elif FORMAT == 22 or FORMAT == 23 or FORMAT == 27 or FORMAT == 29:  # q5_0, q5_1, q3_k, q5_k
        high = tl.load(row.to(tl.pointer_type(tl.int8), bitcast=True) + spans * (WIDTH * LOW) + at, mask=mask, other=0)
        high = high.to(tl.int32)
    else:
        high = low
    return low, high


@triton.jit
def code_values(low, high, field: tl.constexpr, FORMAT: tl.constexpr):
    """Returns field `field` of words of both planes in fp32, less the zero point.

    Codes are the leading mantissa bits of a power of two plus the code: no conversion, which has a fraction of the rate.
    """
    if FORMAT == 24:  # q8_0
        values = (((low >> (8 * field)) & 255) << 15 | 0x43800000).to(tl.float32, bitcast=True) - 384.0
    elif FORMAT == 26:  # q2_k
        values = (((low >> (2 * field)) & 3) << 21 | 0x40800000).to(tl.float32, bitcast=True) - 4.0
    elif FORMAT == 27:  # q3_k
        code = ((low >> (2 * field)) & 3) | ((high >> field) & 1) << 2
        values = (code << 20 | 0x41000000).to(tl.float32, bitcast=True) - 12.0
    elif FORMAT == 30:  # q6_k
        code = ((low >> (4 * field)) & 15) | ((high >> (2 * field)) & 3) << 4
        values = (code << 17 | 0x42800000).to(tl.float32, bitcast=True) - 96.0
    elif FORMAT == 22 or FORMAT == 23 or FORMAT == 29:  # q5_0, q5_1, q5_k
        code = ((low >> (4 * field)) & 15) | ((high >> field) & 1) << 4
        values = (code << 18 | 0x42000000).to(tl.float32, bitcast=True) - (48.0 if FORMAT == 22 else 32.0)
    elif FORMAT == 36 or FORMAT == 39:  # iq4_nl, iq4_xs: the table's bytes in four integers
        code = (low >> (4 * field)) & 15
        negative = tl.where(code < 4, -1079142271, -152379953)
        positive = tl.where(code < 12, 639175937, 1901675829)
        values = ((tl.where(code < 8, negative, positive) << (24 - 8 * (code & 3))) >> 24).to(tl.float32)
    else:  # q4_0, q4_1, q4_k
        code = (low >> (4 * field)) & 15
        values = (code << 19 | 0x41800000).to(tl.float32, bitcast=True) - (24.0 if FORMAT == 18 else 16.0)
    return values


@triton.jit
def load_scale(row, column, inputs, mask, FORMAT: tl.constexpr):
    """Returns scale and offset of the group of input `column` in fp32. row: pointers to the scales of outputs.

    The offset is undefined for formats without one.
    """
    if FORMAT == 18 or FORMAT == 22 or FORMAT == 24 or FORMAT == 36:  # q4_0, q5_0, q8_0, iq4_nl
        scale = tl.load(row.to(tl.pointer_type(tl.float16), bitcast=True) + column // 32, mask=mask, other=0.0).to(tl.float32)
        offset = scale
    elif FORMAT == 19 or FORMAT == 23:  # q4_1, q5_1
        scale, offset = halves(tl.load(row + column // 32, mask=mask, other=0))
    elif FORMAT == 28 or FORMAT == 29:  # q4_k, q5_k
        codes = tl.load(row.to(tl.pointer_type(tl.int16), bitcast=True) + column // 32, mask=mask, other=0).to(tl.int32)
        outer, outer_offset = halves(tl.load(row + inputs // 64 + column // 256, mask=mask, other=0))
        scale = (codes & 255).to(tl.float32) * outer
        offset = -((codes >> 8) & 255).to(tl.float32) * outer_offset
    elif FORMAT == 26:  # q2_k
        codes = tl.load(row.to(tl.pointer_type(tl.int8), bitcast=True) + column // 16, mask=mask, other=0).to(tl.int32)
        outer, outer_offset = halves(tl.load(row + inputs // 64 + column // 256, mask=mask, other=0))
        scale = (codes & 15).to(tl.float32) * outer
        offset = -((codes >> 4) & 15).to(tl.float32) * outer_offset
    else:  # q3_k, q6_k, and iq4_xs with groups of 32
        GROUP: tl.constexpr = 32 if FORMAT == 39 else 16
        codes = tl.load(row.to(tl.pointer_type(tl.int8), bitcast=True) + column // GROUP, mask=mask, other=0)
        outer_at = row.to(tl.pointer_type(tl.float16), bitcast=True) + inputs // (2 * GROUP) + column // 256
        scale = codes.to(tl.float32) * tl.load(outer_at, mask=mask, other=0.0).to(tl.float32)
        offset = scale
    return scale, offset


@triton.jit
def halves(pair):
    """Returns the low and the high float16 of an int32 in fp32."""
    low = (pair & 0xFFFF).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    high = (pair >> 16).to(tl.int16).to(tl.float16, bitcast=True).to(tl.float32)
    return low, high
