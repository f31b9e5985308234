// bf16 attention over pages in place, for decodes and prompt chunks, with bf16 dot products.
//
// A run is the last tokens of a request's context. A work item is (run, tile of its tokens, KV head): it processes the context in
// blocks of 64 reordered keys with an online softmax. Blocks start at multiples of 64, so results do not depend on the chunks of a
// prompt. A single token with a long context is split, and merged at the end; for batch invariance it is computed like several.
// Codes of compressed pages are expanded block by block, exactly; their scales multiply scores and weights. For single tokens those of
// int4 are read in place (int4.h).
#include <omp.h>

#include <algorithm>
#include <vector>

#include "int4.h"
#include "runs.h"

#if defined(__AVX512BF16__)
namespace {

constexpr int BLOCK = 64, PAGE = 16, VECTORS = BLOCK / PAGE, STRIP = 6;
constexpr int64_t TILE = 64, SPLIT = 512;
constexpr int64_t TILE_NUMBERS = 160 * 1024;  // of queries and of sums of a tile; they are read for each block of keys
constexpr float LOG2_E = 1.44269504f;

struct Task {
    int64_t heads, kv_heads, dim, page, q_stride, window, fixed;
    float scale, softcap;
    int64_t group() const { return heads / kv_heads; }
};
// Tokens [first, first + count) of a run, keys [from, to). merged: number of items to merge, or 0.
struct Item {
    const Run* run;
    int64_t head, first, count, from, to, merged;
};

// Numbers at the start of a cache line: stores and loads of whole lines that cross two are several times slower.
template <class T>
struct Lines {
    std::vector<__m512i> lines;
    int64_t count = 0;

    void resize(int64_t size) {
        count = size;
        lines.resize((size * static_cast<int64_t>(sizeof(T)) + 63) / 64);
    }
    T* data() { return reinterpret_cast<T*>(lines.data()); }
    const T* data() const { return reinterpret_cast<const T*>(lines.data()); }
    T* begin() { return data(); }
    T* end() { return data() + count; }
    T& operator[](int64_t i) { return data()[i]; }
    const T& operator[](int64_t i) const { return data()[i]; }
};

// Scratch of one thread: queries and sums of the tile; per row the position, slot, visible tree slots from `base` on, maximum logit
// and sum of weights.
struct Scratch {
    Lines<bf16> q;
    Lines<float> sums;
    std::vector<float> top;
    std::vector<int64_t> position, slot, line;
    std::vector<__m512> mass;
    Lines<uint32_t> keys, values;
    Lines<bf16> key_tile, value_tile;  // expanded codes of a block
    alignas(64) float key_scales[BLOCK], value_scales[BLOCK];
    Lines<bf16> arranged, weights;  // of int4: queries, and weights, [groups, rows, BLOCK]
    Lines<float> ordered;           // of int4: sums of a row
    std::vector<float> query_sums;  // of int4: sums of queries by row and group
    std::vector<__m512> offsets;    // of int4: weights times offsets, by row and group
    bool has_scales = false;
    int64_t base = NO_TREE;

    const bf16* values_of(const Pages& pages) const { return (pages.is_latent() ? key_tile : value_tile).data(); }

    void reserve(int64_t rows, int64_t dim) {
        q.resize(rows * dim);
        sums.resize(rows * dim);
        top.resize(rows);
        position.resize(rows);
        slot.resize(rows);
        line.resize(rows);
        mass.resize(rows);
        keys.resize(BLOCK * dim / 2);
        values.resize(BLOCK * dim / 2);
        key_tile.resize(BLOCK * dim);
        value_tile.resize(BLOCK * dim);
    }
};

// 2^x; 0 far below.
inline __m512 power_of_two(__m512 x) {
    x = _mm512_max_ps(x, _mm512_set1_ps(-200.0f));
    const __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    const __m512 rest = x - whole;
    __m512 poly = _mm512_set1_ps(1.33335581e-3f);
    poly = poly * rest + 9.61812911e-3f;
    poly = poly * rest + 5.55041087e-2f;
    poly = poly * rest + 2.40226507e-1f;
    poly = poly * rest + 6.93147181e-1f;
    poly = poly * rest + 1.0f;
    return _mm512_scalef_ps(poly, whole);
}

// Transposes 16 rows of 16 words: to[16 * column + row].
inline void transpose(const uint32_t* const* rows, int64_t at, uint32_t* to) {
    __m512i a[16], b[16];
    for (int i = 0; i < 16; i++) a[i] = _mm512_loadu_si512(rows[i] + at);
    for (int i = 0; i < 16; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
    for (int i = 0; i < 16; i += 4)
        for (int j = 0; j < 2; j++) {
            a[i + 2 * j] = _mm512_unpacklo_epi64(b[i + j], b[i + j + 2]);
            a[i + 2 * j + 1] = _mm512_unpackhi_epi64(b[i + j], b[i + j + 2]);
        }
    // a[4 * i + j]: column j of each quarter of four, rows 4 * i to 4 * i + 3.
    for (int j = 0; j < 4; j++) {
        b[j] = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
        b[4 + j] = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        b[8 + j] = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        b[12 + j] = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
    }
    for (int j = 0; j < 4; j++) {
        _mm512_storeu_si512(to + 16 * j, _mm512_shuffle_i32x4(b[j], b[8 + j], 0x88));
        _mm512_storeu_si512(to + 16 * (8 + j), _mm512_shuffle_i32x4(b[j], b[8 + j], 0xdd));
        _mm512_storeu_si512(to + 16 * (4 + j), _mm512_shuffle_i32x4(b[4 + j], b[12 + j], 0x88));
        _mm512_storeu_si512(to + 16 * (12 + j), _mm512_shuffle_i32x4(b[4 + j], b[12 + j], 0xdd));
    }
}

// Reorders 16 keys: to[16 * pair + key] is a pair of dimensions.
inline void pack_keys(const bf16* from, int64_t dim, uint32_t* to) {
    const uint32_t* rows[PAGE];
    for (int i = 0; i < PAGE; i++) rows[i] = reinterpret_cast<const uint32_t*>(from + i * dim);
    for (int64_t at = 0; at < dim / 2; at += 16) transpose(rows, at, to + 16 * at);
}

// Reorders 16 values, zeros from `count` on: to[(dim / 16) * (BLOCK / 2) + pair of keys][dim % 16] is a pair of keys.
inline void pack_values(const bf16* from, int64_t dim, int64_t count, uint32_t* to) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                                         35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = low + _mm512_set1_epi16(16);
    for (int pair = 0; pair < PAGE / 2; pair++)
        for (int64_t d = 0; d < dim; d += 32) {
            const bf16* at = from + 2 * pair * dim + d;
            const __m512i a = 2 * pair < count ? _mm512_loadu_si512(at) : _mm512_setzero_si512();
            const __m512i b = 2 * pair + 1 < count ? _mm512_loadu_si512(at + dim) : _mm512_setzero_si512();
            _mm512_storeu_si512(to + (d / 16 * (BLOCK / 2) + pair) * 16, _mm512_permutex2var_epi16(a, low, b));
            _mm512_storeu_si512(to + ((d / 16 + 1) * (BLOCK / 2) + pair) * 16, _mm512_permutex2var_epi16(a, high, b));
        }
}

inline __m512bh words(const uint32_t* from) { return (__m512bh)_mm512_loadu_si512(from); }

// Mask of the visible keys among 16 from `key` on.
inline __mmask16 seen(const Task& task, const Scratch& s, int64_t row, int64_t key) {
    const int64_t position = s.position[row], in_tree = key - s.base;
    const int64_t after = std::clamp<int64_t>(std::min(position + 1, s.base) - key, 0, 16);
    const int64_t before = task.window > 0 ? std::clamp<int64_t>(position + 1 - task.window - key, 0, 16) : 0;
    uint32_t found = ((1u << after) - 1) & ~((1u << before) - 1);
    if (in_tree > -16 && in_tree < 63) found |= in_tree > 0 ? s.line[row] >> in_tree : s.line[row] << -in_tree;
    return static_cast<__mmask16>(found);
}

inline __m512 capped(__m512 score, float softcap) {
    for (int i = 0; i < 16; i++) score[i] = std::tanh(score[i] / softcap) * softcap;
    return score;
}

// sums = sums * shrink + weights x values, for `blocks` times 16 dimensions.
template <int rows, int blocks>
inline void weigh(const bf16 (*weights)[BLOCK], const uint32_t* values, int pairs, const __m512* shrink, float* sums, int64_t dim) {
    __m512 total[rows][blocks];
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) total[r][b] = _mm512_loadu_ps(sums + r * dim + 16 * b) * shrink[r];
    for (int k = 0; k < pairs; k++) {
        __m512bh value[blocks];
        for (int b = 0; b < blocks; b++) value[b] = words(values + (b * (BLOCK / 2) + k) * 16);
        for (int r = 0; r < rows; r++) {
            const __m512bh weight = pair_of(&weights[r][2 * k]);
            for (int b = 0; b < blocks; b++) total[r][b] = _mm512_dpbf16_ps(total[r][b], value[b], weight);
        }
    }
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) _mm512_storeu_ps(sums + r * dim + 16 * b, total[r][b]);
}

// Online softmax with powers of two: turns scores into weights, and returns the factor on the previous sums.
template <int rows, int vectors>
inline void soften(const Task& task, Scratch& s, int64_t row, int64_t key, bool masked, __m512 (&score)[rows][vectors],
                   __m512* shrink) {
    for (int r = 0; r < rows; r++) {
        __m512 best = _mm512_set1_ps(LOWEST);
        for (int v = 0; v < vectors; v++) {
            __m512 x = score[r][v] * task.scale;
            if (s.has_scales) x *= _mm512_load_ps(&s.key_scales[PAGE * v]);
            if (task.softcap > 0) x = capped(x, task.softcap) * LOG2_E;
            if (masked)
                x = _mm512_mask_mov_ps(_mm512_set1_ps(-INFINITY), seen(task, s, row + r, key + PAGE * v), x);
            score[r][v] = x;
            best = _mm512_max_ps(best, x);
        }
        const float top = std::max(s.top[row + r], _mm512_reduce_max_ps(best));
        shrink[r] = power_of_two(_mm512_set1_ps(s.top[row + r] - top));
        s.top[row + r] = top;
        __m512 mass = s.mass[row + r] * shrink[r];
        for (int v = 0; v < vectors; v++) {
            score[r][v] = power_of_two(score[r][v] - top);
            mass += score[r][v];
        }
        s.mass[row + r] = mass;
    }
}

// Like `soften`, with weights of values in bf16.
template <int rows, int vectors>
inline void weights_of(const Task& task, Scratch& s, int64_t row, int64_t key, bool masked, __m512 (&score)[rows][vectors],
                       bf16 (*weights)[BLOCK], __m512* shrink) {
    soften<rows, vectors>(task, s, row, key, masked, score, shrink);
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) {
            const __m512 weight = s.has_scales ? score[r][v] * _mm512_load_ps(&s.value_scales[PAGE * v]) : score[r][v];
            narrowed((vf)weight, &weights[r][PAGE * v]);
        }
}

// Attention of `rows` rows of the tile over `vectors` times 16 keys.
template <int rows, int vectors>
void meet(const Task& task, Scratch& s, int64_t row, int64_t key, bool masked) {
    __m512 score[rows][vectors];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) score[r][v] = _mm512_setzero_ps();
    const bf16* q = s.q.data() + row * task.dim;
    const int64_t pairs = task.dim / 2;
    for (int64_t k = 0; k < pairs; k++) {
        __m512bh keys[vectors];
        for (int v = 0; v < vectors; v++) keys[v] = words(&s.keys[(v * pairs + k) * 16]);
        for (int r = 0; r < rows; r++) {
            const __m512bh query = pair_of(q + r * task.dim + 2 * k);
            for (int v = 0; v < vectors; v++) score[r][v] = _mm512_dpbf16_ps(score[r][v], keys[v], query);
        }
    }
    alignas(64) bf16 weights[rows][BLOCK];
    __m512 shrink[rows];
    weights_of<rows, vectors>(task, s, row, key, masked, score, weights, shrink);
    float* sums = s.sums.data() + row * task.dim;
    int64_t d = 0;
    for (; d + 64 <= task.dim; d += 64)
        weigh<rows, 4>(weights, &s.values[d / 16 * (BLOCK / 2) * 16], vectors * PAGE / 2, shrink, sums + d, task.dim);
    for (; d < task.dim; d += 32)
        weigh<rows, 2>(weights, &s.values[d / 16 * (BLOCK / 2) * 16], vectors * PAGE / 2, shrink, sums + d, task.dim);
}

template <int rows>
void meet_some(const Task& task, Scratch& s, int64_t row, int64_t key, int vectors, bool masked) {
    if (vectors == 4) return meet<rows, 4>(task, s, row, key, masked);
    if (vectors == 3) return meet<rows, 3>(task, s, row, key, masked);
    if (vectors == 2) return meet<rows, 2>(task, s, row, key, masked);
    meet<rows, 1>(task, s, row, key, masked);
}

template <int rows>
void meet_any(int64_t count, const Task& task, Scratch& s, int64_t row, int64_t key, int vectors, bool masked) {
    if constexpr (rows > 0) {
        if (count == rows) return meet_some<rows>(task, s, row, key, vectors, masked);
        meet_any<rows - 1>(count, task, s, row, key, vectors, masked);
    }
}

// Attention of all rows of the tile over keys [key, to).
void meet_block(const Task& task, Scratch& s, int64_t rows, int64_t key, int64_t to) {
    for (int64_t row = 0; row < rows; row += STRIP) {
        const int64_t count = std::min<int64_t>(STRIP, rows - row);
        const int64_t highest = s.slot[row + count - 1];
        const int64_t lowest = *std::min_element(&s.position[row], &s.position[row] + count);
        const int64_t end = std::min(to, highest + 1);
        if (end <= key || (task.window > 0 && key + BLOCK <= lowest + 1 - task.window)) continue;
        const bool cut = lowest + 1 < end || end > s.base || (task.window > 0 && key < highest + 1 - task.window);
        meet_any<STRIP>(count, task, s, row, key, static_cast<int>((end - key + PAGE - 1) / PAGE), cut || end % PAGE);
    }
}

// Slot of 16 tokens of a KV head; pages are a multiple of 16 tokens.
inline int64_t place(const Task& task, const Item& item, int64_t token) {
    return (item.run->table[token / task.page] * task.kv_heads + item.head) * task.page + token % task.page;
}

// Expands codes of fp8 or int8 without their scales, which is exact. `size` is a multiple of 64.
struct Expansion {
    alignas(64) uint8_t low[128], high[128];  // bytes of the bf16 number by magnitude
    alignas(64) uint8_t order[128];           // low and high bytes in turn
    bool is_fp8;

    explicit Expansion(int64_t format) : is_fp8(format == FP8) {
        for (int code = 0; code < 128; code++) {
            bf16 number;
            narrow(is_fp8 ? from_fp8(static_cast<uint8_t>(code)) : static_cast<float>(code), &number);
            low[code] = static_cast<uint8_t>(number.bits);
            high[code] = static_cast<uint8_t>(number.bits >> 8);
        }
        for (int i = 0; i < 64; i++) order[2 * i] = static_cast<uint8_t>(i), order[2 * i + 1] = static_cast<uint8_t>(64 + i);
    }

    void operator()(const uint8_t* codes, int64_t size, bf16* out) const {
#if defined(__AVX512VBMI__)
        const __m512i low0 = _mm512_load_si512(low), low1 = _mm512_load_si512(low + 64);
        const __m512i high0 = _mm512_load_si512(high), high1 = _mm512_load_si512(high + 64);
        const __m512i sign_bit = _mm512_set1_epi8(static_cast<char>(0x80));
        const __m512i first = _mm512_load_si512(order), second = _mm512_load_si512(order + 64);
        for (int64_t at = 0; at < size; at += 64) {
            const __m512i code = _mm512_loadu_si512(codes + at), sign = _mm512_and_si512(code, sign_bit);
            const __m512i magnitude = is_fp8 ? _mm512_andnot_si512(sign_bit, code) : _mm512_abs_epi8(code);
            const __m512i lows = _mm512_permutex2var_epi8(low0, magnitude, low1);
            const __m512i highs = _mm512_or_si512(_mm512_permutex2var_epi8(high0, magnitude, high1), sign);
            _mm512_storeu_si512(out + at, _mm512_permutex2var_epi8(lows, first, highs));
            _mm512_storeu_si512(out + at + 32, _mm512_permutex2var_epi8(lows, second, highs));
        }
#else
        if (is_fp8)
            for (int64_t at = 0; at < size; at++) narrow(from_fp8(codes[at]), out + at);
        else
            for (int64_t at = 0; at < size; at++) narrow(static_cast<float>(static_cast<int8_t>(codes[at])), out + at);
#endif
    }
};
const Expansion EXPAND_INT8(INT8), EXPAND_FP8(FP8);

// The numbers of a token and head in int4, rounded to bf16: a group has 16 different ones.
inline void expand_int4(const uint8_t* codes, const bf16* scales, int64_t dim, bf16* out) {
    const int64_t groups = num_groups(dim), size = dim / groups, half = dim / 2;
    if (size % 16) return expand(INT4, codes, scales, dim, out);
    const __m512 numbers = _mm512_set_ps(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    for (int64_t group = 0; group < groups; group++) {
        const __m512 scale = _mm512_set1_ps(widen(scales[group])), offset = _mm512_set1_ps(widen(scales[groups + group]));
        const __m256i table = (__m256i)_mm512_cvtneps_pbh(_mm512_fmadd_ps(numbers, scale, offset));
        const __m512i twice = _mm512_broadcast_i64x4(table);  // by five bits, of which the highest is another code's
        for (int64_t at = group * size; at < (group + 1) * size;) {
            const uint8_t* from = codes + (at < half ? at : at - half);
            const int shift = at < half ? 0 : 4;
            if (dim % GROUP_DIMS) {
                const __m256i words = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
                const __m256i found = _mm256_permutexvar_epi16(_mm256_srl_epi16(words, _mm_cvtsi32_si128(shift)), table);
                _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + at), found);
                at += 16;
            } else {
                const __m512i words = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
                _mm512_storeu_si512(out + at, _mm512_permutexvar_epi16(_mm512_srl_epi16(words, _mm_cvtsi32_si128(shift)), twice));
                at += 32;
            }
        }
    }
}

// Expands 16 tokens from `slot` on into block vector `at`; scales of values are zero from `count` on. int4 has its scales applied.
// Keys that are the values too are expanded once.
void expand_lump(const Pages& pages, int64_t slot, int64_t dim, int64_t count, int at, Scratch& s) {
    const int64_t bytes = code_bytes(pages.format, dim), scales = num_scales(pages.format, dim);
    const uint8_t *k = pages.k + slot * bytes, *v = pages.v + slot * bytes;
    const bf16 *k_scales = pages.k_scales + slot * scales, *v_scales = pages.v_scales + slot * scales;
    bf16 *keys = &s.key_tile[at * PAGE * dim], *values = &s.value_tile[at * PAGE * dim];
    if (pages.format == INT4) {
        for (int64_t token = 0; token < std::min<int64_t>(count, PAGE); token++) {
            expand_int4(k + token * bytes, k_scales + token * scales, dim, keys + token * dim);
            if (!pages.is_latent()) expand_int4(v + token * bytes, v_scales + token * scales, dim, values + token * dim);
        }
        return;
    }
    const Expansion& expansion = pages.format == INT8 ? EXPAND_INT8 : EXPAND_FP8;
    expansion(k, PAGE * dim, keys);
    if (!pages.is_latent()) expansion(v, PAGE * dim, values);
    const __mmask16 known = static_cast<__mmask16>((1u << std::clamp<int64_t>(count, 0, PAGE)) - 1);
    _mm512_store_ps(&s.key_scales[at * PAGE], widened(k_scales));
    _mm512_store_ps(&s.value_scales[at * PAGE], _mm512_maskz_mov_ps(known, widened(v_scales)));
}

// A macro, since g++ takes a function that does nothing but prefetch for one without effects, and removes its calls.
#define PREFETCH(from, bytes)                                     \
    for (int64_t ahead = 0; ahead < static_cast<int64_t>(bytes); ahead += 64) \
    _mm_prefetch(reinterpret_cast<const char*>(from) + ahead, _MM_HINT_T1)

// Lane i: q . keys[i], for `count` consecutive keys. Prefetches `next`.
template <int count>
inline __m512 products(const bf16* q, const bf16* keys, const bf16* next, int64_t dim) {
    if constexpr (count == 1) {
        __m512 total = _mm512_setzero_ps();
        for (int64_t d = 0; d < dim; d += 32) {
            total = _mm512_dpbf16_ps(total, (__m512bh)_mm512_loadu_si512(keys + d), (__m512bh)_mm512_loadu_si512(q + d));
            if (next) _mm_prefetch(reinterpret_cast<const char*>(next + d), _MM_HINT_T1);
        }
        return total;
    } else {
        constexpr int half = count / 2;
        const __m512 low = products<half>(q, keys, next, dim);
        return folded<half>(low, products<half>(q, keys + half * dim, next ? next + half * dim : nullptr, dim));
    }
}

// Like `weigh`, for values in page order; `count` may be odd.
template <int rows, int blocks>
inline void weigh_pages(const bf16 (*weights)[BLOCK], const bf16* const* values, const bf16* const* next, int64_t count,
                        const __m512* shrink, float* sums, int64_t dim) {
    const __m512i low = _mm512_set_epi16(47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4,
                                         35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = low + _mm512_set1_epi16(16);
    __m512 total[rows][blocks];
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) total[r][b] = _mm512_loadu_ps(sums + r * dim + 16 * b) * shrink[r];
    for (int64_t key = 0; key < count; key += 2) {
        const bf16* at = values[key / PAGE] + key % PAGE * dim;
        const bf16* ahead = next[key / PAGE] + key % PAGE * dim;
        for (int b = 0; b < blocks; b += 2) {
            const __m512i first = _mm512_loadu_si512(at + 16 * b);
            const __m512i second = key + 1 < count ? _mm512_loadu_si512(at + dim + 16 * b) : _mm512_setzero_si512();
            _mm_prefetch(reinterpret_cast<const char*>(ahead + 16 * b), _MM_HINT_T1);
            _mm_prefetch(reinterpret_cast<const char*>(ahead + dim + 16 * b), _MM_HINT_T1);
            const __m512bh even = (__m512bh)_mm512_permutex2var_epi16(first, low, second);
            const __m512bh odd = (__m512bh)_mm512_permutex2var_epi16(first, high, second);
            for (int r = 0; r < rows; r++) {
                const __m512bh weight = pair_of(&weights[r][key]);
                total[r][b] = _mm512_dpbf16_ps(total[r][b], even, weight);
                total[r][b + 1] = _mm512_dpbf16_ps(total[r][b + 1], odd, weight);
            }
        }
    }
    for (int r = 0; r < rows; r++)
        for (int b = 0; b < blocks; b++) _mm512_storeu_ps(sums + r * dim + 16 * b, total[r][b]);
}

// Attention of one token's rows over keys [key, end), without reordering.
template <int rows>
void meet_pages(const Task& task, Scratch& s, const bf16* const* keys, const bf16* const* values, const bf16* const* next_keys,
                const bf16* const* next_values, int64_t key, int64_t end) {
    __m512 score[rows][VECTORS];
    for (int v = 0; v < VECTORS; v++)
        for (int r = 0; r < rows; r++)
            score[r][v] = key + v * PAGE >= end ? _mm512_set1_ps(-INFINITY)
                                                : products<PAGE>(&s.q[r * task.dim], keys[v], r ? nullptr : next_keys[v], task.dim);
    alignas(64) bf16 weights[rows][BLOCK];
    __m512 shrink[rows];
    const bool masked = end - key < BLOCK || (task.window > 0 && key < s.position[0] + 1 - task.window);
    weights_of<rows, VECTORS>(task, s, 0, key, masked, score, weights, shrink);
    int64_t d = 0;
    const bf16 *value[VECTORS], *next[VECTORS];
    for (; d < task.dim; d += 64) {
        for (int v = 0; v < VECTORS; v++) value[v] = values[v] + d, next[v] = next_values[v] + d;
        if (d + 64 <= task.dim)
            weigh_pages<rows, 4>(weights, value, next, end - key, shrink, s.sums.data() + d, task.dim);
        else
            weigh_pages<rows, 2>(weights, value, next, end - key, shrink, s.sums.data() + d, task.dim);
    }
}

template <int rows>
void meet_pages_any(int64_t count, const Task& task, Scratch& s, const bf16* const* keys, const bf16* const* values,
                    const bf16* const* next_keys, const bf16* const* next_values, int64_t key, int64_t end) {
    if constexpr (rows > 0) {
        if (count == rows) return meet_pages<rows>(task, s, keys, values, next_keys, next_values, key, end);
        meet_pages_any<rows - 1>(count, task, s, keys, values, next_keys, next_values, key, end);
    }
}

// Like `attend_few`, with a format.
void attend_few_codes(const Task& task, const Item& item, const Item& after, const Pages& pages, Scratch& s, int64_t rows) {
    const int64_t bytes = code_bytes(pages.format, task.dim), scales = num_scales(pages.format, task.dim);
    const bf16* value_tile = s.values_of(pages);
    for (int64_t key = item.from; key < item.to; key += BLOCK) {
        const int64_t end = std::min(item.to, key + BLOCK);
        const bf16 *keys[VECTORS], *values[VECTORS];
        for (int i = 0; i < VECTORS; i++) {
            const int64_t at = key + i * PAGE, other = after.from + i * PAGE;
            if (at < end) expand_lump(pages, place(task, item, at), task.dim, end - at, i, s);
            keys[i] = &s.key_tile[i * PAGE * task.dim], values[i] = &value_tile[i * PAGE * task.dim];
            const bool is_last = key + BLOCK >= item.to;
            if (is_last ? other >= after.to : at + BLOCK >= item.to) continue;
            const int64_t next = is_last ? place(task, after, other) : place(task, item, at + BLOCK);
            PREFETCH(pages.k + next * bytes, PAGE * bytes);
            PREFETCH(pages.v + next * bytes, PAGE * bytes);
            PREFETCH(pages.k_scales + next * scales, PAGE * scales * sizeof(bf16));
            PREFETCH(pages.v_scales + next * scales, PAGE * scales * sizeof(bf16));
        }
        meet_pages_any<STRIP>(rows, task, s, keys, values, keys, values, key, end);
    }
}

// Attention of one token's rows over keys [key, end), in int4.
template <int rows>
void meet_codes(const Task& task, Scratch& s, const Lump* lumps, int64_t key, int64_t end) {
    const int64_t dim = task.dim, groups = dim / GROUP_DIMS, bytes = dim / 2, count = (end - key + PAGE - 1) / PAGE;
    __m512 score[rows][VECTORS], shrink[rows];
    for (int v = 0; v < VECTORS; v++) {
        for (int r = 0; r < rows; r++) score[r][v] = _mm512_set1_ps(v < count ? 0.0f : -INFINITY);
        if (v < count) add_scores<rows>(s.arranged.data(), s.query_sums.data(), dim, lumps[v], &score[0][v], VECTORS);
    }
    const bool masked = end - key < BLOCK || (task.window > 0 && key < s.position[0] + 1 - task.window);
    soften<rows, VECTORS>(task, s, 0, key, masked, score, shrink);
    for (int64_t group = 0; group < groups; group++) {
        bf16* weights = &s.weights[group * rows * BLOCK];
        for (int r = 0; r < rows; r++) s.offsets[r * groups + group] *= shrink[r];
        for (int v = 0; v < count; v++) {
            const __mmask16 known = static_cast<__mmask16>((1u << std::min<int64_t>(PAGE, end - key - v * PAGE)) - 1);
            const LumpScales by = scales_of(lumps[v].v_scales, groups, group);
            const __m512 scale = _mm512_maskz_mov_ps(known, by.scale), offset = _mm512_maskz_mov_ps(known, by.offset);
            for (int r = 0; r < rows; r++) {
                narrowed((vf)(score[r][v] * scale), weights + r * BLOCK + v * PAGE);
                s.offsets[r * groups + group] += score[r][v] * offset;
            }
        }
    }
    for (int64_t at = 0; at < bytes; at += SLICE) {
        const bf16* low = &s.weights[at / GROUP_DIMS * rows * BLOCK];
        const bf16* high = &s.weights[(dim / 2 + at) / GROUP_DIMS * rows * BLOCK];
        float* sums = s.sums.data() + 2 * at;
        if (groups == 1)
            weigh_codes<rows, true>(low, high, BLOCK, lumps, at, bytes, end - key, shrink, sums, dim);
        else
            weigh_codes<rows, false>(low, high, BLOCK, lumps, at, bytes, end - key, shrink, sums, dim);
    }
}

template <int rows>
void meet_codes_any(int64_t count, const Task& task, Scratch& s, const Lump* lumps, int64_t key, int64_t end) {
    if constexpr (rows > 0) {
        if (count == rows) return meet_codes<rows>(task, s, lumps, key, end);
        meet_codes_any<rows - 1>(count, task, s, lumps, key, end);
    }
}

// Like `attend_few`, in int4 with groups of `GROUP_DIMS`: codes are read in place.
void attend_few_int4(const Task& task, const Item& item, const Item& after, const Pages& pages, Scratch& s, int64_t rows) {
    const int64_t dim = task.dim, groups = dim / GROUP_DIMS, bytes = dim / 2, scales = 2 * groups;
    s.arranged.resize(2 * rows * dim);
    s.weights.resize(groups * rows * BLOCK);
    s.query_sums.resize(rows * groups);
    s.ordered.resize(dim);
    s.offsets.assign(rows * groups, _mm512_setzero_ps());
    for (int64_t row = 0; row < rows; row++)
        arrange_query(&s.q[row * dim], dim, &s.arranged[2 * row * dim], &s.query_sums[row * groups]);
    const auto lump_at = [&](const Item& of, int64_t token) {
        const int64_t slot = place(task, of, token), scale = slot * scales;
        return Lump{pages.k + slot * bytes, pages.v + slot * bytes, pages.k_scales + scale, pages.v_scales + scale};
    };
    for (int64_t key = item.from; key < item.to; key += BLOCK) {
        const int64_t end = std::min(item.to, key + BLOCK);
        Lump lumps[VECTORS];
        for (int i = 0; i < VECTORS; i++) {
            const int64_t at = key + i * PAGE, other = after.from + i * PAGE;
            if (at < end) lumps[i] = lump_at(item, at);
            const bool is_last = key + BLOCK >= item.to;
            if (is_last ? other >= after.to : at + BLOCK >= item.to) continue;
            const int64_t next = is_last ? place(task, after, other) : place(task, item, at + BLOCK);
            PREFETCH(pages.k + next * bytes, PAGE * bytes);
            PREFETCH(pages.v + next * bytes, PAGE * bytes);
            PREFETCH(pages.k_scales + next * scales, PAGE * scales * sizeof(bf16));
            PREFETCH(pages.v_scales + next * scales, PAGE * scales * sizeof(bf16));
        }
        meet_codes_any<STRIP>(rows, task, s, lumps, key, end);
    }
    std::vector<float> offsets(groups);
    for (int64_t row = 0; row < rows; row++) {
        for (int64_t group = 0; group < groups; group++) offsets[group] = _mm512_reduce_add_ps(s.offsets[row * groups + group]);
        arrange_sums(&s.sums[row * dim], offsets.data(), dim, s.ordered.data());
    }
}

// Attention of one token. Prefetches the first block of `after`, a later item.
void attend_few(const Task& task, const Item& item, const Item& after, const Pages& pages, Scratch& s, int64_t rows) {
    if (pages.format == INT4 && task.dim % GROUP_DIMS == 0) return attend_few_int4(task, item, after, pages, s, rows);
    if (pages.format != PLAIN) return attend_few_codes(task, item, after, pages, s, rows);
    const auto *k = reinterpret_cast<const bf16*>(pages.k), *v = reinterpret_cast<const bf16*>(pages.v);
    for (int64_t key = item.from; key < item.to; key += BLOCK) {
        const int64_t end = std::min(item.to, key + BLOCK);
        const bf16 *keys[VECTORS], *values[VECTORS], *next_keys[VECTORS], *next_values[VECTORS];
        for (int i = 0; i < VECTORS; i++) {
            const int64_t at = key + i * PAGE, here = place(task, item, at < end ? at : key) * task.dim;
            const int64_t other = after.from + i * PAGE;
            const int64_t next = key + BLOCK < item.to ? (at + BLOCK < item.to ? place(task, item, at + BLOCK) * task.dim : here)
                                                       : (other < after.to ? place(task, after, other) * task.dim : here);
            keys[i] = k + here, values[i] = v + here, next_keys[i] = k + next, next_values[i] = v + next;
        }
        meet_pages_any<STRIP>(rows, task, s, keys, values, next_keys, next_values, key, end);
    }
}

void attend_many(const Task& task, const Item& item, const Pages& pages, Scratch& s, int64_t rows) {
    const auto *k = reinterpret_cast<const bf16*>(pages.k), *v = reinterpret_cast<const bf16*>(pages.v);
    for (int64_t key = item.from; key < item.to; key += BLOCK) {
        const int64_t end = std::min(item.to, key + BLOCK);
        for (int64_t at = key; at < end; at += PAGE) {
            const int64_t slot = place(task, item, at), from = (at - key) * task.dim;
            if (pages.format != PLAIN) expand_lump(pages, slot, task.dim, item.to - at, static_cast<int>((at - key) / PAGE), s);
            pack_keys(pages.format == PLAIN ? k + slot * task.dim : &s.key_tile[from], task.dim, &s.keys[from / 2]);
            const bf16* values = pages.format == PLAIN ? v + slot * task.dim : s.values_of(pages) + from;
            pack_values(values, task.dim, item.to - at, &s.values[(at - key) / 2 * 16]);
        }
        meet_block(task, s, rows, key, end);
    }
}

void attend(const Task& task, const Item& item, const Item& after, const bf16* q, const Pages& pages, Scratch& s) {
    const int64_t *lines = item.run->lines, dim = task.dim, group = task.group(), rows = item.count * group;
    const int64_t start = item.run->start + item.first, slot = item.run->length - item.run->size + item.first;
    s.reserve(rows, dim);
    s.base = lines ? item.run->base : NO_TREE;
    s.has_scales = pages.format == INT8 || pages.format == FP8;
    for (int64_t row = 0; row < rows; row++) {
        const bf16* from = q + (start + row / group) * task.q_stride + (item.head * group + row % group) * dim;
        memcpy(&s.q[row * dim], from, dim * sizeof(bf16));
        s.slot[row] = slot + row / group;
        s.position[row] = lines ? lines[2 * (item.first + row / group)] : s.slot[row];
        s.line[row] = lines ? lines[2 * (item.first + row / group) + 1] : 0;
        s.top[row] = LOWEST;
        s.mass[row] = _mm512_setzero_ps();
    }
    std::fill(s.sums.begin(), s.sums.end(), 0.0f);
    if (item.count == 1 && rows <= STRIP && !lines && !task.fixed)
        attend_few(task, item, after, pages, s, rows);
    else
        attend_many(task, item, pages, s, rows);
}

inline void write(const float* sums, float mass, int64_t dim, bf16* out) {
    for (int64_t d = 0; d < dim; d += 16)
        _mm256_storeu_si256(reinterpret_cast<__m256i*>(out + d), (__m256i)_mm512_cvtneps_pbh(_mm512_loadu_ps(sums + d) / mass));
}

// Stores the partial result of an item: per query head the sums, the maximum logit, the sum of weights.
void keep(const Scratch& s, int64_t group, int64_t dim, float* part) {
    for (int64_t g = 0; g < group; g++, part += dim + 2) {
        memcpy(part, &s.sums[g * dim], dim * 4);
        part[dim] = s.top[g];
        part[dim + 1] = _mm512_reduce_add_ps(s.mass[g]);
    }
}

void merge(const float* parts, int64_t splits, int64_t group, int64_t dim, bf16* out) {
    std::vector<float> sums(dim);
    const int64_t step = group * (dim + 2);
    for (int64_t g = 0; g < group; g++, parts += dim + 2, out += dim) {
        float top = LOWEST, mass = 0;
        for (int64_t i = 0; i < splits; i++) top = std::max(top, parts[i * step + dim]);
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t i = 0; i < splits; i++) {
            const float share = std::exp2(parts[i * step + dim] - top);
            mass += share * parts[i * step + dim + 1];
            for (int64_t d = 0; d < dim; d++) sums[d] += share * parts[i * step + d];
        }
        write(sums.data(), mass, dim, out);
    }
}

// Items of a run, longest first.
void add_items(const Task& task, const Run& run, std::vector<Item>& items) {
    const int64_t tile_size = std::clamp<int64_t>(TILE_NUMBERS / (task.group() * task.dim), 1, TILE);
    const int64_t tiles = (run.size + tile_size - 1) / tile_size, before = run.length - run.size;
    for (int64_t tile = tiles - 1; tile >= 0; tile--) {
        const int64_t first = tile * tile_size, count = std::min(tile_size, run.size - first), to = before + first + count;
        const int64_t lowest = run.lines ? std::min(before + first, run.base) : before + first;
        const int64_t from = task.window > 0 ? std::max<int64_t>(0, lowest + 1 - task.window) / BLOCK * BLOCK : 0;
        const int64_t splits = run.size > 1 || run.lines || task.fixed ? 1 : (to - from + SPLIT - 1) / SPLIT;
        for (int64_t head = 0; head < task.kv_heads; head++)
            for (int64_t i = 0; i < splits; i++) {
                const int64_t at = from + i * SPLIT, end = splits > 1 ? std::min(to, at + SPLIT) : to;
                items.push_back({&run, head, first, count, at, end, splits > 1 ? splits : 0});
            }
    }
}

void attend_all(const Task& task, const Run* runs, int64_t num_runs, const bf16* q, const Pages& pages, bf16* out) {
    const int64_t dim = task.dim, group = task.group(), part = group * (dim + 2);
    std::vector<Item> items;
    for (int64_t i = num_runs - 1; i >= 0; i--) add_items(task, runs[i], items);
    const int64_t count = static_cast<int64_t>(items.size());
    const bool merges = std::any_of(items.begin(), items.end(), [](const Item& item) { return item.merged > 0; });
    std::vector<float> parts(merges ? count * part : 0);
    const auto place_of = [&](const Item& item, int64_t row) {
        return out + ((item.run->start + item.first + row / group) * task.heads + item.head * group + row % group) * dim;
    };
#pragma omp parallel if (count > 1)
    {
        static thread_local Scratch scratch;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) {
            const Item& item = items[i];
            attend(task, item, items[std::min(i + omp_get_num_threads(), count - 1)], q, pages, scratch);
            if (item.merged)
                keep(scratch, group, dim, &parts[i * part]);
            else
                for (int64_t row = 0; row < item.count * group; row++)
                    write(&scratch.sums[row * dim], _mm512_reduce_add_ps(scratch.mass[row]), dim, place_of(item, row));
        }
    }
    for (int64_t i = 0; i < count; i += std::max<int64_t>(1, items[i].merged))
        if (items[i].merged) merge(&parts[i * part], items[i].merged, group, dim, place_of(items[i], 0));
}

}  // namespace
#endif

extern "C" {

int64_t phalanx_attends() {
#if defined(__AVX512BF16__)
    return 1;
#else
    return 0;
#endif
}

// Requires phalanx_attends(). q: [tokens, heads, dim], bf16, with q_stride between rows. pages: [pages, kv_heads, page, ...].
// runs: [num_runs, 6]: start, size, length, page table, lines and base of a tree. out: [tokens, heads * dim]. sizes: heads,
// kv_heads, dim (a multiple of 32), page (a multiple of 16), q_stride, window (0: all tokens; else larger than any tree),
// batch invariance. softcap 0: disabled.
void phalanx_attend(const void* q, const Pages* pages, const void* runs, int64_t num_runs, void* out, const int64_t* sizes,
                    double scale, double softcap) {
#if defined(__AVX512BF16__)
    const Task task{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
                    static_cast<float>(softcap > 0 ? scale : scale * LOG2_E), static_cast<float>(softcap)};
    attend_all(task, static_cast<const Run*>(runs), num_runs, static_cast<const bf16*>(q), *pages,
               static_cast<bf16*>(out));
#endif
}
}
