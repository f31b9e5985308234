// Blocks of 16 outputs, tiles of rows and blocks with sums in registers, and what becomes of the sums: shared by all linears.
//
// A matrix has `pairs` (inputs / 2), `tile<rows, blocks>(x, x_stride, row, block, out)`, which multiplies rows of x, the first of
// them row `row` of the whole, with blocks from `block` on, and `expand(block, count, to)`, which writes weights as `DenseMatrix` has them:
// in floats, and if the matrix `narrows` also in bf16, from `narrow_rows()` rows on.
#pragma once
#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

constexpr int BLOCK = 16;
constexpr int V = BLOCK / W;
#if defined(__AVX512F__)
constexpr int BLOCKS_IN_REGISTERS = 24, MOST_ROWS = 8;
#else
constexpr int BLOCKS_IN_REGISTERS = 6, MOST_ROWS = 6;
#endif
constexpr int PANEL = 12;             // blocks per panel; a panel of weights fits the L2 cache
constexpr int64_t CHUNK = 64;         // maximum rows of x per work item
enum Mode : int64_t { PLAIN = 0, ADD = 1, GATED = 2 };

// Weights of 16 outputs as floats: `at<0>` for the even input of a pair, `at<1>` for the odd one.
struct Int8Weights {
    typedef uint16_t unit;
    static constexpr int64_t step = BLOCK;
    template <int half> static vf at(const unit* w, int v) {
#if defined(__AVX512F__)
        const vi both = (vi)_mm512_cvtepi16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + v * W)));
#elif defined(__AVX2__)
        const vi both = (vi)_mm256_cvtepi16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(w + v * W)));
#else
        vi both;
        for (int i = 0; i < W; i++) both[i] = static_cast<int16_t>(w[v * W + i]);
#endif
        return __builtin_convertvector(half ? both >> 8 : (both << 24) >> 24, vf);
    }
};
#if defined(__AVX512BF16__)
// bf16 represents every int8.
inline __m512bh words(const uint16_t* w) {
    const __m128i* from = reinterpret_cast<const __m128i*>(w);
    const __m512 low = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from)));
    const __m512 high = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(from + 1)));
    return _mm512_cvtne2ps_pbh(high, low);
}
#endif

struct Bf16Weights {
    typedef uint32_t unit;
    static constexpr int64_t step = BLOCK;  // units per two inputs
    template <int half> static vf at(const unit* w, int v) {
        const vu words = load_words(w + v * W);
        return half ? odd(words) : even(words);
    }
};
// Weights widened in advance, for many rows.
struct FloatWeights {
    typedef float unit;
    static constexpr int64_t step = 2 * BLOCK;
    template <int half> static vf at(const unit* w, int v) { return load(w + half * BLOCK + v * W); }
};

template <class Weights, int half, int rows, int blocks>
inline void add_products(const float* x, int64_t x_stride, const typename Weights::unit* w, int64_t block_step,
                         vf (&total)[rows][blocks][V]) {
    vf weight[blocks][V];
    for (int b = 0; b < blocks; b++)
        for (int v = 0; v < V; v++) weight[b][v] = Weights::template at<half>(w + b * block_step, v);
    for (int r = 0; r < rows; r++) {
        const vf input = all(x[r * x_stride + half]);
        for (int b = 0; b < blocks; b++)
            for (int v = 0; v < V; v++) total[r][b][v] += weight[b][v] * input;
    }
}

// Multiplies `rows` rows of x with `blocks` blocks: out[row * PANEL * BLOCK + column].
template <class Weights, int rows, int blocks>
void tile(const float* x, int64_t x_stride, const typename Weights::unit* w, int64_t pairs, float* out) {
    vf total[rows][blocks][V] = {};
    for (int64_t k = 0; k < pairs; k++) {
        add_products<Weights, 0>(x + 2 * k, x_stride, w + k * Weights::step, pairs * Weights::step, total);
        add_products<Weights, 1>(x + 2 * k, x_stride, w + k * Weights::step, pairs * Weights::step, total);
    }
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++)
            for (int v = 0; v < V; v++) store(out + (r * PANEL + b) * BLOCK + v * W, total[r][b][v]);
}

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
    static constexpr bool narrows = false;
    const typename Weights::unit* w;
    int64_t pairs;
    template <int rows, int blocks, class X> void tile(const X* x, int64_t x_stride, int64_t, int64_t block, float* out) const {
        ::tile<Weights, rows, blocks>(x, x_stride, w + block * pairs * Weights::step, pairs, out);
    }
    void expand(int64_t block, int64_t count, float* to) const {
        for (int64_t i = 0; i < count * pairs; i++)
            for (int v = 0; v < V; v++) {
                const auto from = w + (block * pairs + i) * Weights::step;
                store(to + i * FloatWeights::step + v * W, Weights::template at<0>(from, v));
                store(to + i * FloatWeights::step + BLOCK + v * W, Weights::template at<1>(from, v));
            }
    }
};

// Multiplies tiles of `rows` rows with all blocks of a panel.
template <int rows, class Matrix, class X>
void strip(const Matrix& w, const X* x, int64_t x_stride, int64_t row, int64_t first, int64_t blocks, float* out) {
    constexpr int most = std::min(4, BLOCKS_IN_REGISTERS / rows);
    int64_t b = 0;
    for (; b + most <= blocks; b += most) w.template tile<rows, most>(x, x_stride, row, first + b, out + b * BLOCK);
    for (; b < blocks; b++) w.template tile<rows, 1>(x, x_stride, row, first + b, out + b * BLOCK);
}

template <int rows, class Matrix, class X>
void any_strip(int64_t count, const Matrix& w, const X* x, int64_t x_stride, int64_t row, int64_t first, int64_t blocks, float* out) {
    if constexpr (rows > 0) {
        if (count == rows) return strip<rows>(w, x, x_stride, row, first, blocks, out);
        any_strip<rows - 1>(count, w, x, x_stride, row, first, blocks, out);
    }
}

// Multiplies `rows` rows of x, at most PANEL_ROWS, with `blocks` blocks: out[row * PANEL * BLOCK + column]. A matrix may have another one.
template <class Matrix> constexpr int PANEL_ROWS = MOST_ROWS;
template <class Matrix, class X>
void panel(const Matrix& w, const X* x, int64_t x_stride, int64_t row, int64_t rows, int64_t first, int64_t blocks, float* out) {
    any_strip<MOST_ROWS>(rows, w, x, x_stride, row, first, blocks, out);
}

template <class Y> struct Output {
    Y* y;
    int64_t stride, columns, mode;
    const float *bias, *scales;
};

// Stores the first `room` of W numbers.
template <class Y>
inline void put(vf x, Y* to, int64_t room) {
    if (room >= W) return narrowed(x, to);
    for (int64_t i = 0; i < room; i++) narrow(x[i], to + i);
}

// Writes, adds or gates the sums of one row over a panel that starts at output `first`.
template <class Y> void finish(const Output<Y>& to, const float* sums, int64_t row, int64_t first, int64_t count) {
    Y* y = to.y + row * to.stride;
    alignas(64) float scaled[PANEL * BLOCK];
    if (to.scales || to.bias) {
        for (int64_t i = 0; i < count; i++) scaled[i] = to.scales ? sums[i] * to.scales[first + i] : sums[i];
        if (to.bias)
            for (int64_t i = 0; i < count; i++) scaled[i] += to.bias[first + i];
        sums = scaled;
    }
    if (to.mode == GATED) {
        for (int64_t b = 0; b < count; b += 2 * BLOCK)
            for (int v = 0; v < BLOCK; v += W) {
                const int64_t at = (first + b) / 2 + v;
                put(silu(load(sums + b + v)) * load(sums + b + BLOCK + v), y + at, to.columns / 2 - at);
            }
        return;
    }
    const int64_t real = std::min(count, to.columns - first);
    int64_t i = 0;
    for (; i + W <= real; i += W)
        narrowed(to.mode == ADD ? widened(y + first + i) + load(sums + i) : load(sums + i), y + first + i);
    for (; i < real; i++) narrow(to.mode == ADD ? widen(y[first + i]) + sums[i] : sums[i], y + first + i);
}

// Multiplies rows [from, to) of x with blocks [first, last).
template <class Matrix, class X, class Y>
void region(const Matrix& w, const X* x, int64_t x_stride, int64_t from, int64_t to, int64_t first, int64_t last,
            const Output<Y>& output) {
    constexpr int most = PANEL_ROWS<Matrix>;
    alignas(64) float sums[most * PANEL * BLOCK];
    for (int64_t b = first; b < last; b += PANEL) {
        const int64_t blocks = std::min<int64_t>(PANEL, last - b);
        for (int64_t row = from; row < to; row += most) {
            const int64_t rows = std::min<int64_t>(most, to - row);
            panel(w, x + row * x_stride, x_stride, row, rows, b, blocks, sums);
            for (int64_t r = 0; r < rows; r++) finish(output, sums + r * PANEL * BLOCK, row + r, b * BLOCK, blocks * BLOCK);
        }
    }
}

// The same with weights that are expanded once for all rows.
constexpr int WIDE_PANEL = 2, NARROW_PANEL = 6;
constexpr int64_t WIDE_ROWS = 16, EXPANDED_CHUNK = 256;
template <class Weights, class Matrix, class X, class Y>
void expanded_region(const Matrix& w, const X* x, int64_t x_stride, int64_t from, int64_t to, int64_t first, int64_t last,
                     const Output<Y>& output) {
    static thread_local std::vector<typename Weights::unit> expanded;
    expanded.resize((last - first) * w.pairs * Weights::step);
    w.expand(first, last - first, expanded.data());
    const DenseMatrix<Weights> dense{expanded.data(), w.pairs};
    alignas(64) float sums[MOST_ROWS * PANEL * BLOCK];
    for (int64_t row = from; row < to; row += MOST_ROWS) {
        const int64_t rows = std::min<int64_t>(MOST_ROWS, to - row);
        any_strip<MOST_ROWS>(rows, dense, x + row * x_stride, x_stride, row, 0, last - first, sums);
        for (int64_t r = 0; r < rows; r++) finish(output, sums + r * PANEL * BLOCK, row + r, first * BLOCK, (last - first) * BLOCK);
    }
}

template <class Matrix, class X, class Y>
void multiply(const Matrix& w, const X* x, int64_t x_stride, int64_t rows, const Output<Y>& output) {
    const int64_t unit = output.mode == GATED ? 2 : 1;
    const int64_t units = (output.columns + BLOCK * unit - 1) / (BLOCK * unit), blocks = units * unit;
    constexpr bool widens = std::is_same_v<X, float>, narrows = std::is_same_v<X, bf16> && Matrix::narrows;
    constexpr int64_t size = widens ? WIDE_PANEL : narrows ? NARROW_PANEL : PANEL;
    constexpr int64_t chunk = narrows ? EXPANDED_CHUNK : CHUNK;
    int64_t few = widens ? WIDE_ROWS : CHUNK;
    if constexpr (narrows) few = w.narrow_rows();
#pragma omp parallel
    {
        if (rows < few) {
            const int64_t threads = omp_get_num_threads(), me = omp_get_thread_num();
            const int64_t first = units * me / threads * unit, last = units * (me + 1) / threads * unit;
            region(w, x, x_stride, 0, rows, first, last, output);
        } else {
            const int64_t panels = (blocks + size - 1) / size, chunks = (rows + chunk - 1) / chunk;
#pragma omp for schedule(dynamic)
            for (int64_t i = 0; i < panels * chunks; i++) {
                const int64_t first = i / chunks * size, row = i % chunks * chunk;
                const int64_t last = std::min(first + size, blocks), to = std::min(row + chunk, rows);
                if constexpr (widens)
                    expanded_region<FloatWeights>(w, x, x_stride, row, to, first, last, output);
                else if constexpr (narrows)
                    expanded_region<Bf16Weights>(w, x, x_stride, row, to, first, last, output);
                else
                    region(w, x, x_stride, row, to, first, last, output);
            }
        }
    }
}

#if !defined(__AVX512BF16__)
// Returns contiguous rows of x as floats, in memory of the calling thread.
const float* widened_rows(const bf16* x, int64_t x_stride, int64_t rows, int64_t inputs) {
    static thread_local std::vector<float> kept;
    if (static_cast<int64_t>(kept.size()) < rows * inputs) kept.resize(rows * inputs);
    float* to = kept.data();
#pragma omp parallel for if (rows > 8)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t i = 0; i < inputs; i++) to[row * inputs + i] = widen(x[row * x_stride + i]);
    return to;
}
#endif

// Calls work(x, stride of x, output) with x in bf16 where the processor has bf16 products, else in floats. sizes: see phalanx_linear.
template <class Work>
void with_inputs(bool is_bf16, const void* x, void* y, const int64_t* sizes, const float* bias, const float* scales, Work work) {
    if (!is_bf16)
        return work(static_cast<const float*>(x), sizes[3],
                    Output<float>{static_cast<float*>(y), sizes[4], sizes[1], sizes[5], bias, scales});
    const Output<bf16> output{static_cast<bf16*>(y), sizes[4], sizes[1], sizes[5], bias, scales};
#if defined(__AVX512BF16__)
    work(static_cast<const bf16*>(x), sizes[3], output);
#else
    work(widened_rows(static_cast<const bf16*>(x), sizes[3], sizes[0], sizes[2]), sizes[2], output);
#endif
}

}  // namespace
