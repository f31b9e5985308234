// What LoRA adapters add to the output of a module: y += (x A^T) B, for rows whose adapters are in several slots.
//
// A: [slots, most, inputs] and B: [slots, most, outputs] for each linear of the module, `most`: the rank that slots have memory for.
// Rows of one slot follow one another in `rows`. A piece of them reads the factors of its slot once. Sums are fp32.
#include <omp.h>

#include <algorithm>
#include <type_traits>
#include <vector>

#include "vectors.h"

namespace {

struct Linear {
    const void *a, *b;
    const int64_t* ranks;  // of each slot; 0: no factors
    int64_t most, first, outputs;  // outputs: from column `first` of y
};
struct Piece {
    int64_t slot, start, stop;  // rows[start], ..., rows[stop - 1]
};
constexpr int FEW = 4;             // rows of a tile
constexpr int64_t BLOCK = 16;      // outputs of a block
constexpr int64_t MOST_LINEARS = 3;  // of a module
constexpr int64_t CHUNK = 256;     // outputs of a work item

inline void fetch(const void* from) { __builtin_prefetch(from); }

template <class X>
inline vf widened_part(const X* from, int64_t count) {
    X numbers[W] = {};
    std::copy_n(from, count, numbers);
    return widened(numbers);
}

// Products of vectors along the inputs: floats, or pairs of bf16.
template <class X> struct Products {
    static constexpr int step = W;
    static vf from(const X* x) { return widened(x); }
    static vf part(const X* x, int64_t count) { return widened_part(x, count); }
    static vf added(vf total, vf a, vf b) { return total + a * b; }
};
#if defined(__AVX512BF16__)
template <> struct Products<bf16> {
    static constexpr int step = 2 * W;
    static __m512bh from(const bf16* x) { return (__m512bh)_mm512_loadu_si512(x); }
    static __m512bh part(const bf16* x, int64_t count) {
        bf16 numbers[2 * W] = {};
        std::copy_n(x, count, numbers);
        return from(numbers);
    }
    static vf added(vf total, __m512bh a, __m512bh b) { return (vf)_mm512_dpbf16_ps((__m512)total, a, b); }
};
#endif

// Multiplies `rows` rows of x with `ranks` rows of A: out[row * stride + rank].
template <int rows, int ranks, class X>
void shrink_tile(const X* const* x, const X* a, int64_t inputs, float* out, int64_t stride) {
    using P = Products<X>;
    vf total[std::max(rows * ranks, W)] = {};
    int64_t k = 0;
    for (; k + P::step <= inputs; k += P::step) {
        decltype(P::from(a)) own[rows];
        for (int r = 0; r < rows; r++) own[r] = P::from(x[r] + k);
        for (int j = 0; j < ranks; j++) {
            const X* at = a + j * inputs + k;
            if (rows < FEW) fetch(at + ranks * inputs);
            const auto weight = P::from(at);
            for (int r = 0; r < rows; r++) total[r * ranks + j] = P::added(total[r * ranks + j], own[r], weight);
        }
    }
    if (k < inputs)
        for (int j = 0; j < ranks; j++) {
            const auto weight = P::part(a + j * inputs + k, inputs - k);
            for (int r = 0; r < rows; r++)
                total[r * ranks + j] = P::added(total[r * ranks + j], P::part(x[r] + k, inputs - k), weight);
        }
    for (int first = 0; first < rows * ranks; first += W) {
        const vf sums = row_sums(total + first);
        for (int i = 0; i < W && first + i < rows * ranks; i++) out[(first + i) / ranks * stride + (first + i) % ranks] = sums[i];
    }
}

// The same for any number of ranks.
template <int rows, int ranks, class X>
void shrink(const X* const* x, const X* a, int64_t count, int64_t inputs, float* out, int64_t stride) {
    int64_t j = 0;
    for (; j + ranks <= count; j += ranks) shrink_tile<rows, ranks>(x, a + j * inputs, inputs, out + j, stride);
    if constexpr (ranks > 1)
        if (j < count) shrink<rows, ranks / 2>(x, a + j * inputs, count - j, inputs, out + j, stride);
}

// The column of y, whose blocks of outputs are `period` columns apart.
inline int64_t place(int64_t output, int64_t period) { return output / BLOCK * period + output % BLOCK; }

// Factors of one linear of a slot, and where its blocks of outputs are.
template <class X> struct Outputs {
    const X* b;
    int64_t rank, count, period;
};

// Adds the product of `rows` rows of t with `vectors` vectors of outputs of B to rows of y.
template <int rows, int vectors, class X>
void expand_tile(const float* t, int64_t stride, const Outputs<X>& own, X* const* y, int64_t first) {
    vf total[rows][vectors] = {};
    for (int64_t j = 0; j < own.rank; j++) {
        const X* at = own.b + j * own.count + first;
        vf weight[vectors];
        for (int v = 0; v < vectors; v++) {
            if (rows < FEW) fetch(at + (vectors + v) * W);
            weight[v] = widened(at + v * W);
        }
        for (int r = 0; r < rows; r++) {
            const vf input = all(t[r * stride + j]);
            for (int v = 0; v < vectors; v++) total[r][v] += weight[v] * input;
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            X* to = y[r] + place(first + v * W, own.period);
            narrowed(widened(to) + total[r][v], to);
        }
}

// The same for outputs [from, to).
template <int rows, class X>
void expand(const float* t, int64_t stride, const Outputs<X>& own, X* const* y, int64_t from, int64_t to) {
    constexpr int most = 4;
    int64_t at = from;
    for (; at + most * W <= to; at += most * W) expand_tile<rows, most>(t, stride, own, y, at);
    for (; at + W <= to; at += W) expand_tile<rows, 1>(t, stride, own, y, at);
    for (; at < to; at++)
        for (int r = 0; r < rows; r++) {
            float total = 0;
            for (int64_t j = 0; j < own.rank; j++) total += t[r * stride + j] * widen(own.b[j * own.count + at]);
            X* const column = y[r] + place(at, own.period);
            narrow(widen(*column) + total, column);
        }
}

// Calls work<rows>(first) for tiles of the rows of a piece.
template <int rows, class Work>
void for_rows(int64_t first, int64_t stop, Work work) {
    for (; first + rows <= stop; first += rows) work(std::integral_constant<int, rows>(), first);
    if constexpr (rows > 1) for_rows<rows / 2>(first, stop, work);
}

template <class X> struct Step {
    const X* x;
    X* y;
    const int64_t* rows;
    int64_t x_stride, y_stride, inputs, period;
    float* sums;  // [rows, stride]: x A^T of the linears, side by side
    int64_t stride;

    // Multiplies the rows of a piece with A of one linear.
    void shrink_piece(const Linear& linear, const Piece& piece, float* to) const {
        const X* a = static_cast<const X*>(linear.a) + piece.slot * linear.most * inputs;
        for_rows<FEW>(piece.start, piece.stop, [&](auto count, int64_t first) {
            const X* own[count];
            for (int r = 0; r < count; r++) own[r] = x + rows[first + r] * x_stride;
            constexpr int ranks = count == 1 ? 8 : 16 / count;
            shrink<count, ranks>(own, a, linear.ranks[piece.slot], inputs, to + first * stride, stride);
        });
    }

    // Adds outputs [from, to) of one linear to the rows of a piece.
    void expand_piece(const Linear& linear, const Piece& piece, const float* t, int64_t from, int64_t to) const {
        const X* b = static_cast<const X*>(linear.b) + piece.slot * linear.most * linear.outputs;
        const Outputs<X> outputs{b, linear.ranks[piece.slot], linear.outputs, period};
        if (!outputs.rank) return;
        for_rows<FEW>(piece.start, piece.stop, [&](auto count, int64_t first) {
            X* own[count];
            for (int r = 0; r < count; r++) own[r] = y + rows[first + r] * y_stride + linear.first;
            expand<count>(t + first * stride, stride, outputs, own, from, to);
        });
    }
};

template <class X>
void add(Step<X> step, const Linear* linears, int64_t num_linears, const Piece* pieces, int64_t num_pieces) {
    static thread_local std::vector<float> kept;
    int64_t chunks[MOST_LINEARS + 1] = {}, starts[MOST_LINEARS + 1] = {};
    for (int64_t l = 0; l < num_linears; l++) {
        starts[l + 1] = starts[l] + linears[l].most;
        chunks[l + 1] = chunks[l] + (linears[l].outputs + CHUNK - 1) / CHUNK;
    }
    step.stride = starts[num_linears];
    const size_t size = pieces[num_pieces - 1].stop * step.stride;
    if (kept.size() < size) kept.resize(size);
    step.sums = kept.data();
#pragma omp parallel
    {
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_pieces * num_linears; i++) {
            const int64_t l = i % num_linears;
            step.shrink_piece(linears[l], pieces[i / num_linears], step.sums + starts[l]);
        }
#pragma omp for schedule(static)
        for (int64_t i = 0; i < num_pieces * chunks[num_linears]; i++) {
            const int64_t chunk = i % chunks[num_linears];
            const int64_t l = std::upper_bound(chunks, chunks + num_linears, chunk) - chunks - 1;
            const int64_t from = (chunk - chunks[l]) * CHUNK, to = std::min(from + CHUNK, linears[l].outputs);
            step.expand_piece(linears[l], pieces[i / chunks[num_linears]], step.sums + starts[l], from, to);
        }
    }
}

}  // namespace

extern "C" {

// sizes: inputs, stride of x, stride of y, linears, pieces, distance of a linear's blocks of 16 outputs in y: 16 if they follow one
// another. x, y and the factors: bf16 or float.
void phalanx_adapters(int64_t is_bf16, const void* x, void* y, const void* linears, const int64_t* rows, const void* pieces,
                      const int64_t* sizes) {
    const auto run = [&](auto number) {
        using X = decltype(number);
        add(Step<X>{static_cast<const X*>(x), static_cast<X*>(y), rows, sizes[1], sizes[2], sizes[0], sizes[5], nullptr, 0},
            static_cast<const Linear*>(linears), sizes[3], static_cast<const Piece*>(pieces), sizes[4]);
    };
    is_bf16 ? run(bf16()) : run(float());
}
}
