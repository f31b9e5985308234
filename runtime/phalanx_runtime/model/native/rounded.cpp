// y = x W^T with int8 weights and inputs that are rounded to int8, with a scale per row of x and per output, and exact int32 sums.
//
// Weights are in blocks of 16 outputs: [blocks][K / 4][16][4]. The instruction multiplies unsigned with signed bytes: rows of x have
// 128 added, and 128 times the sum of each output's weights is taken off again.
#include "rounding.h"

#if defined(__AVX512VNNI__)
namespace {

constexpr int64_t QUAD = 4;

struct RoundedMatrix {
    static constexpr bool narrows = false;
    const int8_t* w;
    const int32_t* weight_sums;  // of each output
    const float* row_scales;
    int64_t quads;

    template <int rows, int blocks> void tile(const uint8_t* x, int64_t x_stride, int64_t row, int64_t block, float* out) const {
        const int64_t step = quads * BLOCK * QUAD;
        const int8_t* from = w + block * step;
        vi total[rows][blocks] = {};  // g++ 12 keeps sums of type __m512i in memory
        for (int64_t k = 0; k < quads; k++) {
            __m512i weight[blocks];
            for (int b = 0; b < blocks; b++) {
                weight[b] = _mm512_loadu_si512(from + b * step + k * BLOCK * QUAD);
                if (rows <= 4) __builtin_prefetch(from + (b + blocks) * step + k * BLOCK * QUAD);
            }
            for (int r = 0; r < rows; r++) {
                int32_t four;
                memcpy(&four, x + r * x_stride + k * QUAD, 4);
                const __m512i input = _mm512_set1_epi32(four);
                for (int b = 0; b < blocks; b++) total[r][b] = (vi)_mm512_dpbusd_epi32((__m512i)total[r][b], input, weight[b]);
            }
        }
        for (int b = 0; b < blocks; b++) {
            const __m512i added = _mm512_slli_epi32(_mm512_loadu_si512(weight_sums + (block + b) * BLOCK), 7);
            for (int r = 0; r < rows; r++) {
                const __m512 sum = _mm512_cvtepi32_ps(_mm512_sub_epi32((__m512i)total[r][b], added));
                _mm512_storeu_ps(out + (r * PANEL + b) * BLOCK, sum * _mm512_set1_ps(row_scales[row + r]));
            }
        }
    }
};

}  // namespace
#endif

extern "C" {

// Whether phalanx_rounded computes.
int64_t phalanx_rounds() {
#if defined(__AVX512VNNI__)
    return 1;
#else
    return 0;
#endif
}

// sizes: as of phalanx_linear, with any number of inputs. w has them padded by zeros to a multiple of 4.
void phalanx_rounded(int64_t is_bf16, const void* x, const int8_t* w, const int32_t* weight_sums, const float* scales, const float* bias,
                     void* y, const int64_t* sizes) {
#if defined(__AVX512VNNI__)
    static thread_local std::vector<uint8_t> codes;
    static thread_local std::vector<float> row_scales;
    const int64_t rows = sizes[0], padded = (sizes[2] + QUAD - 1) / QUAD * QUAD;
    if (static_cast<int64_t>(codes.size()) < rows * padded) codes.resize(rows * padded);
    if (static_cast<int64_t>(row_scales.size()) < rows) row_scales.resize(rows);
    const uint8_t* rounded = codes.data();
    const RoundedMatrix matrix{w, weight_sums, row_scales.data(), padded / QUAD};
    with_inputs(is_bf16, x, y, sizes, bias, scales, [&](const auto* inputs, int64_t stride, const auto& output) {
        round_rows(inputs, stride, rows, sizes[2], padded, 128, codes.data(), row_scales.data());
        multiply(matrix, rounded, padded, rows, output);
    });
#endif
}
}
