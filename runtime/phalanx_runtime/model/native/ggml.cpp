// y = x W^T with weights as GGUF files have them, and float sums.
//
// A file has blocks of 32 or 256 inputs of one output. Here 16 outputs have their blocks side by side, [blocks][words][16], words of two
// bytes: the same bytes in another order, so that a vector has the same word of 16 outputs. A group is decoded to the L1 cache, for all
// rows of a panel: codes in the order of the inputs, and for each group of inputs a scale and an offset, code * scale + offset.
// Source of the formats: ggml-quants.c of llama.cpp, and gguf.quants.
#include "linear.h"

namespace {

using Words = const uint16_t*;  // a block of 16 outputs
constexpr int MOST_GROUP = 32, MOST_GROUPS = 16;  // inputs of a group, groups of a block
constexpr int FEW_ROWS = 2, SOME_ROWS = 4, DECODED_ROWS = 32;
constexpr int64_t NARROW_ROWS = 48;
constexpr int TILE_BLOCKS = BLOCKS_IN_REGISTERS / MOST_ROWS;
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
    template <int blocks> INLINED static void add(const Wide (&pairs)[blocks], const float* x, vf (&sum)[blocks][V]) {
        for (int half = 0; half < 2; half++)
            for (int b = 0; b < blocks; b++)
                for (int v = 0; v < V; v++) sum[b][v] += pairs[b].halves[half][v] * x[half];
    }
};
#if defined(__AVX512BF16__)
struct Narrow {
    typedef bf16 unit;
    static constexpr bool has_bias = true;
    vu codes;
    template <class Format> INLINED static Narrow of(Words w, int g, int k) { return {rounded<Format>(Format::code(w, g, k, 0))}; }
    template <int blocks> INLINED static void add(const Narrow (&pairs)[blocks], const bf16* x, vf (&sum)[blocks][V]) {
        int32_t both;
        memcpy(&both, x, 4);
        const __m512bh inputs = (__m512bh)_mm512_set1_epi32(both);
        for (int b = 0; b < blocks; b++) sum[b][0] = (vf)_mm512_dpbf16_ps((__m512)sum[b][0], (__m512bh)pairs[b].codes, inputs);
    }
};
#endif

// Of the groups of a block: value = code * scale + offset, with codes as `Pair` has them.
template <class Pair> struct Scales {
    alignas(64) float scales[MOST_GROUPS * BLOCK], offsets[MOST_GROUPS * BLOCK];

    template <class Format> INLINED void read(Words w) {
#pragma GCC unroll 16
        for (int g = 0; g < Format::size / Format::group; g++)
            for (int v = 0; v < V; v++) {
                const vf scale = Format::scale(w, g, v), offset = Format::offset(w, g, scale, v);
                store(scales + g * BLOCK + v * W, scale);
                store(offsets + g * BLOCK + v * W, Pair::has_bias ? offset - scale * BIAS<Format> : offset);
            }
    }
    // Returns the sum of products with values. sum: of those with codes; sum_x: of the inputs of the group.
    INLINED vf scaled(vf sum, float sum_x, int g, int v) const {
        return sum * load(scales + g * BLOCK + v * W) + load(offsets + g * BLOCK + v * W) * sum_x;
    }
};

// Codes of one group of several blocks, decoded once for all rows.
template <class Pair> struct Tile {
    Scales<Pair> scales[TILE_BLOCKS];
    alignas(64) Pair pairs[MOST_GROUP / 2][TILE_BLOCKS];

    // Adds the products of group g to out. sums: of x in each group. pair(k, b): codes of a block.
    template <int rows, int blocks, int group, class ReadPair>
    INLINED void add_pairs(const typename Pair::unit* x, int64_t x_stride, const float* sums, int64_t num_groups, int g, float* out,
                           ReadPair pair) const {
        vf sum[rows][blocks][V] = {};
#pragma GCC unroll 16
        for (int k = 0; k < group / 2; k++) {
            Pair codes[blocks];
            for (int b = 0; b < blocks; b++) codes[b] = pair(k, b);
            for (int r = 0; r < rows; r++) Pair::add(codes, x + r * x_stride + 2 * k, sum[r]);
        }
        for (int r = 0; r < rows; r++)
            for (int b = 0; b < blocks; b++)
                for (int v = 0; v < V; v++) {
                    float* to = out + (r * PANEL + b) * BLOCK + v * W;
                    store(to, load(to) + scales[b].scaled(sum[r][b][v], sums[r * num_groups], g, v));
                }
    }
    template <int rows, int blocks, int group>
    [[gnu::noinline]] void add(const typename Pair::unit* x, int64_t x_stride, const float* sums, int64_t num_groups, int g,
                               float* out) const {
        const auto pair = [&](int k, int b) [[gnu::always_inline]] { return pairs[k][b]; };
        add_pairs<rows, blocks, group>(x, x_stride, sums, num_groups, g, out, pair);
    }
    // The same for `count` rows, at most `rows`.
    template <int rows, int blocks, int group, class... Arguments> void add_rows(int64_t count, Arguments... more) const {
        if constexpr (rows > 0) {
            if (count == rows) return add<rows, blocks, group>(more...);
            add_rows<rows - 1, blocks, group>(count, more...);
        }
    }
    // Decodes group g, and adds its products at the same time: they take other units of the processor.
    template <class Format, int rows, int blocks>
    [[gnu::noinline]] void decode_and_add(const Words (&from)[blocks], const typename Pair::unit* x, int64_t x_stride, const float* sums,
                                          int64_t num_groups, int g, float* out) {
        const auto pair = [&](int k, int b) [[gnu::always_inline]] { return pairs[k][b] = Pair::template of<Format>(from[b], g, k); };
        add_pairs<rows, blocks, Format::group>(x, x_stride, sums, num_groups, g, out, pair);
    }
    template <class Format, int blocks> void decode(const Words (&from)[blocks], int g) {
        for (int b = 0; b < blocks; b++)
#pragma GCC unroll 16
            for (int k = 0; k < Format::group / 2; k++) pairs[k][b] = Pair::template of<Format>(from[b], g, k);
    }
};

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
    int64_t narrow_rows() const { return NARROW_ROWS; }

    Words at(int64_t block, int64_t i) const { return w + (block * count() + i) * Format::words * BLOCK; }
    // Fetches words behind a block, a part of them at each group: all at once they would keep others from memory.
    INLINED static void fetch(Words from, int g) {
        constexpr int part = (Format::words * BLOCK * Format::group / Format::size + LINE - 1) / LINE * LINE;
        for (int at = 0; at < part; at += LINE) __builtin_prefetch(from + AHEAD + g * part + at);
    }
    // Multiplies one block with few rows, which take codes as they are decoded.
    template <int rows, class X> [[gnu::noinline]] void one(const X* x, int64_t x_stride, int64_t row, int64_t block, float* out) const {
        using Pair = typename PairFor<X>::type;
        constexpr int group = Format::group, chains = rows == 1 && group == 32 ? 2 : 1;  // sums that need not wait for one another
        Scales<Pair> scales;
        vf total[rows][V] = {};
        for (int64_t i = 0; i < count(); i++) {
            const Words from = at(block, i);
            const float* own = sums + row * num_groups() + i * (Format::size / group);
            scales.template read<Format>(from);
            for (int g = 0; g < Format::size / group; g++, x += group) {
                if (group == 16) fetch(from, g);  // words are not read in order
                vf sum[chains][rows][1][V] = {};
#pragma GCC unroll 16
                for (int k = 0; k < group / 2; k++) {
                    const Pair codes[1] = {Pair::template of<Format>(from, g, k)};
                    for (int r = 0; r < rows; r++) Pair::add(codes, x + r * x_stride + 2 * k, sum[k % chains][r]);
                }
                for (int v = 0; v < V; v++)
                    for (int r = 0; r < rows; r++) {
                        if (chains == 2) sum[0][r][0][v] += sum[chains - 1][r][0][v];
                        total[r][v] += scales.scaled(sum[0][r][0][v], own[r * num_groups() + g], g, v);
                    }
            }
        }
        for (int r = 0; r < rows; r++)
            for (int v = 0; v < V; v++) store(out + r * PANEL * BLOCK + v * W, total[r][v]);
    }
    // Multiplies several blocks with more rows.
    template <int blocks, class X>
    void several(const X* x, int64_t x_stride, int64_t row, int64_t rows, int64_t block, float* out) const {
        constexpr int group = Format::group;
        Tile<typename PairFor<X>::type> tile;
        for (int64_t r = 0; r < rows; r++) std::fill_n(out + r * PANEL * BLOCK, blocks * BLOCK, 0.0f);
        const float* own = sums + row * num_groups();
        for (int64_t i = 0; i < count(); i++) {
            Words from[blocks];
            for (int b = 0; b < blocks; b++) tile.scales[b].template read<Format>(from[b] = at(block + b, i));
            for (int g = 0; g < Format::size / group; g++, x += group, own++) {
                for (int b = 0; b < blocks; b++) fetch(from[b], g);
                int64_t r = 0;
                if (rows >= MOST_ROWS && blocks == TILE_BLOCKS)
                    tile.template decode_and_add<Format, MOST_ROWS>(from, x, x_stride, own, num_groups(), g, out), r = MOST_ROWS;
                else if (rows >= SOME_ROWS && blocks == TILE_BLOCKS)
                    tile.template decode_and_add<Format, SOME_ROWS>(from, x, x_stride, own, num_groups(), g, out), r = SOME_ROWS;
                else
                    tile.template decode<Format>(from, g);
                for (; r < rows; r += MOST_ROWS)
                    tile.template add_rows<MOST_ROWS, blocks, group>(std::min<int64_t>(MOST_ROWS, rows - r), x + r * x_stride, x_stride,
                                                                     own + r * num_groups(), num_groups(), g, out + r * PANEL * BLOCK);
            }
        }
    }
    template <class Unit> void expand(int64_t block, int64_t blocks, Unit* to) const {
        constexpr int step = std::is_same_v<Unit, float> ? 2 * BLOCK : BLOCK;  // of two inputs
        Scales<Wide> decoded;
        for (int64_t i = block * count(); i < (block + blocks) * count(); i++) {
            const Words from = w + i * Format::words * BLOCK;
            decoded.template read<Format>(from);
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
        Scales<Wide> decoded;
        const int lane = static_cast<int>(index % BLOCK);
        for (int64_t i = 0; i < count(); i++) {
            const Words from = w + (index / BLOCK * count() + i) * Format::words * BLOCK;
            decoded.template read<Format>(from);
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

template <class Format> constexpr int PANEL_ROWS<GgmlMatrix<Format>> = DECODED_ROWS;
template <class Format, class X>
void panel(const GgmlMatrix<Format>& w, const X* x, int64_t x_stride, int64_t row, int64_t rows, int64_t first, int64_t blocks,
           float* out) {
    int64_t b = 0;
    if (rows <= FEW_ROWS) {
        for (; b < blocks; b++)
            rows == 1 ? w.template one<1>(x, x_stride, row, first + b, out + b * BLOCK)
                      : w.template one<2>(x, x_stride, row, first + b, out + b * BLOCK);
        return;
    }
    for (; b + TILE_BLOCKS <= blocks; b += TILE_BLOCKS)
        w.template several<TILE_BLOCKS>(x, x_stride, row, rows, first + b, out + b * BLOCK);
    for (; b < blocks; b++) w.template several<1>(x, x_stride, row, rows, first + b, out + b * BLOCK);
}

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
