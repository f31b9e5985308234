// Float vectors of the processor's width, by the compiler's vector types: AVX-512, AVX2 or SSE, by -march.
//
// A 32-bit word holds two bf16 numbers: the even one in its low half, the odd one in its high half.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstring>
#if defined(__x86_64__)
#include <immintrin.h>
#endif

#if defined(__AVX512F__)
constexpr int W = 16;
#elif defined(__AVX__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(W * 4)));
typedef int32_t vi __attribute__((vector_size(W * 4)));
typedef uint32_t vu __attribute__((vector_size(W * 4)));
struct bf16 { uint16_t bits; };

inline float widen(float x) { return x; }
inline float widen(bf16 x) {
    uint32_t word = static_cast<uint32_t>(x.bits) << 16;
    float out;
    memcpy(&out, &word, 4);
    return out;
}
inline void narrow(float x, float* out) { *out = x; }
// Rounds to nearest, ties to even; preserves NaN.
inline void narrow(float x, bf16* out) {
    uint32_t word;
    memcpy(&word, &x, 4);
    out->bits = std::isnan(x) ? 0x7fc0 : static_cast<uint16_t>((word + 0x7fff + ((word >> 16) & 1)) >> 16);
}

inline vf load(const float* from) {
    vf out;
    memcpy(&out, from, sizeof out);
    return out;
}
inline vu load_words(const void* from) {
    vu out;
    memcpy(&out, from, sizeof out);
    return out;
}
inline void store(float* to, vf x) { memcpy(to, &x, sizeof x); }

// Converts W numbers to floats and back, like the scalar functions.
inline vf widened(const float* from) { return load(from); }
inline vf widened(const bf16* from) {
#if defined(__AVX512F__)
    return (vf)_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from))), 16);
#else
    typedef uint16_t vs __attribute__((vector_size(W * 2)));
    vs words;
    memcpy(&words, from, sizeof words);
    return (vf)(__builtin_convertvector(words, vu) << 16);
#endif
}
inline void narrowed(vf x, float* to) { store(to, x); }
inline void narrowed(vf x, bf16* to) {
#if defined(__AVX512BF16__)
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), (__m256i)_mm512_cvtneps_pbh((__m512)x));
#else
    typedef uint16_t vs __attribute__((vector_size(W * 2)));
    const vu word = (vu)x, rounded = (word + 0x7fff + ((word >> 16) & 1)) >> 16;
    const vs words = __builtin_convertvector(x == x ? rounded : rounded * 0 + 0x7fc0, vs);
    memcpy(to, &words, sizeof words);
#endif
}
// W numbers as words; compilers convert such vectors one number at a time.
inline vu words_of(const uint8_t* from) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(from)));
#else
    vu found;
    for (int i = 0; i < W; i++) found[i] = from[i];
    return found;
#endif
}
inline vu words_of(const uint16_t* from) {
#if defined(__AVX512F__)
    return (vu)_mm512_cvtepu16_epi32(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__AVX2__)
    return (vu)_mm256_cvtepu16_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    vu found;
    for (int i = 0; i < W; i++) found[i] = from[i];
    return found;
#endif
}
// Half numbers as floats; exact, also for subnormals and what is no number.
inline vf halves_of(const uint16_t* from) {
#if defined(__AVX512F__)
    return (vf)_mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(from)));
#elif defined(__F16C__)
    return (vf)_mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from)));
#else
    const vu bits = words_of(from);
    const vf magnitude = (vf)((bits & 0x7fff) << 13) * 0x1p112f;
    const vu top = (vu)(magnitude >= 65536.0f) & 0x7f800000;  // of infinities, and of NaN with its other bits
    return (vf)((vu)magnitude | top | (bits & 0x8000) << 16);
#endif
}
inline vf even(vu words) { return (vf)(words << 16); }
inline vf odd(vu words) { return (vf)(words & 0xffff0000u); }
inline vf all(float x) { return x - vf{}; }
inline vf larger(vf a, vf b) { return a > b ? a : b; }

template <int from>
inline vf folded(vf a, vf b) {
    // Adds the halves of each group of `2 * from` lanes of a, then of b.
    vi low, high;
    for (int i = 0; i < W; i++) {
        int group = i / from, lane = i % from;
        low[i] = group * 2 * from + lane;
        high[i] = low[i] + from;
    }
    return __builtin_shuffle(a, b, low) + __builtin_shuffle(a, b, high);
}

// Lane i of the result is the sum of the lanes of rows[i]. Overwrites the rows.
inline vf row_sums(vf* rows) {
    int count = W;
#if defined(__AVX512F__)
    for (int i = 0; i < 8; i++) rows[i] = folded<8>(rows[2 * i], rows[2 * i + 1]);
    count = 8;
#endif
#if defined(__AVX__)
    for (int i = 0; i < count / 2; i++) rows[i] = folded<4>(rows[2 * i], rows[2 * i + 1]);
    count /= 2;
#endif
    for (int i = 0; i < count / 2; i++) rows[i] = folded<2>(rows[2 * i], rows[2 * i + 1]);
    return folded<1>(rows[0], rows[1]);
}

inline float sum(vf x) {
    float total = 0;
    for (int i = 0; i < W; i++) total += x[i];
    return total;
}
inline float largest(vf x) {
    float top = x[0];
    for (int i = 1; i < W; i++) top = x[i] > top ? x[i] : top;
    return top;
}

// e^x within 2 units in the last place; 0 for large negative x.
inline vf exponential(vf x) {
    vf kept = larger(x, all(-87.3f));
    kept = kept < 88.0f ? kept : all(88.0f);
    vf whole = kept * 1.44269504088896341f + 12582912.0f;
    vi power = (vi)whole - 0x4b400000;
    whole -= 12582912.0f;
    vf rest = kept - whole * 0.693359375f + whole * 2.12194440e-4f;
    vf poly = all(1.9875691500e-4f);
    poly = poly * rest + 1.3981999507e-3f;
    poly = poly * rest + 8.3334519073e-3f;
    poly = poly * rest + 4.1665795894e-2f;
    poly = poly * rest + 1.6666665459e-1f;
    poly = poly * rest + 5.0000001201e-1f;
    poly = poly * rest * rest + rest + 1.0f;
    vf out = poly * (vf)((power + 127) << 23);
    return x < -87.3f ? vf{} : out;
}

inline vf silu(vf x) { return x / (1.0f + exponential(-x)); }
