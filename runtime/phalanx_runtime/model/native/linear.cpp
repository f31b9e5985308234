// y = x W^T with bf16 or int8 weights and float sums, for any number of rows.
//
// Weights are in blocks of 16 outputs. bf16: [blocks][K / 2][16][2], so that a pair of inputs multiplies 16 outputs in one vector.
// int8: the same order, with a scale per output. A block is read once per strip of rows of x, with the strip's sums in registers.
#include "linear.h"

namespace {

struct Bf16Weights {
    typedef uint32_t unit;
    static constexpr int64_t step = BLOCK;  // units per two inputs
    template <int half> static vf at(const unit* w, int v) {
        const vu words = load_words(w + v * W);
        return half ? odd(words) : even(words);
    }
};
#if defined(__AVX512BF16__)
inline __m512bh words(const uint32_t* w) { return (__m512bh)_mm512_loadu_si512(w); }

// The same for bf16 inputs, with bf16 dot products.
template <class Weights, int rows, int blocks>
void tile(const bf16* x, int64_t x_stride, const typename Weights::unit* w, int64_t pairs, float* out) {
    __m512 total[rows][blocks];
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) total[r][b] = _mm512_setzero_ps();
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh weight[blocks];
        for (int b = 0; b < blocks; b++) weight[b] = words(w + (b * pairs + k) * BLOCK);
        for (int r = 0; r < rows; r++) {
            int32_t both;
            memcpy(&both, x + r * x_stride + 2 * k, 4);
            const __m512bh input = (__m512bh)_mm512_set1_epi32(both);
            for (int b = 0; b < blocks; b++) total[r][b] = _mm512_dpbf16_ps(total[r][b], weight[b], input);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) _mm512_storeu_ps(out + (r * PANEL + b) * BLOCK, total[r][b]);
}
#endif

template <class Weights> struct DenseMatrix {
    const typename Weights::unit* w;
    int64_t pairs;
    template <int rows, int blocks, class X> void tile(const X* x, int64_t x_stride, int64_t, int64_t block, float* out) const {
        ::tile<Weights, rows, blocks>(x, x_stride, w + block * pairs * Weights::step, pairs, out);
    }
    void widen(int64_t block, int64_t count, float* to) const {
        for (int64_t i = 0; i < count * pairs; i++)
            for (int v = 0; v < V; v++) {
                const auto from = w + (block * pairs + i) * Weights::step;
                store(to + i * FloatWeights::step + v * W, Weights::template at<0>(from, v));
                store(to + i * FloatWeights::step + BLOCK + v * W, Weights::template at<1>(from, v));
            }
    }
};

template <class X, class Y>
void chosen(bool is_int8, const X* x, int64_t x_stride, const void* w, const int64_t* sizes, const Output<Y>& output) {
    const int64_t rows = sizes[0], pairs = sizes[2] / 2;
    if (is_int8) return multiply(DenseMatrix<Int8Weights>{static_cast<const uint16_t*>(w), pairs}, x, x_stride, rows, output);
    multiply(DenseMatrix<Bf16Weights>{static_cast<const uint32_t*>(w), pairs}, x, x_stride, rows, output);
}

}  // namespace

extern "C" {

// sizes: rows, outputs, inputs (even), stride of x, stride of y, mode. Mode 0 writes y, 1 adds to y, 2 writes silu(gate) * up from
// alternating blocks of gates and ups, so y has half the columns. x and y: bf16 or float. scales and bias: per output, or null.
void phalanx_linear(int64_t is_bf16, int64_t is_int8, const void* x, const void* w, const float* scales, const float* bias, void* y,
                    const int64_t* sizes) {
    with_inputs(is_bf16, x, y, sizes, bias, scales, [&](const auto* inputs, int64_t stride, const auto& output) {
        chosen(is_int8, inputs, stride, w, sizes, output);
    });
}
}
