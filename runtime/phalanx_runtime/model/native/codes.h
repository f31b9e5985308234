// Codes of compressed pages. Formats, and their reference implementation: model/attention/page_format.py.
#pragma once
#include <algorithm>

#include "vectors.h"

enum Format : int64_t { PLAIN = 0, INT8 = 1, FP8 = 2, INT4 = 3 };

// Layout of the caller. With a format, k and v are codes, and each token and head has num_scales numbers. Keys of latents are the
// values too.
struct Pages {
    int64_t format;
    uint8_t *k, *v;
    bf16 *k_scales, *v_scales;
    bool is_latent() const { return k == v; }
};

constexpr int64_t GROUP_DIMS = 64;
constexpr float INT8_MAX_CODE = 127, FP8_MAX_CODE = 7.875f, INT4_MAX_CODE = 15;

inline int64_t num_groups(int64_t dim) { return (dim + GROUP_DIMS - 1) / GROUP_DIMS; }
inline int64_t code_bytes(int64_t format, int64_t dim) { return format == INT4 ? dim / 2 : dim; }
inline int64_t num_scales(int64_t format, int64_t dim) { return format == INT4 ? 2 * num_groups(dim) : 1; }

inline float bits_to_float(uint32_t bits) {
    float out;
    memcpy(&out, &bits, 4);
    return out;
}
inline uint32_t float_to_bits(float x) {
    uint32_t bits;
    memcpy(&bits, &x, 4);
    return bits;
}
// fp8 is e2m5, all codes finite. Exact, also for subnormals: the exponent's bias differs by 126.
inline float from_fp8(uint8_t code) { return bits_to_float((code & 0x7fu) << 18 | (code & 0x80u) << 24) * 0x1p126f; }
// Rounds |x| <= 7.875 to nearest, ties to even.
inline uint8_t to_fp8(float x) {
    const uint32_t bits = float_to_bits(x), sign = bits >> 24 & 0x80, magnitude = bits & 0x7fffffff;
    const uint32_t normal = ((magnitude + 0x1ffff + (magnitude >> 18 & 1)) >> 18) - (126 << 5);
    const uint32_t subnormal = float_to_bits(bits_to_float(magnitude) * 32.0f + 12582912.0f) & 0x3f;
    return static_cast<uint8_t>(sign | (magnitude < 0x3f800000 ? subnormal : normal));  // below 1
}
inline float rounded(float x) { return x + 12582912.0f - 12582912.0f; }  // |x| < 2^22, ties to even

// Calls work(first, last, shift, group) for each range of dimensions with one group and one half of the bytes.
template <typename Work>
inline void each_int4_range(int64_t dim, Work work) {
    const int64_t size = dim / num_groups(dim), half = dim / 2;
    for (int64_t first = 0; first < dim;) {
        const int64_t last = std::min((first / size + 1) * size, first < half ? half : dim);
        work(first, last, first < half ? 0 : 4, first / size);
        first = last;
    }
}

// The numbers of a token and head.
template <typename T>
inline void expand(int64_t format, const uint8_t* codes, const bf16* scales, int64_t dim, T* out) {
    if (format == INT8) {
        const float scale = widen(scales[0]);
        const auto* numbers = reinterpret_cast<const int8_t*>(codes);
        for (int64_t d = 0; d < dim; d++) narrow(static_cast<float>(numbers[d]) * scale, out + d);
    } else if (format == FP8) {
        const float scale = widen(scales[0]);
        for (int64_t d = 0; d < dim; d++) narrow(from_fp8(codes[d]) * scale, out + d);
    } else {
        each_int4_range(dim, [&](int64_t first, int64_t last, int shift, int64_t group) {
            const float scale = widen(scales[group]), offset = widen(scales[num_groups(dim) + group]);
            const uint8_t* from = codes + first - (shift ? dim / 2 : 0);
            for (int64_t d = 0; d < last - first; d++)
                narrow(static_cast<float>(from[d] >> shift & 15) * scale + offset, out + first + d);
        });
    }
}

inline float divisor(bf16 scale) { return scale.bits ? widen(scale) : 1.0f; }

// The largest magnitude, NaN if a number is NaN or infinite. Bits without the sign are in the order of their numbers.
inline float largest_magnitude(const float* x, int64_t size) {
    uint32_t top = 0;
    for (int64_t d = 0; d < size; d++) top = std::max(top, float_to_bits(x[d]) & 0x7fffffff);
    return top < 0x7f800000 ? bits_to_float(top) : NAN;
}
// NaN becomes `low`.
inline float clamped(float x, float low, float high) { return std::min(high, std::max(low, x)); }

// The smallest and the largest number, NaN if a number is NaN or infinite.
inline void find_range(const float* x, int64_t size, float& low, float& high) {
    const bool is_finite = !std::isnan(largest_magnitude(x, size));
    low = is_finite ? *std::min_element(x, x + size) : NAN;
    high = *std::max_element(x, x + size);
}

// Scale and offset of the int4 codes of such a range.
inline void range_scales(float low, float high, bf16& scale, bf16& offset) {
    const auto bits = static_cast<int32_t>(float_to_bits(low));
    offset.bits = static_cast<uint16_t>((bits < 0 ? bits + 0xffff : bits) >> 16);  // rounded down
    narrow((high - widen(offset)) / INT4_MAX_CODE, &scale);
}

// Codes and scales of a token and head. Numbers that share a scale with NaN or infinity are not read back as finite ones.
inline void encode(int64_t format, const float* x, int64_t dim, uint8_t* codes, bf16* scales) {
    if (format == INT4) {
        std::fill(codes, codes + dim / 2, uint8_t{0});
        each_int4_range(dim, [&](int64_t first, int64_t last, int shift, int64_t group) {
            const int64_t size = dim / num_groups(dim), start = group * size;
            float lowest, highest;
            find_range(x + start, size, lowest, highest);
            bf16& offset = scales[num_groups(dim) + group];
            range_scales(lowest, highest, scales[group], offset);
            const float low = widen(offset), step = divisor(scales[group]);
            uint8_t* to = codes + first - (shift ? dim / 2 : 0);
            for (int64_t d = 0; d < last - first; d++) {
                const float code = rounded(clamped((x[first + d] - low) / step, 0.0f, INT4_MAX_CODE));
                to[d] |= static_cast<uint8_t>(static_cast<int32_t>(code) << shift);
            }
        });
        return;
    }
    const float limit = format == INT8 ? INT8_MAX_CODE : FP8_MAX_CODE;
    narrow(largest_magnitude(x, dim) / limit, scales);
    const float step = divisor(scales[0]);
    if (format == INT8)
        for (int64_t d = 0; d < dim; d++) {
            const float code = rounded(clamped(x[d] / step, -limit, limit));
            codes[d] = static_cast<uint8_t>(static_cast<int32_t>(code));
        }
    else
        for (int64_t d = 0; d < dim; d++) codes[d] = to_fp8(clamped(x[d] / step, -limit, limit));
}
