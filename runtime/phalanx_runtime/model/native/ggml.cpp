// y = x W^T with weights as GGUF files have them, and float sums.
//
// A file has blocks of 32 or 256 inputs of one output. Here 16 outputs have their blocks side by side, [blocks][words][16], words of two
// bytes: the same bytes in another order, so that a vector has the same word of 16 outputs. A block is decoded to the L1 cache, for all
// rows of a tile: codes in the order of the inputs, and for each group of inputs a scale and an offset, code * scale + offset.
// Source of the formats: ggml-quants.c of llama.cpp, and gguf.quants.
#include "linear.h"

namespace {

using Words = const uint16_t*;  // a block of 16 outputs
constexpr int MOST_INPUTS = 256, MOST_GROUPS = 16;
constexpr int FEW_ROWS = 2;
constexpr int LINE = 32, AHEAD = 2048;  // words: of a cache line, and between what is read and what is fetched
#define INLINED [[gnu::always_inline]] inline  // else g++ passes vectors through memory
constexpr uint32_t NIBBLES = 0x000f000f, PAIRS = 0x00030003, BITS = 0x00010001;

inline vu number(Words w, int at, int v) { return words_of(w + at * BLOCK + v * W); }
inline vf half(Words w, int at, int v) { return halves_of(w + at * BLOCK + v * W); }
inline vu byte(Words w, int at, int v) { return number(w, at / 2, v) >> (at % 2 * 8) & 255; }
inline vf floats(vu x) { return __builtin_convertvector((vi)x, vf); }
// Both bytes of a word, in the halves of 32 bits.
inline vu pair(Words w, int at, int v) {
    const uint16_t* from = w + at * BLOCK + v * W;
#if defined(__AVX512BW__)
    return (vu)_mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    const vu both = words_of(from);
    return (both & 255) | (both & 0xff00) << 8;
#endif
}

// Formats. `code`: of inputs 2 k and 2 k + 1 of a group, in the halves of 32 bits.

// Q4_0, Q4_1, Q5_0, Q5_1: the fifth bits of all inputs are before the others.
template <int Bits, bool has_offset> struct Plain {
    static constexpr int size = 32, group = 32, bits = Bits, high = has_offset ? 2 : 1, low = high + (Bits == 5 ? 2 : 0);
    static constexpr int words = low + 8;
    static vf scale(Words w, int, int v) { return half(w, 0, v); }
    static vf offset(Words w, int, vf scale, int v) { return has_offset ? half(w, 1, v) : scale * -float(1 << (Bits - 1)); }
    INLINED static vu code(Words w, int, int k, int v) {
        const vu code = pair(w, low + k % 8, v) >> (k / 8 * 4) & NIBBLES;
        if (Bits == 4) return code;
        const vu fifths = number(w, high + k / 8, v);
        return code | ((fifths | fifths << 15) >> (k % 8 * 2) & BITS) << 4;
    }
};
struct Q8_0 {
    static constexpr int size = 32, group = 32, bits = 8, words = 17;
    static vf scale(Words w, int, int v) { return half(w, 0, v); }
    static vf offset(Words, int, vf scale, int) { return scale * -128.0f; }
    INLINED static vu code(Words w, int, int k, int v) { return pair(w, 1 + k, v) ^ 0x00800080; }
};
// Q4_K and Q5_K: scales and offsets in 6 bits, the last four of each in two pieces.
template <int Bits> struct Mins {
    static constexpr int size = 256, group = 32, bits = Bits, high = 8, low = high + (Bits == 5 ? 16 : 0), words = low + 64;
    static vf scale(Words w, int g, int v) {
        const vu code = g < 4 ? byte(w, 4 + g, v) & 63 : (byte(w, 8 + g, v) & 15) | byte(w, g, v) >> 6 << 4;
        return half(w, 0, v) * floats(code);
    }
    static vf offset(Words w, int g, vf, int v) {
        const vu code = g < 4 ? byte(w, 8 + g, v) & 63 : byte(w, 8 + g, v) >> 4 | byte(w, 4 + g, v) >> 6 << 4;
        return -half(w, 1, v) * floats(code);
    }
    INLINED static vu code(Words w, int g, int k, int v) {
        const vu code = pair(w, low + g / 2 * 16 + k, v) >> (g % 2 * 4) & NIBBLES;
        return Bits == 4 ? code : code | (pair(w, high + k, v) >> g & BITS) << 4;
    }
};
struct Q2_K {
    static constexpr int size = 256, group = 16, bits = 2, words = 42;
    static vf scale(Words w, int g, int v) { return half(w, 40, v) * floats(byte(w, g, v) & 15); }
    static vf offset(Words w, int g, vf, int v) { return -half(w, 41, v) * floats(byte(w, g, v) >> 4); }
    INLINED static vu code(Words w, int g, int k, int v) { return pair(w, 8 + g / 8 * 16 + g % 2 * 8 + k, v) >> (g % 8 / 2 * 2) & PAIRS; }
};
struct Q3_K {
    static constexpr int size = 256, group = 16, bits = 3, words = 55;
    static vf scale(Words w, int g, int v) {
        const vu low = byte(w, 96 + g % 8, v) >> (g / 8 * 4) & 15, high = byte(w, 104 + g % 4, v) >> (g / 4 * 2) & 3;
        return half(w, 54, v) * (floats(low | high << 4) - 32.0f);
    }
    static vf offset(Words, int, vf scale, int) { return scale * -4.0f; }
    INLINED static vu code(Words w, int g, int k, int v) {
        const vu low = pair(w, 16 + g / 8 * 16 + g % 2 * 8 + k, v) >> (g % 8 / 2 * 2) & PAIRS;
        return low | (pair(w, g % 2 * 8 + k, v) >> (g / 2) & BITS) << 2;
    }
};
struct Q6_K {
    static constexpr int size = 256, group = 16, bits = 6, words = 105;
    static vf scale(Words w, int g, int v) { return half(w, 104, v) * floats((vu)((vi)(byte(w, 192 + g, v) << 24) >> 24)); }
    static vf offset(Words, int, vf scale, int) { return scale * -32.0f; }
    INLINED static vu code(Words w, int g, int k, int v) {
        const int quarter = g % 8 / 2, at = g % 2 * 8 + k;
        const vu low = pair(w, g / 8 * 32 + quarter % 2 * 16 + at, v) >> (quarter / 2 * 4) & NIBBLES;
        return low | (pair(w, 64 + g / 8 * 16 + at, v) >> (quarter * 2) & PAIRS) << 4;
    }
};

// Two codes as bf16 numbers. Those of fewer than 8 bits are the last bits of 128 + code; `BIAS` is that 128.
template <class Format> constexpr float BIAS = Format::bits < 8 ? 128.0f : 0.0f;
template <class Format> inline vu rounded(vu codes) {
    if (Format::bits < 8) return codes | 0x43004300;
    return (vu)floats(codes & 0xffff) >> 16 | (vu)floats(codes >> 16);
}

// Codes of two inputs and 16 outputs: as floats, of both inputs one after the other, or as pairs in bf16.
struct Wide {
    typedef float unit;
    static constexpr bool has_bias = false;
    vf halves[2][V];
    template <class Format> INLINED static Wide of(Words w, int g, int k) {
        Wide found;
        for (int v = 0; v < V; v++) {
            const vu code = Format::code(w, g, k, v);
            found.halves[0][v] = floats(code & 0xffff), found.halves[1][v] = floats(code >> 16);
        }
        return found;
    }
    template <int rows> INLINED void add(const float* x, int64_t x_stride, vf (&sum)[rows][V]) const {
        for (int half = 0; half < 2; half++)
            for (int r = 0; r < rows; r++)
                for (int v = 0; v < V; v++) sum[r][v] += halves[half][v] * x[r * x_stride + half];
    }
};
#if defined(__AVX512BF16__)
struct Narrow {
    typedef bf16 unit;
    static constexpr bool has_bias = true;
    vu codes;
    template <class Format> INLINED static Narrow of(Words w, int g, int k) { return {rounded<Format>(Format::code(w, g, k, 0))}; }
    template <int rows> INLINED void add(const bf16* x, int64_t x_stride, vf (&sum)[rows][V]) const {
        for (int r = 0; r < rows; r++) {
            int32_t both;
            memcpy(&both, x + r * x_stride, 4);
            sum[r][0] = (vf)_mm512_dpbf16_ps((__m512)sum[r][0], (__m512bh)codes, (__m512bh)_mm512_set1_epi32(both));
        }
    }
};
#endif

// A decoded block. value = code * scale + offset; `pairs` only for many rows.
template <class Pair> struct Decoded {
    alignas(64) float scales[MOST_GROUPS * BLOCK], offsets[MOST_GROUPS * BLOCK];
    alignas(64) Pair pairs[MOST_INPUTS / 2];

    template <class Format> void read_scales(Words w) {
#pragma GCC unroll 16
        for (int g = 0; g < Format::size / Format::group; g++)
            for (int v = 0; v < V; v++) {
                const vf scale = Format::scale(w, g, v), offset = Format::offset(w, g, scale, v);
                store(scales + g * BLOCK + v * W, scale);
                store(offsets + g * BLOCK + v * W, Pair::has_bias ? offset - scale * BIAS<Format> : offset);
            }
    }
    template <class Format> void read_pairs(Words w) {
        Pair* to = pairs;
        for (int g = 0; g < Format::size / Format::group; g++)
#pragma GCC unroll 16
            for (int k = 0; k < Format::group / 2; k++) *to++ = Pair::template of<Format>(w, g, k);
    }
};

// Adds the products with one block. pair(g, k): inputs 2 k and 2 k + 1 of a group. sums: of x in each group.
template <int rows, int size, int group, class Pair, class ReadPair>
INLINED void add_block(const Decoded<Pair>& block, const typename Pair::unit* x, int64_t x_stride,
                                             const float* sums, int64_t num_groups, vf (&total)[rows][V], ReadPair pair) {
    constexpr int chains = rows == 1 && group == 32 ? 2 : 1;  // sums that need not wait for one another
    for (int g = 0; g < size / group; g++, x += group) {
        vf sum[chains][rows][V] = {};
#pragma GCC unroll 16
        for (int k = 0; k < group / 2; k++) pair(g, k).add(x + 2 * k, x_stride, sum[k % chains]);
        for (int v = 0; v < V; v++) {
            const vf scale = load(block.scales + g * BLOCK + v * W), offset = load(block.offsets + g * BLOCK + v * W);
            for (int r = 0; r < rows; r++) {
                if (chains == 2) sum[0][r][v] += sum[chains - 1][r][v];
                total[r][v] += sum[0][r][v] * scale + offset * sums[r * num_groups + g];
            }
        }
    }
}
template <int rows, int size, int group, class Pair>
[[gnu::noinline]] void add_decoded(const Decoded<Pair>& block, const typename Pair::unit* x, int64_t x_stride, const float* sums,
                                   int64_t num_groups, vf (&total)[rows][V]) {
    add_block<rows, size, group>(block, x, x_stride, sums, num_groups, total,
                                 [&](int g, int k) -> const Pair& { return block.pairs[g * group / 2 + k]; });
}

template <class X> struct PairFor { typedef Wide type; };
#if defined(__AVX512BF16__)
template <> struct PairFor<bf16> { typedef Narrow type; };
#endif

template <class Format> struct GgmlMatrix {
    static constexpr bool narrows = true;
    Words w;
    int64_t pairs;
    const float* sums;  // of x, [rows][groups]

    int64_t count() const { return 2 * pairs / Format::size; }
    int64_t num_groups() const { return 2 * pairs / Format::group; }
    int64_t narrow_rows() const { return Format::group; }

    template <int rows, int blocks, class X> void tile(const X* x, int64_t x_stride, int64_t row, int64_t block, float* out) const {
        for (int b = 0; b < blocks; b++) one<rows>(x, x_stride, row, block + b, out + b * BLOCK);
    }
    // Few rows multiply codes as they are decoded, more rows those of a whole block.
    template <int rows, class X> void one(const X* x, int64_t x_stride, int64_t row, int64_t block, float* out) const {
        using Pair = typename PairFor<X>::type;
        constexpr int size = Format::size, group = Format::group;
        Decoded<Pair> decoded;
        vf total[rows][V] = {};
        for (int64_t i = 0; i < count(); i++, x += size) {
            const Words from = w + (block * count() + i) * Format::words * BLOCK;
            const float* own = sums + row * num_groups() + i * (size / group);
            if (group == 16)  // whose words are not read in order
                for (int at = 0; at < Format::words * BLOCK; at += LINE) __builtin_prefetch(from + AHEAD + at);
            decoded.template read_scales<Format>(from);
            if constexpr (rows <= FEW_ROWS) {
                const auto pair = [&](int g, int k) [[gnu::always_inline]] { return Pair::template of<Format>(from, g, k); };
                add_block<rows, size, group>(decoded, x, x_stride, own, num_groups(), total, pair);
            } else {
                decoded.template read_pairs<Format>(from);
                add_decoded<rows, size, group>(decoded, x, x_stride, own, num_groups(), total);
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < V; v++) store(out + r * PANEL * BLOCK + v * W, total[r][v]);
    }
    template <class Unit> void expand(int64_t block, int64_t blocks, Unit* to) const {
        constexpr int step = std::is_same_v<Unit, float> ? 2 * BLOCK : BLOCK;  // of two inputs
        Decoded<Wide> decoded;
        for (int64_t i = block * count(); i < (block + blocks) * count(); i++) {
            const Words from = w + i * Format::words * BLOCK;
            decoded.template read_scales<Format>(from);
            for (int g = 0; g < Format::size / Format::group; g++)
                for (int k = 0; k < Format::group / 2; k++, to += step) {
                    const Wide pair = Wide::of<Format>(from, g, k);
                    for (int v = 0; v < V; v++) {
                        const vf scale = load(decoded.scales + g * BLOCK + v * W), offset = load(decoded.offsets + g * BLOCK + v * W);
                        put_pair(pair.halves[0][v] * scale + offset, pair.halves[1][v] * scale + offset, v, to);
                    }
                }
        }
    }
    static void put_pair(vf even, vf odd, int v, float* to) {
        store(to + v * W, even);
        store(to + BLOCK + v * W, odd);
    }
#if defined(__AVX512BF16__)
    static void put_pair(vf even, vf odd, int, uint32_t* to) {
        const __m512i low = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)even));
        const __m512i high = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh((__m512)odd));
        _mm512_storeu_si512(to, _mm512_or_si512(low, _mm512_slli_epi32(high, 16)));
    }
#endif
    // Writes the weights of one output.
    template <class Y> void row(int64_t index, Y* to) const {
        Decoded<Wide> decoded;
        const int lane = static_cast<int>(index % BLOCK);
        for (int64_t i = 0; i < count(); i++) {
            const Words from = w + (index / BLOCK * count() + i) * Format::words * BLOCK;
            decoded.template read_scales<Format>(from);
            for (int g = 0; g < Format::size / Format::group; g++)
                for (int k = 0; k < Format::group / 2; k++) {
                    const vu code = Format::code(from, g, k, lane / W);
                    const uint32_t both = code[lane % W];
                    const float scale = decoded.scales[g * BLOCK + lane], offset = decoded.offsets[g * BLOCK + lane];
                    narrow(static_cast<float>(both & 0xffff) * scale + offset, to++);
                    narrow(static_cast<float>(both >> 16) * scale + offset, to++);
                }
        }
    }
};

// Calls work(Format{}) with the format that has this number in GGUF files.
template <class Work> void with_format(int64_t kind, Work work) {
    switch (kind) {
        case 2: return work(Plain<4, false>{});
        case 3: return work(Plain<4, true>{});
        case 6: return work(Plain<5, false>{});
        case 7: return work(Plain<5, true>{});
        case 8: return work(Q8_0{});
        case 10: return work(Q2_K{});
        case 11: return work(Q3_K{});
        case 12: return work(Mins<4>{});
        case 13: return work(Mins<5>{});
        case 14: return work(Q6_K{});
    }
}

// Sums x over each group, [rows][groups], in memory of the calling thread.
template <class X> const float* sums_of(const X* x, int64_t x_stride, int64_t rows, int64_t inputs, int64_t group) {
    static thread_local std::vector<float> kept;
    const int64_t groups = inputs / group;
    if (static_cast<int64_t>(kept.size()) < rows * groups) kept.resize(rows * groups);
    float* to = kept.data();
#pragma omp parallel for if (rows > 8)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t g = 0; g < groups; g++) {
            vf total{};
            for (int64_t i = 0; i < group; i += W) total += widened(x + row * x_stride + g * group + i);
            to[row * groups + g] = sum(total);
        }
    return to;
}

// Outputs that follow one another, in one format. w: [blocks of outputs][blocks][words][16].
struct Part {
    int64_t kind;
    const void* w;
    int64_t outputs;
};

}  // namespace

extern "C" {

// sizes: as of phalanx_linear, with inputs a multiple of the blocks'; then the number of parts. Only one part can be gated. bias: padded
// to 16 outputs, or null.
void phalanx_ggml(int64_t is_bf16, const void* x, const void* parts, const float* bias, void* y, const int64_t* sizes) {
    with_inputs(is_bf16, x, y, sizes, bias, nullptr, [&](const auto* inputs, int64_t stride, const auto& output) {
        auto to = output;
        for (const Part* part = static_cast<const Part*>(parts); part < static_cast<const Part*>(parts) + sizes[6]; part++) {
            to.columns = std::min(part->outputs, output.y + output.columns - to.y);
            with_format(part->kind, [&](auto format) {
                using Format = decltype(format);
                const float* sums = sums_of(inputs, stride, sizes[0], sizes[2], Format::group);
                multiply(GgmlMatrix<Format>{static_cast<Words>(part->w), sizes[2] / 2, sums}, inputs, stride, sizes[0], to);
            });
            to.y += part->outputs;
            if (to.bias) to.bias += part->outputs;
        }
    });
}

// Writes rows of a weight, [count][inputs], in bf16 or float.
void phalanx_ggml_rows(int64_t is_bf16, int64_t kind, const void* w, const int64_t* rows, int64_t count, int64_t inputs, void* y) {
    with_format(kind, [&](auto format) {
        const GgmlMatrix<decltype(format)> matrix{static_cast<Words>(w), inputs / 2, nullptr};
        for (int64_t i = 0; i < count; i++) {
            if (is_bf16)
                matrix.row(rows[i], static_cast<bf16*>(y) + i * inputs);
            else
                matrix.row(rows[i], static_cast<float*>(y) + i * inputs);
        }
    });
}
}
