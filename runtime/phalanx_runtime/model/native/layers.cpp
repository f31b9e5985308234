// All layers of a step in one call: the kernels of norms, linears, rotation, pages and attention in the order of the fused decoder.
//
// The structs have the layout of the caller, model/decoder/cpu.py. x and all buffers: bf16 or float.
#include "codes.h"

extern "C" {  // see their definitions
void phalanx_norm(int64_t, int64_t, const void* x, const void* weight, void* out, const int64_t* sizes, double eps);
void phalanx_norm_heads(int64_t, int64_t, void* x, const void* weight, const int64_t* sizes, double eps);
void phalanx_rotate(int64_t, void* x, const void* cos, const void* sin, const int64_t* sizes);
void phalanx_hadamard(int64_t, const void* x, void* out, const int64_t* sizes);
void phalanx_write(const char* k, const char* v, char* k_pages, char* v_pages, const int64_t* slots, const int64_t* sizes);
void phalanx_encode(int64_t, const void* k, const void* v, const Pages* pages, const int64_t* slots, const int64_t* sizes);
void phalanx_attend(const void* q, const Pages* pages, const void* runs, int64_t num_runs, void* out, const int64_t* sizes,
                    double scale, double softcap);
void phalanx_decode(int64_t, const void* q, const Pages* pages, const int64_t* tables, const int64_t* lengths, void* out,
                    const int64_t* sizes, double scale, double softcap, const float* sinks, const float* slopes);
void phalanx_linear(int64_t, int64_t is_int8, const void* x, const void* w, const float* scales, const float* bias, void* y,
                    const int64_t* sizes);
void phalanx_grouped(int64_t, const void* x, const void* w, const void* scales, const void* offsets, const int64_t* ends,
                     const float* factors, const float* table, const float* bias, void* y, const int64_t* sizes);
void phalanx_rounded_groups(int64_t, const void* x, const void* w, const void* scales, const void* offsets, const int64_t* ends,
                            const float* bias, void* y, const int64_t* sizes);
void phalanx_rounded(int64_t, const void* x, const int8_t* w, const int32_t* weight_sums, const float* scales, const float* bias,
                     void* y, const int64_t* sizes);
void phalanx_ggml(int64_t, const void* x, const void* parts, const float* bias, void* y, const int64_t* sizes);
}

namespace {

constexpr int64_t ALIGNMENT = 64;
enum Kernel : int64_t { DENSE = 0, GROUPED = 1, ROUNDED_GROUPS = 2, ROUNDED = 3, GGML = 4 };
enum Mode : int64_t { PLAIN_OUTPUT = 0, ADD = 1, GATED = 2 };

// Arguments of a linear's kernel. w: weights, or a table of parts. more: offsets of codes, or sums of weights. layout: whether weights are
// int8, that of groups, or the number of parts.
struct Product {
    int64_t kernel;
    const void *w, *scales, *more;
    const int64_t* ends;
    const float *factors, *table, *bias;
    int64_t inputs, layout[5], outputs;
};
struct Norm {
    const void* weight;
    int64_t is_bf16;
};
// q, k: null without norms of heads. rotation: index in those of the step, or -1.
struct Layer {
    Norm attention_in, mlp_in, q, k;
    Product qkv, o, gate_up, down;
    int64_t rotation, window;
};
struct Rotation {
    const void *cos, *sin;
    int64_t turned;
};
struct Numbers {
    double scale, softcap;
};
// Decodes of phalanx_decode.
struct Band {
    int64_t start, size;
    const int64_t* tables;
    int64_t width;
    const int64_t* lengths;
};
// transform: size of the Hadamard matrix of compressed pages. scratch: as `Memory` divides it. parts: bands, or runs of phalanx_attend.
struct Step {
    int64_t is_bf16, rows, hidden, heads, kv_heads, dim, page, inner, transform, fixed;
    char *x, *scratch;
    const int64_t* slots;
    const void* parts;
    int64_t num_parts, has_runs;
    const Rotation* rotations;

    int64_t bytes() const { return is_bf16 ? 2 : 4; }
    int64_t width() const { return (heads + 2 * kv_heads) * dim; }
};

// Buffers of a layer: [rows, ...] each.
struct Memory {
    char *normed, *qkv, *attended, *inner, *q, *k;

    explicit Memory(const Step& s) {
        char* free = s.scratch;
        const auto take = [&](int64_t numbers) {
            char* taken = free;
            free += (s.rows * numbers * s.bytes() + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT;
            return taken;
        };
        normed = take(s.hidden);
        qkv = take(s.width());
        attended = take(s.heads * s.dim);
        inner = take(s.inner);
        q = take(s.heads * s.dim);
        k = take(s.kv_heads * s.dim);
    }
};

// x: [rows, inputs], without gaps; y: [rows, y_stride].
void multiply(const Step& s, const Product& p, const char* x, char* y, int64_t y_stride, Mode mode) {
    const int64_t sizes[] = {s.rows,      p.outputs,   p.inputs,    p.inputs,    y_stride,   mode,
                             p.layout[0], p.layout[1], p.layout[2], p.layout[3], p.layout[4]};
    const auto* scales = static_cast<const float*>(p.scales);
    if (p.kernel == DENSE) return phalanx_linear(s.is_bf16, p.layout[0], x, p.w, scales, p.bias, y, sizes);
    if (p.kernel == GROUPED)
        return phalanx_grouped(s.is_bf16, x, p.w, p.scales, p.more, p.ends, p.factors, p.table, p.bias, y, sizes);
    if (p.kernel == ROUNDED_GROUPS) return phalanx_rounded_groups(s.is_bf16, x, p.w, p.scales, p.more, p.ends, p.bias, y, sizes);
    if (p.kernel == GGML) return phalanx_ggml(s.is_bf16, x, p.w, p.bias, y, sizes);
    phalanx_rounded(s.is_bf16, x, static_cast<const int8_t*>(p.w), static_cast<const int32_t*>(p.more), scales, p.bias, y, sizes);
}

void normalise(const Step& s, const Norm& norm, char* out, double eps) {
    const int64_t sizes[] = {s.rows, s.hidden, s.hidden};
    phalanx_norm(s.is_bf16, norm.is_bf16, s.x, norm.weight, out, sizes, eps);
}

// Normalises and rotates queries and keys in place.
void prepare_heads(const Step& s, const Layer& layer, char* qkv, double eps) {
    const int64_t q_sizes[] = {s.rows, s.heads, s.dim, s.width()}, k_sizes[] = {s.rows, s.kv_heads, s.dim, s.width()};
    if (layer.q.weight) {
        phalanx_norm_heads(s.is_bf16, layer.q.is_bf16, qkv, layer.q.weight, q_sizes, eps);
        phalanx_norm_heads(s.is_bf16, layer.k.is_bf16, qkv + s.heads * s.dim * s.bytes(), layer.k.weight, k_sizes, eps);
    }
    if (layer.rotation < 0) return;
    const Rotation& by = s.rotations[layer.rotation];
    const int64_t sizes[] = {s.rows, s.heads + s.kv_heads, s.dim, by.turned, s.width()};
    phalanx_rotate(s.is_bf16, qkv, by.cos, by.sin, sizes);
}

// Queries as attention takes them.
struct Queries {
    const char* at;
    int64_t stride;
};

// Writes keys and values to the pages. With a format, keys and the queries that are returned are transformed.
Queries write(const Step& s, const Pages& pages, const Memory& at) {
    const int64_t bytes = s.bytes(), width = s.width();
    const char *k = at.qkv + s.heads * s.dim * bytes, *v = k + s.kv_heads * s.dim * bytes;
    if (pages.format == PLAIN) {
        const int64_t sizes[] = {s.rows, s.kv_heads, s.dim * bytes, width * bytes, width * bytes};
        phalanx_write(k, v, reinterpret_cast<char*>(pages.k), reinterpret_cast<char*>(pages.v), s.slots, sizes);
        return {at.qkv, width};
    }
    const int64_t q_sizes[] = {s.rows, s.heads, s.dim, s.transform, width}, k_sizes[] = {s.rows, s.kv_heads, s.dim, s.transform, width};
    const int64_t sizes[] = {s.rows, s.kv_heads, s.dim, s.kv_heads * s.dim, width};
    phalanx_hadamard(s.is_bf16, at.qkv, at.q, q_sizes);
    phalanx_hadamard(s.is_bf16, k, at.k, k_sizes);
    phalanx_encode(s.is_bf16, at.k, v, &pages, s.slots, sizes);
    return {at.q, s.heads * s.dim};
}

void attend(const Step& s, const Layer& layer, const Pages& pages, const Queries& q, char* out, const Numbers& numbers) {
    if (s.has_runs) {
        const int64_t sizes[] = {s.heads, s.kv_heads, s.dim, s.page, q.stride, layer.window, s.fixed};
        return phalanx_attend(q.at, &pages, s.parts, s.num_parts, out, sizes, numbers.scale, numbers.softcap);
    }
    for (int64_t i = 0; i < s.num_parts; i++) {
        const Band& band = static_cast<const Band*>(s.parts)[i];
        const int64_t sizes[] = {band.size, s.heads, s.kv_heads, s.dim, s.page, band.width, q.stride, layer.window, 0};
        phalanx_decode(s.is_bf16, q.at + band.start * q.stride * s.bytes(), &pages, band.tables, band.lengths,
                       out + band.start * s.heads * s.dim * s.bytes(), sizes, numbers.scale, numbers.softcap, nullptr, nullptr);
    }
}

void compute(const Step& s, const Layer& layer, const Pages& pages, const Memory& at, const Numbers& numbers, double eps) {
    normalise(s, layer.attention_in, at.normed, eps);
    multiply(s, layer.qkv, at.normed, at.qkv, s.width(), PLAIN_OUTPUT);
    prepare_heads(s, layer, at.qkv, eps);
    attend(s, layer, pages, write(s, pages, at), at.attended, numbers);
    multiply(s, layer.o, at.attended, s.x, s.hidden, ADD);
    normalise(s, layer.mlp_in, at.normed, eps);
    multiply(s, layer.gate_up, at.normed, at.inner, s.inner, GATED);
    multiply(s, layer.down, at.inner, s.x, s.hidden, ADD);
}

}  // namespace

extern "C" {

// Adds the layers to x, [rows, hidden], in place. layers, pages, numbers: of each.
void phalanx_layers(const void* step, const void* layers, const void* pages, const void* numbers, int64_t count, double eps) {
    const Step& s = *static_cast<const Step*>(step);
    const Memory memory(s);
    for (int64_t i = 0; i < count; i++)
        compute(s, static_cast<const Layer*>(layers)[i], static_cast<const Pages*>(pages)[i], memory,
                static_cast<const Numbers*>(numbers)[i], eps);
}
}
