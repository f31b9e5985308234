// Rows of x in int8 with a scale each: maximum / 127.
#pragma once
#include "linear.h"

#if defined(__AVX512VNNI__)
namespace {

// Rounds a row to nearest, ties to even, and adds `zero` to the codes, also of the padding. Returns its scale, NaN if a number is not
// finite.
template <class X> float round_row(const X* x, int64_t inputs, int64_t padded, int zero, uint8_t* to) {
    vf top{}, broken{};  // 0 or NaN
    int64_t i = 0;
    for (; i + W <= inputs; i += W) {
        const vf number = widened(x + i);
        top = larger(top, larger(number, -number));
        broken += number * 0.0f;
    }
    float most = largest(top), is_broken = sum(broken);
    for (; i < inputs; i++) {
        most = std::max(most, std::fabs(widen(x[i])));
        is_broken += widen(x[i]) * 0.0f;
    }
    const float scale = std::max(most, 1e-30f) / 127, inverse = 1 / scale;
    for (i = 0; i + W <= inputs; i += W) {
        const __m512i code = _mm512_cvtps_epi32((__m512)(widened(x + i) * inverse));
        _mm_storeu_si128(reinterpret_cast<__m128i*>(to + i), _mm512_cvtepi32_epi8(_mm512_add_epi32(code, _mm512_set1_epi32(zero))));
    }
    for (; i < inputs; i++) to[i] = static_cast<uint8_t>(std::lrintf(widen(x[i]) * inverse) + zero);
    for (; i < padded; i++) to[i] = static_cast<uint8_t>(zero);
    return scale + is_broken;
}

// Rounds all rows, in memory of the calling thread.
template <class X>
void round_rows(const X* x, int64_t x_stride, int64_t rows, int64_t inputs, int64_t padded, int zero, uint8_t* to, float* scales) {
#pragma omp parallel for if (rows > 8)
    for (int64_t row = 0; row < rows; row++) scales[row] = round_row(x + row * x_stride, inputs, padded, zero, to + row * padded);
}

}  // namespace
#endif
