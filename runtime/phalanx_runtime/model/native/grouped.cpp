// y = x W^T with codes of 4 or 8 bits and float sums: weights are (code - zero point) * scale, with both per output and group of inputs,
// or table[code] * scale, or number in e4m3 * scale.
//
// Codes are in blocks of 16 outputs and octets, 8 inputs. 4 bits: [blocks][octets][16] words, whose fields 0 to 3 are inputs 0, 2, 4
// and 6 of the octet, and fields 4 to 7 inputs 1, 3, 5 and 7: a shift leaves a pair of inputs in the low bits of both halves, as a
// table look-up of bf16 pairs needs. 8 bits: [blocks][octets * 4][16][2] int8, code - 128, or e4m3. Each group is summed alone, then
// scaled.
#include "rounding.h"

namespace {

enum ScaleKind : int64_t { FLOAT = 0, BFLOAT = 1, HALF = 2, POWER = 3, EIGHT = 4, NESTED = 5 };
enum OffsetKind : int64_t { NO_OFFSETS = 0, ZERO_POINTS = 1, FIRST_VALUES = 2 };
constexpr int OCTET = 8;
constexpr int64_t NARROW_ROWS = 48;
constexpr int FEW_ROWS = 4;  // whose products take less time than reading the codes

// Powers of two in e8m0, and numbers in e4m3; both are finite.
inline vf powers_of(const uint8_t* from) {
    const vu exponents = words_of(from);
    return (vf)(exponents << 23 | ((vu)(exponents == 0) & 0x400000));
}
inline vf eights_of(vu bits) {
    const vf magnitude = (vf)((bits & 0x7f) << 20) * 0x1p120f;
    return (vf)((vu)magnitude | (bits & 0x80) << 24);
}

// Scales in codes of 8 bits. Outer scales follow, [blocks][segments][16], offsets, [blocks][16], and codes, [blocks][groups][16].
struct NestedScales {
    float table[256];
    int64_t log_segment, segments, num_blocks, unused[5];

    const float* outer() const { return reinterpret_cast<const float*>(this + 1); }
    vf at(int64_t count, int64_t block, int64_t group, int lane) const {
        const float* offsets = outer() + num_blocks * segments * BLOCK;
        const auto* codes = reinterpret_cast<const uint8_t*>(offsets + num_blocks * BLOCK);
        const vu words = words_of(codes + (block * count + group) * BLOCK + lane);
        const vf scale = load(outer() + (block * segments + (group >> log_segment)) * BLOCK + lane);
        return look_up(words) * scale + load(offsets + block * BLOCK + lane);
    }
    vf look_up(vu words) const {
#if defined(__AVX512F__)
        return (vf)_mm512_i32gather_ps((__m512i)words, table, 4);
#elif defined(__AVX2__)
        return (vf)_mm256_i32gather_ps(table, (__m256i)words, 4);
#else
        vf found;
        for (int i = 0; i < W; i++) found[i] = table[words[i]];
        return found;
#endif
    }
};

// Scales and offsets of groups, [blocks][groups][16].
struct Groups {
    const void* scales;
    const void* offsets;
    const int64_t* ends;  // in octets
    int64_t count, scale_kind, offset_kind, middle;
    const float* sums;  // [rows][groups] of x; only with offsets

    // Of W outputs of a block, from `lane`.
    vf scale(int64_t block, int64_t group, int lane) const {
        if (scale_kind == NESTED) return static_cast<const NestedScales*>(scales)->at(count, block, group, lane);
        const int64_t at = (block * count + group) * BLOCK + lane;
        if (scale_kind == FLOAT) return load(static_cast<const float*>(scales) + at);
        if (scale_kind == POWER) return powers_of(static_cast<const uint8_t*>(scales) + at);
        if (scale_kind == EIGHT) return eights_of(words_of(static_cast<const uint8_t*>(scales) + at));
        const uint16_t* from = static_cast<const uint16_t*>(scales) + at;
        return scale_kind == HALF ? halves_of(from) : (vf)(words_of(from) << 16);
    }
    // The value of the middle code.
    vf offset(int64_t at, vf scale) const {
        if (offset_kind == NO_OFFSETS) return vf{};
        if (offset_kind == FIRST_VALUES)
            return (vf)(words_of(static_cast<const uint16_t*>(offsets) + at) << 16) + scale * static_cast<float>(middle);
        const vi zeros = (vi)words_of(static_cast<const uint8_t*>(offsets) + at);
        return scale * __builtin_convertvector(static_cast<int32_t>(middle) - zeros, vf);
    }
};

#if defined(__AVX512BF16__)
// -8 to 7. A look-up reads five bits; the fifth one belongs to another field, so that the table has every number twice.
alignas(64) constexpr uint16_t BF16_CODES[32] = {
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0,
    0xc100, 0xc0e0, 0xc0c0, 0xc0a0, 0xc080, 0xc040, 0xc000, 0xbf80, 0x0000, 0x3f80, 0x4000, 0x4040, 0x4080, 0x40a0, 0x40c0, 0x40e0};
// Numbers in e4m3 below 2^-6, by their last five bits, of which the upper two are 0.
alignas(64) constexpr uint16_t SMALL_EIGHTS[32] = {0x0000, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60};
#if defined(__AVX512VBMI__)
// The low and the high byte of the bf16 number for each magnitude in e4m3.
struct EightBytes {
    alignas(64) uint8_t low[128], high[128];
    constexpr EightBytes() : low(), high() {
        for (int code = 0; code < 128; code++) {
            const int bits = code < 8 ? SMALL_EIGHTS[code] : (code << 4) + (120 << 7);
            low[code] = bits & 255, high[code] = bits >> 8;
        }
    }
};
constexpr EightBytes EIGHT_BYTES;
// Puts groups of eight bytes of the first half at even places, those of the second half at odd ones.
alignas(64) constexpr int64_t ALTERNATING_EIGHTS[8] = {0, 4, 1, 5, 2, 6, 3, 7};
#endif
// Puts words of the first half at even places, those of the second half at odd ones.
alignas(64) constexpr uint16_t ALTERNATING[32] = {0, 16, 1, 17, 2,  18, 3,  19, 4,  20, 5,  21, 6,  22, 7,  23,
                                                  8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31};
#endif

// Codes less the middle one. `value<input>`: of W outputs; `pair<index>`: of 16 outputs and two inputs in bf16.
struct Nibbles {
    typedef uint32_t unit;
    static constexpr int64_t step = BLOCK, narrow_rows = NARROW_ROWS;  // step: units per octet
    struct Octet {
        vu words[V];
    };
    static Octet octet(const unit* w) {
        Octet found;
        for (int v = 0; v < V; v++) found.words[v] = load_words(w + v * W);
        return found;
    }
    template <int input> static vf value(const Octet& octet, const unit*, int v) {
        const vu shifted = octet.words[v] >> (input / 2 * 4 + input % 2 * 16);
#if defined(__AVX512F__)
        const __m512 table = _mm512_setr_ps(-8, -7, -6, -5, -4, -3, -2, -1, 0, 1, 2, 3, 4, 5, 6, 7);
        return (vf)_mm512_permutexvar_ps((__m512i)shifted, table);
#else
        return __builtin_convertvector((vi)(shifted & 15) - 8, vf);
#endif
    }
#if defined(__AVX512BF16__)
    template <int index> static __m512bh pair(const Octet& octet, const unit*) {
        const __m512i table = _mm512_load_si512(BF16_CODES);
        return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi32((__m512i)octet.words[0], 4 * index), table);
    }
#endif
};
// 4 bits with a value for each code.
struct TableNibbles : Nibbles {
    const float* table;
    const bf16* rounded;  // twice, as BF16_CODES
    template <int input> vf value(const Octet& octet, const unit*, int v) const {
        const vu shifted = octet.words[v] >> (input / 2 * 4 + input % 2 * 16);
#if defined(__AVX512F__)
        return (vf)_mm512_permutexvar_ps((__m512i)shifted, (__m512)load(table));
#elif defined(__AVX2__)
        const __m256 low = _mm256_permutevar8x32_ps((__m256)load(table), (__m256i)shifted);
        const __m256 high = _mm256_permutevar8x32_ps((__m256)load(table + 8), (__m256i)shifted);
        return (vf)_mm256_blendv_ps(low, high, (__m256)(shifted << 28));
#else
        vf found;
        for (int i = 0; i < W; i++) found[i] = table[shifted[i] & 15];
        return found;
#endif
    }
#if defined(__AVX512BF16__)
    template <int index> __m512bh pair(const Octet& octet, const unit*) const {
        const __m512i both = _mm512_loadu_si512(rounded);
        return (__m512bh)_mm512_permutexvar_epi16(_mm512_srli_epi32((__m512i)octet.words[0], 4 * index), both);
    }
#endif
};
struct Bytes {
    typedef uint16_t unit;
    static constexpr int64_t step = 4 * BLOCK, narrow_rows = NARROW_ROWS;
    struct Octet {};
    static Octet octet(const unit*) { return {}; }
    template <int input> static vf value(const Octet&, const unit* w, int v) {
        return Int8Weights::at<input % 2>(w + input / 2 * BLOCK, v);
    }
#if defined(__AVX512BF16__)
    template <int index> static __m512bh pair(const Octet&, const unit* w) { return words(w + index * BLOCK); }
#endif
};

// Numbers in e4m3, all finite.
struct Eights {
    typedef uint16_t unit;
#if defined(__AVX512VBMI__)
    static constexpr int64_t step = 4 * BLOCK, narrow_rows = 128;
#else
    static constexpr int64_t step = 4 * BLOCK, narrow_rows = NARROW_ROWS;
#endif
    struct Octet {};
    static Octet octet(const unit*) { return {}; }
    template <int input> static vf value(const Octet&, const unit* w, int v) {
        return eights_of(words_of(w + input / 2 * BLOCK + v * W) >> (input % 2 * 8));
    }
#if defined(__AVX512BF16__) && defined(__AVX512VBMI__)
    // Expands two pairs at a time; the compiler shares the work between an even index and the next one.
    template <int index> static __m512bh pair(const Octet&, const unit* w) {
        const __m512i order = _mm512_load_si512(ALTERNATING_EIGHTS);
        const __m512i codes = _mm512_permutexvar_epi64(order, _mm512_loadu_si512(w + index / 2 * 2 * BLOCK));
        const __m512i low = _mm512_permutex2var_epi8(_mm512_load_si512(EIGHT_BYTES.low), codes, _mm512_load_si512(EIGHT_BYTES.low + 64));
        const __m512i high =
            _mm512_permutex2var_epi8(_mm512_load_si512(EIGHT_BYTES.high), codes, _mm512_load_si512(EIGHT_BYTES.high + 64));
        const __m512i with_signs = _mm512_or_si512(high, _mm512_and_si512(codes, _mm512_set1_epi8(-128)));
        return (__m512bh)(index % 2 ? _mm512_unpackhi_epi8(low, with_signs) : _mm512_unpacklo_epi8(low, with_signs));
    }
#elif defined(__AVX512BF16__)
    template <int index> static __m512bh pair(const Octet&, const unit* w) {
        const __m256i bytes = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(w + index * BLOCK));
        const __m512i codes = _mm512_cvtepu8_epi16(bytes);
        const __m512i magnitudes = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x7f)), 4);
        const __mmask32 is_small = _mm512_cmplt_epu16_mask(magnitudes, _mm512_set1_epi16(0x80));
        const __m512i large = _mm512_add_epi16(magnitudes, _mm512_set1_epi16(120 << 7));
        const __m512i small = _mm512_permutexvar_epi16(codes, _mm512_load_si512(SMALL_EIGHTS));
        const __m512i signs = _mm512_slli_epi16(_mm512_and_si512(codes, _mm512_set1_epi16(0x80)), 8);
        return (__m512bh)_mm512_or_si512(_mm512_mask_blend_epi16(is_small, large, small), signs);
    }
#endif
};

template <class Codes, int input, int rows, int blocks>
inline void add_inputs(const Codes& codes, const float* x, int64_t x_stride, const typename Codes::unit* w, int64_t block_step,
                       const typename Codes::Octet (&octets)[blocks], vf (&total)[rows][blocks][V]) {
    if constexpr (input < OCTET) {
        vf weight[blocks][V];
        for (int b = 0; b < blocks; b++)
            for (int v = 0; v < V; v++) weight[b][v] = codes.template value<input>(octets[b], w + b * block_step, v);
        for (int r = 0; r < rows; r++) {
            const vf number = all(x[r * x_stride + input]);
            for (int b = 0; b < blocks; b++)
                for (int v = 0; v < V; v++) total[r][b][v] += weight[b][v] * number;
        }
        add_inputs<Codes, input + 1>(codes, x, x_stride, w, block_step, octets, total);
    }
}

#if defined(__AVX512BF16__)
template <class Codes, int index, int rows, int blocks, int chains>
inline void add_pairs(const Codes& codes, const bf16* x, int64_t x_stride, const typename Codes::unit* w, int64_t block_step,
                      const typename Codes::Octet (&octets)[blocks], __m512 (&total)[chains][rows][blocks]) {
    if constexpr (index < OCTET / 2) {
        __m512bh weight[blocks];
        for (int b = 0; b < blocks; b++) weight[b] = codes.template pair<index>(octets[b], w + b * block_step);
        for (int r = 0; r < rows; r++) {
            int32_t both;
            memcpy(&both, x + r * x_stride + 2 * index, 4);
            const __m512bh input = (__m512bh)_mm512_set1_epi32(both);
            for (int b = 0; b < blocks; b++)
                total[index % chains][r][b] = _mm512_dpbf16_ps(total[index % chains][r][b], weight[b], input);
        }
        add_pairs<Codes, index + 1>(codes, x, x_stride, w, block_step, octets, total);
    }
}
#endif

template <class Codes> struct GroupedMatrix {
    static constexpr bool narrows = true;
    const typename Codes::unit* w;
    int64_t pairs;
    Groups groups;
    Codes codes;

    // Reads an octet of each block, and fetches that of the following blocks: streams of one block are too short for the processor.
    template <int rows, int blocks> void read(const typename Codes::unit* from, typename Codes::Octet (&octets)[blocks]) const {
        for (int b = 0; b < blocks; b++) {
            octets[b] = Codes::octet(from + b * block_step());
            if (rows <= FEW_ROWS) __builtin_prefetch(from + (b + blocks) * block_step());
        }
    }
    // Scaling small groups takes longer than expanding them to bf16.
    int64_t narrow_rows() const { return std::min(Codes::narrow_rows, 2 * pairs / groups.count); }
    int64_t block_step() const { return pairs * 2 / OCTET * Codes::step; }

    // Adds the scaled sums of a group to out, or writes them for the first one.
    template <int rows, int blocks>
    [[gnu::always_inline]] void scale(const vf (&total)[rows][blocks][V], int64_t group, int64_t row, int64_t block,
                                               float* out) const {
        for (int b = 0; b < blocks; b++)
            for (int v = 0; v < V; v++) {
                const int64_t at = ((block + b) * groups.count + group) * BLOCK + v * W;
                const vf scale = groups.scale(block + b, group, v * W), offset = groups.offset(at, scale);
                for (int r = 0; r < rows; r++) {
                    float* to = out + (r * PANEL + b) * BLOCK + v * W;
                    vf sum = group ? load(to) : vf{};
                    sum += total[r][b][v] * scale;
                    if (groups.offset_kind) sum += offset * groups.sums[(row + r) * groups.count + group];
                    store(to, sum);
                }
            }
    }
    template <int rows, int blocks> void tile(const float* x, int64_t x_stride, int64_t row, int64_t block, float* out) const {
        const typename Codes::unit* from = w + block * block_step();
        for (int64_t group = 0, octet = 0; group < groups.count; group++) {
            vf total[rows][blocks][V] = {};
            for (; octet < groups.ends[group]; octet++) {
                typename Codes::Octet octets[blocks];
                read<rows>(from + octet * Codes::step, octets);
                add_inputs<Codes, 0>(codes, x + octet * OCTET, x_stride, from + octet * Codes::step, block_step(), octets, total);
            }
            scale(total, group, row, block, out);
        }
    }
#if defined(__AVX512BF16__)
    template <int rows, int blocks> void tile(const bf16* x, int64_t x_stride, int64_t row, int64_t block, float* out) const {
        constexpr int chains = rows * blocks <= 4 ? 4 : rows * blocks <= 8 ? 2 : 1;  // products that need not wait for one another
        const typename Codes::unit* from = w + block * block_step();
        for (int64_t group = 0, octet = 0; group < groups.count; group++) {
            __m512 total[chains][rows][blocks];
            for (int c = 0; c < chains; c++)
                for (int r = 0; r < rows; r++)
                    for (int b = 0; b < blocks; b++) total[c][r][b] = _mm512_setzero_ps();
            for (; octet < groups.ends[group]; octet++) {
                typename Codes::Octet octets[blocks];
                read<rows>(from + octet * Codes::step, octets);
                add_pairs<Codes, 0>(codes, x + octet * OCTET, x_stride, from + octet * Codes::step, block_step(), octets, total);
            }
            vf sums[rows][blocks][V];
            for (int r = 0; r < rows; r++)
                for (int b = 0; b < blocks; b++) {
                    __m512 sum = total[0][r][b];
                    for (int c = 1; c < chains; c++) sum += total[c][r][b];
                    sums[r][b][0] = (vf)sum;
                }
            scale(sums, group, row, block, out);
        }
    }
#endif
    template <int input> void widen_inputs(const typename Codes::Octet& octet, const typename Codes::unit* from, int v, vf scale,
                                           vf offset, float* to) const {
        if constexpr (input < OCTET) {
            store(to + input * BLOCK + v * W, codes.template value<input>(octet, from, v) * scale + offset);
            widen_inputs<input + 1>(octet, from, v, scale, offset, to);
        }
    }
#if defined(__AVX512BF16__)
    template <int input> void widen_inputs(const typename Codes::Octet& octet, const typename Codes::unit* from, int, vf scale,
                                           vf offset, uint32_t* to) const {
        if constexpr (input < OCTET) {
            const vf low = codes.template value<input>(octet, from, 0) * scale + offset;
            const vf high = codes.template value<input + 1>(octet, from, 0) * scale + offset;
            const __m512i halves = (__m512i)_mm512_cvtne2ps_pbh((__m512)high, (__m512)low);
            _mm512_storeu_si512(to + input / 2 * BLOCK, _mm512_permutexvar_epi16(_mm512_load_si512(ALTERNATING), halves));
            widen_inputs<input + 2>(octet, from, 0, scale, offset, to);
        }
    }
#endif
    template <class Unit> void expand(int64_t block, int64_t count, Unit* to) const {
        constexpr int64_t step = OCTET * BLOCK / (std::is_same_v<Unit, float> ? 1 : 2);  // of a pair in one word
        for (int64_t b = block; b < block + count; b++)
            for (int64_t group = 0, octet = 0; group < groups.count; group++) {
                vf scales[V], offsets[V];
                for (int v = 0; v < V; v++) {
                    const int64_t at = (b * groups.count + group) * BLOCK + v * W;
                    scales[v] = groups.scale(b, group, v * W), offsets[v] = groups.offset(at, scales[v]);
                }
                for (; octet < groups.ends[group]; octet++, to += step) {
                    const typename Codes::unit* from = w + b * block_step() + octet * Codes::step;
                    const auto read = Codes::octet(from);
                    for (int v = 0; v < V; v++) widen_inputs<0>(read, from, v, scales[v], offsets[v], to);
                }
            }
    }
};

// Sums x over each group: [rows][groups], in memory of the calling thread.
template <class X> const float* group_sums(const X* x, int64_t x_stride, int64_t rows, const Groups& groups) {
    static thread_local std::vector<float> kept;
    if (static_cast<int64_t>(kept.size()) < rows * groups.count) kept.resize(rows * groups.count);
    float* to = kept.data();
#pragma omp parallel for if (rows > 8)
    for (int64_t row = 0; row < rows; row++)
        for (int64_t group = 0, i = 0; group < groups.count; group++) {
            const int64_t end = groups.ends[group] * OCTET;
            vf sums{};
            for (; i + W <= end; i += W) sums += widened(x + row * x_stride + i);
            float total = sum(sums);
            for (; i < end; i++) total += widen(x[row * x_stride + i]);
            to[row * groups.count + group] = total;
        }
    return to;
}

#if defined(__AVX512VNNI__)
// Four bits with inputs in int8: sums of a group are exact, and codes are unsigned, so that the middle code is taken off by the sum of
// the inputs.
struct RoundedNibbles : GroupedMatrix<Nibbles> {
    static constexpr bool narrows = false;
    const int32_t* sums;  // [rows][groups] of the codes of x, times the middle code
    const float* row_scales;

    template <int rows, int blocks> void tile(const uint8_t* x, int64_t x_stride, int64_t row, int64_t block, float* out) const {
        const uint32_t* from = w + block * block_step();
        const __m512i low = _mm512_set1_epi8(15);
        for (int64_t group = 0, octet = 0; group < groups.count; group++) {
            vi total[rows][blocks];  // g++ 12 keeps sums of type __m512i in memory
            for (int r = 0; r < rows; r++)
                for (int b = 0; b < blocks; b++) total[r][b] = (vi)_mm512_set1_epi32(-sums[(row + r) * groups.count + group]);
            for (; octet < groups.ends[group]; octet++) {
                __m512i first[blocks], second[blocks];
                for (int b = 0; b < blocks; b++) {
                    const uint32_t* at = from + b * block_step() + octet * BLOCK;
                    const __m512i both = _mm512_loadu_si512(at);
                    if (rows <= FEW_ROWS) __builtin_prefetch(at + blocks * block_step());
                    first[b] = _mm512_and_si512(both, low);
                    second[b] = _mm512_and_si512(_mm512_srli_epi16(both, 4), low);
                }
                for (int r = 0; r < rows; r++) {
                    int32_t fours[2];
                    memcpy(fours, x + r * x_stride + octet * OCTET, OCTET);
                    const __m512i left = _mm512_set1_epi32(fours[0]), right = _mm512_set1_epi32(fours[1]);
                    for (int b = 0; b < blocks; b++) {
                        total[r][b] = (vi)_mm512_dpbusd_epi32((__m512i)total[r][b], first[b], left);
                        total[r][b] = (vi)_mm512_dpbusd_epi32((__m512i)total[r][b], second[b], right);
                    }
                }
            }
            vf sum[rows][blocks][V];
            for (int r = 0; r < rows; r++)
                for (int b = 0; b < blocks; b++)
                    sum[r][b][0] = (vf)_mm512_cvtepi32_ps((__m512i)total[r][b]) * row_scales[row + r];
            scale(sum, group, row, block, out);
        }
    }
};

// Rounds rows to int8 in the order of the nibbles' low and high halves: inputs 0, 4, 1, 5 of an octet, then 2, 6, 3, 7.
struct RoundedRows {
    std::vector<uint8_t> codes;
    std::vector<float> scales, sums;
    std::vector<int32_t> middles;

    template <class X> void round(const X* x, int64_t x_stride, int64_t rows, int64_t inputs, const Groups& groups) {
        if (static_cast<int64_t>(codes.size()) < rows * inputs) codes.resize(rows * inputs);
        if (static_cast<int64_t>(scales.size()) < rows) scales.resize(rows);
        if (static_cast<int64_t>(sums.size()) < rows * groups.count) sums.resize(rows * groups.count), middles.resize(rows * groups.count);
        round_rows(x, x_stride, rows, inputs, inputs, 0, codes.data(), scales.data());
#pragma omp parallel for if (rows > 8)
        for (int64_t row = 0; row < rows; row++)
            for (int64_t group = 0, octet = 0; group < groups.count; group++) {
                int64_t sum = 0;
                for (; octet < groups.ends[group]; octet++) sum += arrange(&codes[row * inputs + octet * OCTET]);
                middles[row * groups.count + group] = static_cast<int32_t>(sum * groups.middle);
                sums[row * groups.count + group] = static_cast<float>(sum) * scales[row];
            }
    }

    // Returns the sum of the octet.
    static int64_t arrange(uint8_t* octet) {
        const uint8_t old[OCTET] = {octet[0], octet[4], octet[1], octet[5], octet[2], octet[6], octet[3], octet[7]};
        int64_t sum = 0;
        for (int i = 0; i < OCTET; i++) octet[i] = old[i], sum += static_cast<int8_t>(old[i]);
        return sum;
    }
};
#endif

}  // namespace

extern "C" {

// sizes: as of phalanx_linear, with inputs a multiple of 8; then bits, the number of groups, the kinds of scales (0 float, 1 bf16, 2 half,
// 3 e8m0, 4 e4m3) and offsets (0 none, 1 zero points in uint8, 2 the values of code 0 in bf16). ends: of the groups, in octets. factors:
// of the outputs, or null. table: 16 values of codes of 4 bits, without offsets, or null; in bf16 they are rounded. The last of the sizes:
// whether codes of 8 bits are numbers in e4m3, without offsets.
void phalanx_grouped(int64_t is_bf16, const void* x, const void* w, const void* scales, const void* offsets, const int64_t* ends,
                     const float* factors, const float* table, const float* bias, void* y, const int64_t* sizes) {
    alignas(64) bf16 rounded[32];
    for (int i = 0; table && i < 32; i++) narrow(table[i % 16], rounded + i);
    with_inputs(is_bf16, x, y, sizes, bias, factors, [&](const auto* inputs, int64_t stride, const auto& output) {
        Groups groups{scales, offsets, ends, sizes[7], sizes[8], sizes[9], int64_t{1} << (sizes[6] - 1), nullptr};
        if (groups.offset_kind) groups.sums = group_sums(inputs, stride, sizes[0], groups);
        const auto run = [&](const auto codes, const auto* from) {
            const GroupedMatrix<std::decay_t<decltype(codes)>> matrix{from, sizes[2] / 2, groups, codes};
            multiply(matrix, inputs, stride, sizes[0], output);
        };
        if (table)
            run(TableNibbles{{}, table, rounded}, static_cast<const uint32_t*>(w));
        else if (sizes[6] == 4)
            run(Nibbles{}, static_cast<const uint32_t*>(w));
        else if (sizes[10])
            run(Eights{}, static_cast<const uint16_t*>(w));
        else
            run(Bytes{}, static_cast<const uint16_t*>(w));
    });
}

// The same for codes of 4 bits, with rows of x that are rounded to int8. Requires phalanx_rounds().
void phalanx_rounded_groups(int64_t is_bf16, const void* x, const void* w, const void* scales, const void* offsets, const int64_t* ends,
                            const float* bias, void* y, const int64_t* sizes) {
#if defined(__AVX512VNNI__)
    static thread_local RoundedRows kept;
    RoundedRows& rounded = kept;  // of the calling thread
    with_inputs(is_bf16, x, y, sizes, bias, nullptr, [&](const auto* inputs, int64_t stride, const auto& output) {
        Groups groups{scales, offsets, ends, sizes[7], sizes[8], sizes[9], int64_t{1} << (sizes[6] - 1), nullptr};
        rounded.round(inputs, stride, sizes[0], sizes[2], groups);
        groups.sums = rounded.sums.data();
        const GroupedMatrix<Nibbles> nibbles{static_cast<const uint32_t*>(w), sizes[2] / 2, groups, {}};
        const RoundedNibbles matrix{nibbles, rounded.middles.data(), rounded.scales.data()};
        multiply(matrix, static_cast<const uint8_t*>(rounded.codes.data()), sizes[2], sizes[0], output);
    });
#endif
}
}
