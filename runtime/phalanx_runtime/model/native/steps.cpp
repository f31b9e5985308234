// Operations between linears, in one pass each: norm, gate, rotation in place, writes of keys and values to pages.
#include <vector>

#include "codes.h"

namespace {

constexpr int64_t FEW = 8192;  // below this size, one thread is faster than two

template <typename T, typename N>
void norm(const T* x, const N* weight, T* out, int64_t rows, int64_t size, int64_t x_stride, float eps) {
#pragma omp parallel for if (rows * size > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const T* from = x + row * x_stride;
        T* to = out + row * size;
        vf squares{};
        int64_t i = 0;
        for (; i + W <= size; i += W) {
            const vf x = widened(from + i);
            squares += x * x;
        }
        float total = 0;
        for (; i < size; i++) total += widen(from[i]) * widen(from[i]);
        const float scale = 1.0f / std::sqrt((total + sum(squares)) / size + eps);
        for (i = 0; i + W <= size; i += W) narrowed(widened(from + i) * scale * widened(weight + i), to + i);
        for (; i < size; i++) narrow(widen(from[i]) * scale * widen(weight[i]), to + i);
    }
}

// Normalises each head of x, [rows, heads, size], in place.
template <typename T, typename N>
void norm_heads(T* x, const N* weight, int64_t rows, int64_t heads, int64_t size, int64_t x_stride, float eps) {
#pragma omp parallel for if (rows * heads * size > FEW)
    for (int64_t row = 0; row < rows; row++) norm(x + row * x_stride, weight, x + row * x_stride, heads, size, size, eps);
}

template <typename T>
void rotate(T* x, const T* cos, const T* sin, int64_t rows, int64_t heads, int64_t dim, int64_t turned, int64_t x_stride) {
    const int64_t half = turned / 2;
#pragma omp parallel for if (rows * heads * dim > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const T *c = cos + row * turned, *s = sin + row * turned;
        for (int64_t head = 0; head < heads; head++) {
            T *low = x + row * x_stride + head * dim, *high = low + half;
            int64_t i = 0;
            for (; i + W <= half; i += W) {
                const vf a = widened(low + i), b = widened(high + i);
                narrowed(a * widened(c + i) + b * widened(s + i), low + i);
                narrowed(b * widened(c + half + i) + a * widened(s + half + i), high + i);
            }
            for (; i < half; i++) {
                const float a = widen(low[i]), b = widen(high[i]);
                narrow(a * widen(c[i]) + b * widen(s[i]), low + i);
                narrow(b * widen(c[half + i]) + a * widen(s[half + i]), high + i);
            }
        }
    }
}

template <typename T>
void gate(const T* x, T* out, int64_t rows, int64_t outputs, int64_t x_stride) {
    constexpr int64_t block = 16;
#pragma omp parallel for if (rows * outputs > FEW)
    for (int64_t row = 0; row < rows; row++) {
        const T* from = x + row * x_stride;
        T* to = out + row * outputs;
        for (int64_t i = 0; i < outputs; i += W) {
            const T* gates = from + i / block * 2 * block + i % block;
            const vf gated = silu(widened(gates)) * widened(gates + block);
            if (i + W <= outputs)
                narrowed(gated, to + i);
            else
                for (int64_t j = 0; i + j < outputs; j++) narrow(gated[j], to + i + j);
        }
    }
}

template <typename T>
void encode_all(const T* k, const T* v, const Pages& pages, const int64_t* slots, const int64_t* sizes) {
    const int64_t heads = sizes[1], dim = sizes[2], bytes = code_bytes(pages.format, dim), scales = num_scales(pages.format, dim);
#pragma omp parallel if (sizes[0] * heads * dim > FEW)
    {
        std::vector<float> wide(dim);
#pragma omp for
        for (int64_t row = 0; row < sizes[0]; row++)
            for (int64_t head = 0; head < heads; head++) {
                const int64_t to = slots[row * heads + head];
                const T* from[] = {k + row * sizes[3] + head * dim, v + row * sizes[4] + head * dim};
                uint8_t* codes[] = {pages.k + to * bytes, pages.v + to * bytes};
                bf16* factors[] = {pages.k_scales + to * scales, pages.v_scales + to * scales};
                for (int part = 0; part < 2; part++) {
                    for (int64_t d = 0; d < dim; d++) wide[d] = widen(from[part][d]);
                    encode(pages.format, wide.data(), dim, codes[part], factors[part]);
                }
            }
    }
}

// Fast Walsh-Hadamard transform of blocks of `size` numbers.
template <typename T>
void hadamard(const T* x, T* out, int64_t rows, int64_t heads, int64_t dim, int64_t size, int64_t x_stride) {
    const float scale = 1.0f / std::sqrt(static_cast<float>(size));
#pragma omp parallel if (rows * heads * dim > FEW)
    {
        std::vector<float> wide(dim);
#pragma omp for
        for (int64_t row = 0; row < rows; row++)
            for (int64_t head = 0; head < heads; head++) {
                const T* from = x + row * x_stride + head * dim;
                T* to = out + (row * heads + head) * dim;
                for (int64_t d = 0; d < dim; d++) wide[d] = widen(from[d]) * scale;
                for (int64_t half = 1; half < size; half *= 2)
                    for (int64_t block = 0; block < dim; block += 2 * half) {
                        float *low = &wide[block], *high = low + half;
                        for (int64_t i = 0; i < half; i++) {
                            const float a = low[i], b = high[i];
                            low[i] = a + b;
                            high[i] = a - b;
                        }
                    }
                for (int64_t d = 0; d < dim; d++) narrow(wide[d], to + d);
            }
    }
}

}  // namespace

extern "C" {

// out[row] = x[row] / sqrt(mean(x[row]^2) + eps) * weight. sizes: rows, size, stride of x.
void phalanx_norm(int64_t is_bf16, int64_t weight_is_bf16, const void* x, const void* weight, void* out, const int64_t* sizes, double eps) {
    const auto small = static_cast<float>(eps);
    if (is_bf16 && weight_is_bf16)
        norm(static_cast<const bf16*>(x), static_cast<const bf16*>(weight), static_cast<bf16*>(out), sizes[0], sizes[1], sizes[2], small);
    else if (is_bf16)
        norm(static_cast<const bf16*>(x), static_cast<const float*>(weight), static_cast<bf16*>(out), sizes[0], sizes[1], sizes[2], small);
    else
        norm(static_cast<const float*>(x), static_cast<const float*>(weight), static_cast<float*>(out), sizes[0], sizes[1], sizes[2], small);
}

// The same for each head of x in place. sizes: rows, heads, size of a head, stride of x.
void phalanx_norm_heads(int64_t is_bf16, int64_t weight_is_bf16, void* x, const void* weight, const int64_t* sizes, double eps) {
    const auto small = static_cast<float>(eps);
    const auto run = [&](auto* heads, const auto* scale) { norm_heads(heads, scale, sizes[0], sizes[1], sizes[2], sizes[3], small); };
    if (is_bf16 && weight_is_bf16)
        run(static_cast<bf16*>(x), static_cast<const bf16*>(weight));
    else if (is_bf16)
        run(static_cast<bf16*>(x), static_cast<const float*>(weight));
    else
        run(static_cast<float*>(x), static_cast<const float*>(weight));
}

// out = silu(gate) * up from alternating blocks of 16 gates and ups. sizes: rows, outputs, stride of x. x and out: bf16 or float.
void phalanx_gate(int64_t is_bf16, const void* x, void* out, const int64_t* sizes) {
    if (is_bf16)
        gate(static_cast<const bf16*>(x), static_cast<bf16*>(out), sizes[0], sizes[1], sizes[2]);
    else
        gate(static_cast<const float*>(x), static_cast<float*>(out), sizes[0], sizes[1], sizes[2]);
}

// Rotates x, [rows, heads, dim], in place. cos and signed sin: [rows, rotated].
// sizes: rows, heads, dim, rotated, stride of x.
void phalanx_rotate(int64_t is_bf16, void* x, const void* cos, const void* sin, const int64_t* sizes) {
    if (is_bf16)
        rotate(static_cast<bf16*>(x), static_cast<const bf16*>(cos), static_cast<const bf16*>(sin), sizes[0], sizes[1], sizes[2],
               sizes[3], sizes[4]);
    else
        rotate(static_cast<float*>(x), static_cast<const float*>(cos), static_cast<const float*>(sin), sizes[0], sizes[1], sizes[2],
               sizes[3], sizes[4]);
}

// Writes codes and scales. k, v: [rows, kv_heads, dim] with strides. pages, slots: as [slots, ...].
// sizes: rows, kv_heads, dim, strides of k and v.
void phalanx_encode(int64_t is_bf16, const void* k, const void* v, const Pages* pages, const int64_t* slots, const int64_t* sizes) {
    if (is_bf16)
        encode_all(static_cast<const bf16*>(k), static_cast<const bf16*>(v), *pages, slots, sizes);
    else
        encode_all(static_cast<const float*>(k), static_cast<const float*>(v), *pages, slots, sizes);
}

// out = x times the Hadamard matrix of `size` numbers, [rows, heads, dim]. sizes: rows, heads, dim, size, stride of x.
void phalanx_hadamard(int64_t is_bf16, const void* x, void* out, const int64_t* sizes) {
    if (is_bf16)
        hadamard(static_cast<const bf16*>(x), static_cast<bf16*>(out), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]);
    else
        hadamard(static_cast<const float*>(x), static_cast<float*>(out), sizes[0], sizes[1], sizes[2], sizes[3], sizes[4]);
}

// k, v: [rows, kv_heads, dim] with strides. slots: [rows * kv_heads], rows of the pages as [slots, dim].
// sizes: rows, kv_heads, bytes per head, bytes between rows of k, and of v.
void phalanx_write(const char* k, const char* v, char* k_pages, char* v_pages, const int64_t* slots, const int64_t* sizes) {
    const int64_t heads = sizes[1], bytes = sizes[2];
#pragma omp parallel for if (sizes[0] * heads * bytes > 8 * FEW)
    for (int64_t row = 0; row < sizes[0]; row++)
        for (int64_t head = 0; head < heads; head++) {
            const int64_t to = slots[row * heads + head] * bytes;
            memcpy(k_pages + to, k + row * sizes[3] + head * bytes, bytes);
            memcpy(v_pages + to, v + row * sizes[4] + head * bytes, bytes);
        }
}
}
