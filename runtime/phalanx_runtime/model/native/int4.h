// Products with int4 codes of pages in place, by bf16 dot products.
//
// A code c of a group with scale s and offset o is the number (c - 8) * s + (o + 8 * s). The numbers c - 8 are exact in bf16; scales
// multiply scores and weights, and offsets the sum of a query or of weights. The low bits of a head's bytes are its first half, the
// high bits its second half. A slice is 32 dimensions: one half of 32 bytes. Numbers of even bytes precede those of odd bytes.
#pragma once
#include "codes.h"

#if defined(__AVX512BF16__)
namespace {

constexpr int64_t SLICE = 32, LUMP = 16;  // bytes of a slice, tokens of a lump
constexpr float INT4_CENTER = 8;

// Numbers by the five low bits of a word, of which the highest is another code's.
struct CenteredCodes {
    alignas(64) bf16 numbers[32];
    CenteredCodes() {
        for (int code = 0; code < 32; code++) narrow(static_cast<float>(code % 16) - INT4_CENTER, &numbers[code]);
    }
};
const CenteredCodes CENTERED;

inline __m512bh centered(__m512i codes, __m512i table) { return (__m512bh)_mm512_permutexvar_epi16(codes, table); }

// Scales, and offsets of centered codes, of a group of 16 tokens.
struct LumpScales {
    __m512 scale, offset;
};

// Codes and scales of 16 tokens of a KV head.
struct Lump {
    const uint8_t *k, *v;
    const bf16 *k_scales, *v_scales;
};

// scales: [16 tokens, 2 * groups].
inline LumpScales scales_of(const bf16* scales, int64_t groups, int64_t group) {
    __m512i both[2];  // scales of two groups or of one in the low and the high half of each word, then offsets
    if (groups == 1) {
        const __m512i word = _mm512_loadu_si512(scales);
        both[0] = word, both[1] = _mm512_srli_epi32(word, 16);
    } else if (groups == 2) {
        const __m512i even = _mm512_set_epi32(30, 28, 26, 24, 22, 20, 18, 16, 14, 12, 10, 8, 6, 4, 2, 0);
        const __m512i first = _mm512_loadu_si512(scales), second = _mm512_loadu_si512(scales + 32);
        both[0] = _mm512_permutex2var_epi32(first, even, second);
        both[1] = _mm512_permutex2var_epi32(first, _mm512_add_epi32(even, _mm512_set1_epi32(1)), second);
        if (group) both[0] = _mm512_srli_epi32(both[0], 16), both[1] = _mm512_srli_epi32(both[1], 16);
    } else {
        alignas(64) uint32_t found[2][LUMP];
        for (int64_t token = 0; token < LUMP; token++)
            for (int64_t part = 0; part < 2; part++) found[part][token] = scales[(2 * token + part) * groups + group].bits;
        both[0] = _mm512_load_si512(found[0]), both[1] = _mm512_load_si512(found[1]);
    }
    const __m512 scale = (__m512)_mm512_slli_epi32(both[0], 16), offset = (__m512)_mm512_slli_epi32(both[1], 16);
    return {scale, _mm512_fmadd_ps(scale, _mm512_set1_ps(INT4_CENTER), offset)};
}

// 32 bytes of a token, then those of the next one. `bytes`: of a token.
inline __m512i two_tokens(const uint8_t* codes, int64_t bytes) {
    const auto *first = reinterpret_cast<const __m256i*>(codes), *second = reinterpret_cast<const __m256i*>(codes + bytes);
    return _mm512_inserti64x4(_mm512_castsi256_si512(_mm256_loadu_si256(first)), _mm256_loadu_si256(second), 1);
}

// Adds lanes at `distance`: lanes with this bit in their index come from b, the others from a.
template <int distance>
inline __m512 folded(__m512 a, __m512 b) {
    constexpr __mmask16 upper = distance == 1 ? 0xaaaa : distance == 2 ? 0xcccc : distance == 4 ? 0xf0f0 : 0xff00;
    const __m512 own = _mm512_mask_mov_ps(a, upper, b), other = _mm512_mask_mov_ps(b, upper, a);
    if constexpr (distance == 1) return own + _mm512_permute_ps(other, 0xb1);
    if constexpr (distance == 2) return own + _mm512_permute_ps(other, 0x4e);
    if constexpr (distance == 4) return own + _mm512_shuffle_f32x4(other, other, 0xb1);
    return own + _mm512_shuffle_f32x4(other, other, 0x4e);
}

inline __m512bh pair_of(const bf16* from) {
    int32_t both;
    memcpy(&both, from, 4);
    return (__m512bh)_mm512_set1_epi32(both);
}

// Queries of a row as `group_products` reads them: for each slice its even dimensions twice, then its odd ones twice. sums: of each
// group.
inline void arrange_query(const bf16* q, int64_t dim, bf16* to, float* sums) {
    const __m512i lane = _mm512_set_epi16(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0, 15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4,
                                          3, 2, 1, 0);
    const __m512i evens = _mm512_slli_epi16(lane, 1), odds = _mm512_add_epi16(evens, _mm512_set1_epi16(1));
    for (int64_t at = 0; at < dim; at += SLICE) {
        const __m512i slice = _mm512_loadu_si512(q + at);
        _mm512_storeu_si512(to + 2 * at, _mm512_permutexvar_epi16(evens, slice));
        _mm512_storeu_si512(to + 2 * at + SLICE, _mm512_permutexvar_epi16(odds, slice));
        const float total = _mm512_reduce_add_ps((__m512)even((vu)slice) + (__m512)odd((vu)slice));
        sums[at / GROUP_DIMS] = at % GROUP_DIMS ? sums[at / GROUP_DIMS] + total : total;
    }
}

// Lane i: a query's products with the centered codes of a group, of `count` tokens; bits of a token's index are in reverse.
// q: of the group, with q_step between rows; first, second: bytes of the group's slices; shifts: of their bits.
template <int rows, int count>
inline void group_products(const bf16* q, int64_t q_step, const uint8_t* first, const uint8_t* second, const __m128i* shifts,
                           int64_t bytes, __m512i table, __m512 (&out)[rows]) {
    if constexpr (count == 2) {
        for (int r = 0; r < rows; r++) out[r] = _mm512_setzero_ps();
        for (int slice = 0; slice < 2; slice++) {
            const __m512i codes = _mm512_srl_epi16(two_tokens(slice ? second : first, bytes), shifts[slice]);
            const __m512bh evens = centered(codes, table), odds = centered(_mm512_srli_epi16(codes, 8), table);
            for (int r = 0; r < rows; r++) {
                const bf16* query = q + r * q_step + 2 * SLICE * slice;
                out[r] = _mm512_dpbf16_ps(out[r], evens, (__m512bh)_mm512_loadu_si512(query));
                out[r] = _mm512_dpbf16_ps(out[r], odds, (__m512bh)_mm512_loadu_si512(query + SLICE));
            }
        }
    } else {
        constexpr int half = count / 2;
        const int64_t step = half * bytes;
        __m512 later[rows];
        group_products<rows, half>(q, q_step, first, second, shifts, bytes, table, out);
        group_products<rows, half>(q, q_step, first + step, second + step, shifts, bytes, table, later);
        for (int r = 0; r < rows; r++) out[r] = folded<16 / count>(out[r], later[r]);
    }
}

// Adds products of `rows` queries with 16 keys to `scores`.
template <int rows>
inline void add_scores(const bf16* q, const float* query_sums, int64_t dim, const Lump& lump, __m512* scores, int64_t step) {
    const __m512i table = _mm512_load_si512(CENTERED.numbers), reversed = _mm512_set_epi32(15, 7, 11, 3, 13, 5, 9, 1, 14, 6, 10, 2, 12, 4, 8, 0);
    const int64_t groups = dim / GROUP_DIMS, bytes = dim / 2, slices = bytes / SLICE;
    for (int64_t group = 0; group < groups; group++) {
        const uint8_t* at[2];
        __m128i shifts[2];
        for (int64_t i = 0; i < 2; i++) {
            const int64_t slice = 2 * group + i;
            at[i] = lump.k + slice % slices * SLICE, shifts[i] = _mm_cvtsi32_si128(slice < slices ? 0 : 4);
        }
        __m512 products[rows];
        group_products<rows, LUMP>(q + 2 * GROUP_DIMS * group, 2 * dim, at[0], at[1], shifts, bytes, table, products);
        const LumpScales by = scales_of(lump.k_scales, groups, group);
        for (int r = 0; r < rows; r++) {
            const __m512 product = _mm512_permutexvar_ps(reversed, products[r]);
            scores[r * step] += product * by.scale + by.offset * query_sums[r * groups + group];
        }
    }
}

// sums = sums * shrink + weights x centered codes, for 32 bytes of each token: 64 numbers, in the order of `arranged`. low, high:
// weights of the groups of both halves, [rows, weight_step].
template <int rows, bool has_one_group>
inline void weigh_codes(const bf16* low, const bf16* high, int64_t weight_step, const Lump* lumps, int64_t at, int64_t bytes, int64_t count,
                        const __m512* shrink, float* sums, int64_t dim) {
    const __m512i table = _mm512_load_si512(CENTERED.numbers);
    const __m512i pairs = _mm512_set_epi16(31, 15, 30, 14, 29, 13, 28, 12, 27, 11, 26, 10, 25, 9, 24, 8, 23, 7, 22, 6, 21, 5, 20, 4, 19, 3,
                                           18, 2, 17, 1, 16, 0);
    __m512 total[rows][4];
    for (int r = 0; r < rows; r++)
        for (int part = 0; part < 4; part++) total[r][part] = _mm512_loadu_ps(sums + r * dim + 16 * part) * shrink[r];
    for (int64_t key = 0; key < count; key += 2) {
        const uint8_t* from = lumps[key / LUMP].v + key % LUMP * bytes + at;
        const __m512i codes = _mm512_permutexvar_epi16(pairs, two_tokens(from, bytes));
        const __m512bh values[] = {centered(codes, table), centered(_mm512_srli_epi16(codes, 8), table),
                                   centered(_mm512_srli_epi16(codes, 4), table), centered(_mm512_srli_epi16(codes, 12), table)};
        for (int r = 0; r < rows; r++) {
            const __m512bh first = pair_of(low + r * weight_step + key);
            const __m512bh second = has_one_group ? first : pair_of(high + r * weight_step + key);
            for (int part = 0; part < 4; part++)
                total[r][part] = _mm512_dpbf16_ps(total[r][part], values[part], part < 2 ? first : second);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int part = 0; part < 4; part++) _mm512_storeu_ps(sums + r * dim + 16 * part, total[r][part]);
}

// Puts the sums of a row in the order of dimensions, and adds the sum of weights times offsets of each group.
inline void arrange_sums(float* sums, const float* offsets, int64_t dim, float* scratch) {
    const __m512i low = _mm512_set_epi32(23, 7, 22, 6, 21, 5, 20, 4, 19, 3, 18, 2, 17, 1, 16, 0);
    const __m512i high = _mm512_add_epi32(low, _mm512_set1_epi32(8));
    memcpy(scratch, sums, dim * sizeof(float));
    for (int64_t part = 0; part < dim / SLICE; part++) {
        const int64_t first = part / 2 * SLICE + part % 2 * (dim / 2);
        const __m512 evens = _mm512_loadu_ps(scratch + SLICE * part), odds = _mm512_loadu_ps(scratch + SLICE * part + 16);
        const __m512 offset = _mm512_set1_ps(offsets[first / GROUP_DIMS]);
        _mm512_storeu_ps(sums + first, _mm512_permutex2var_ps(evens, low, odds) + offset);
        _mm512_storeu_ps(sums + first + 16, _mm512_permutex2var_ps(evens, high, odds) + offset);
    }
}

}  // namespace
#endif
