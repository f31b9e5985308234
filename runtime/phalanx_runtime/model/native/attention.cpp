// Decode attention that reads pages in place. The query heads of a KV head share each read.
//
// A work item is (row, split, KV head). Splits have a fixed number of tokens, so results do not depend on the batch; rows with
// several splits are merged at the end.
#include <algorithm>
#include <type_traits>
#include <vector>

#include "codes.h"

namespace {

constexpr int64_t SPLIT = 512;
constexpr int MAX_GROUP = 128;

struct Task {
    int64_t rows, heads, kv_heads, dim, page, table_width, q_stride, window, block;
    float scale, softcap;
    const float* sinks;   // a logit of each query head without a value, or null
    const float* slopes;  // of each query head, or null: a logit loses slope times the tokens between key and query
};

struct Item {
    int64_t row, head, first, last, length, slot;
    bool has_sink;  // the first split
};

// bf16 separates even and odd dimensions.
template <typename T> struct Order;
template <> struct Order<float> {
    static int64_t at(int64_t d, int64_t) { return d; }
};
template <> struct Order<bf16> {
    static int64_t at(int64_t d, int64_t dim) { return d / 2 + (d % 2) * (dim / 2); }
};

// part[g][key] = partial sums of q[g] . keys[key], for W keys.
inline void scores(const float* q, const float* const* keys, int64_t dim, int group, vf (*part)[W]) {
    for (int key = 0; key < W; key++)
        for (int g = 0; g < group; g++) {
            vf total{};
            for (int64_t d = 0; d < dim; d += W) total += load(q + g * dim + d) * load(keys[key] + d);
            part[g][key] = total;
        }
}
inline void scores(const float* q, const bf16* const* keys, int64_t dim, int group, vf (*part)[W]) {
    const int64_t half = dim / 2;
    for (int key = 0; key < W; key++) {
        for (int g = 0; g < group; g++) part[g][key] = vf{};
        for (int64_t d = 0; d < half; d += W) {
            vu words = load_words(keys[key] + 2 * d);
            vf low = even(words), high = odd(words);
            for (int g = 0; g < group; g++) part[g][key] += load(q + g * dim + d) * low + load(q + g * dim + half + d) * high;
        }
    }
}

// out[g] += weights[g] . values, for W values and at most 4 query heads.
template <int G>
inline void weigh(const float* weights, const float* const* values, int64_t dim, float* out) {
    for (int64_t d = 0; d < dim; d += W) {
        vf total[G];
        for (int g = 0; g < G; g++) total[g] = load(out + g * dim + d);
        for (int key = 0; key < W; key++) {
            vf value = load(values[key] + d);
            for (int g = 0; g < G; g++) total[g] += weights[g * W + key] * value;
        }
        for (int g = 0; g < G; g++) store(out + g * dim + d, total[g]);
    }
}
template <int G>
inline void weigh(const float* weights, const bf16* const* values, int64_t dim, float* out) {
    const int64_t half = dim / 2;
    for (int64_t d = 0; d < half; d += W) {
        vf low[G], high[G];
        for (int g = 0; g < G; g++) low[g] = load(out + g * dim + d), high[g] = load(out + g * dim + half + d);
        for (int key = 0; key < W; key++) {
            vu words = load_words(values[key] + 2 * d);
            vf first = even(words), second = odd(words);
            for (int g = 0; g < G; g++) {
                vf weight = all(weights[g * W + key]);
                low[g] += weight * first;
                high[g] += weight * second;
            }
        }
        for (int g = 0; g < G; g++) store(out + g * dim + d, low[g]), store(out + g * dim + half + d, high[g]);
    }
}

// Key and value of a slot: in place, or expanded into the tile.
template <typename K>
inline void read(const Pages& pages, int64_t slot, int64_t dim, float* tile, const K*& key, const K*& value) {
    if constexpr (std::is_same_v<K, float>) {
        if (pages.format != PLAIN) {
            const int64_t bytes = code_bytes(pages.format, dim), scales = num_scales(pages.format, dim);
            expand(pages.format, pages.k + slot * bytes, pages.k_scales + slot * scales, dim, tile);
            key = value = tile;
            if (pages.is_latent()) return;
            expand(pages.format, pages.v + slot * bytes, pages.v_scales + slot * scales, dim, tile + dim);
            value = tile + dim;
            return;
        }
    }
    key = reinterpret_cast<const K*>(pages.k) + slot * dim;
    value = reinterpret_cast<const K*>(pages.v) + slot * dim;
}

// Scratch of one thread: queries, sums, and per query head the maximum logit and the sum of weights.
struct Scratch {
    std::vector<float> q, out, tile;
    float top[MAX_GROUP], mass[MAX_GROUP];
    vf part[MAX_GROUP][W];
    alignas(64) float weights[MAX_GROUP * W];
};

// K: type of keys and values in the cache, or of numbers expanded from codes.
template <typename K, typename T>
void attend(const Task& task, const Item& item, const T* q, const Pages& pages, const int64_t* table, Scratch& s) {
    const int64_t dim = task.dim, group = task.heads / task.kv_heads;
    for (int64_t g = 0; g < group; g++) {
        for (int64_t d = 0; d < dim; d++) s.q[g * dim + Order<K>::at(d, dim)] = widen(q[g * dim + d]) * task.scale;
        const bool has_sink = task.sinks && item.has_sink;
        s.top[g] = has_sink ? task.sinks[item.head * group + g] : -INFINITY;
        s.mass[g] = has_sink ? 1.0f : 0.0f;
    }
    std::fill(s.out.begin(), s.out.end(), 0.0f);
    vi lanes;
    for (int i = 0; i < W; i++) lanes[i] = i;
    for (int64_t at = item.first; at < item.last; at += W) {
        const K *keys[W], *values[W];
        const int count = static_cast<int>(std::min<int64_t>(W, item.last - at));
        for (int i = 0; i < W; i++) {
            const int64_t token = at + std::min(i, count - 1);
            const int64_t slot = (table[token / task.page] * task.kv_heads + item.head) * task.page + token % task.page;
            read(pages, slot, dim, &s.tile[2 * i * dim], keys[i], values[i]);
        }
        scores(s.q.data(), keys, dim, static_cast<int>(group), s.part);
        for (int64_t g = 0; g < group; g++) {
            vf score = row_sums(s.part[g]);
            if (task.softcap > 0)
                for (int i = 0; i < W; i++) score[i] = std::tanh(score[i] / task.softcap) * task.softcap;
            if (task.slopes) {
                const float slope = task.slopes[item.head * group + g];
                for (int i = 0; i < W; i++) score[i] += slope * static_cast<float>(at + i + 1 - item.length);
            }
            score = lanes < count ? score : all(-INFINITY);
            const float top = std::max(s.top[g], largest(score));
            const vf weight = exponential(score - top);
            if (top > s.top[g]) {
                const float shrink = s.mass[g] > 0 ? std::exp(s.top[g] - top) : 0.0f;
                s.mass[g] *= shrink;
                for (int64_t d = 0; d < dim; d += W) store(&s.out[g * dim + d], load(&s.out[g * dim + d]) * shrink);
                s.top[g] = top;
            }
            s.mass[g] += sum(weight);
            store(s.weights + g * W, weight);
        }
        int64_t g = 0;
        for (; g + 4 <= group; g += 4) weigh<4>(s.weights + g * W, values, dim, &s.out[g * dim]);
        if (group - g == 3) weigh<3>(s.weights + g * W, values, dim, &s.out[g * dim]);
        if (group - g == 2) weigh<2>(s.weights + g * W, values, dim, &s.out[g * dim]);
        if (group - g == 1) weigh<1>(s.weights + g * W, values, dim, &s.out[g * dim]);
    }
}

template <typename K, typename T>
void write(const float* sums, float mass, int64_t dim, T* out) {
    for (int64_t d = 0; d < dim; d++) narrow(sums[Order<K>::at(d, dim)] / mass, out + d);
}

// Stores the partial result of an item: per query head the sums, the maximum logit, the sum of weights.
void keep(const Scratch& s, int64_t group, int64_t dim, float* part) {
    for (int64_t g = 0; g < group; g++, part += dim + 2) {
        memcpy(part, &s.out[g * dim], dim * 4);
        part[dim] = s.top[g];
        part[dim + 1] = s.mass[g];
    }
}

template <typename K, typename T>
void merge(const float* parts, int64_t splits, int64_t group, int64_t dim, T* out) {
    std::vector<float> sums(dim);
    const int64_t step = group * (dim + 2);
    for (int64_t g = 0; g < group; g++, parts += dim + 2, out += dim) {
        float top = -INFINITY, mass = 0;
        for (int64_t i = 0; i < splits; i++) top = std::max(top, parts[i * step + dim]);
        std::fill(sums.begin(), sums.end(), 0.0f);
        for (int64_t i = 0; i < splits; i++) {
            const float share = std::exp(parts[i * step + dim] - top);
            mass += share * parts[i * step + dim + 1];
            for (int64_t d = 0; d < dim; d++) sums[d] += share * parts[i * step + d];
        }
        write<K>(sums.data(), mass, dim, out);
    }
}

template <typename K, typename T>
void decode(const Task& task, const T* q, const Pages& pages, const int64_t* tables, const int64_t* lengths, T* out) {
    const int64_t dim = task.dim, group = task.heads / task.kv_heads;
    std::vector<Item> items;
    std::vector<int64_t> merged;
    for (int64_t row = 0; row < task.rows; row++) {
        const int64_t block_start = task.block > 0 ? (lengths[row] - 1) / task.block * task.block : 0;
        const int64_t first = task.window > 0 ? std::max<int64_t>(0, lengths[row] - task.window) : block_start;
        const int64_t splits = (lengths[row] - first + SPLIT - 1) / SPLIT;
        for (int64_t head = 0; head < task.kv_heads; head++) {
            if (splits > 1) merged.push_back(static_cast<int64_t>(items.size()));
            for (int64_t at = first; at < lengths[row]; at += SPLIT)
                items.push_back({row, head, at, std::min(at + SPLIT, lengths[row]), lengths[row], splits > 1 ? splits : 0, at == first});
        }
    }
    const int64_t count = static_cast<int64_t>(items.size()), part = group * (dim + 2);
    std::vector<float> parts(merged.empty() ? 0 : count * part);
#pragma omp parallel if (count > 1)
    {
        Scratch scratch;
        scratch.q.resize(group * dim);
        scratch.out.resize(group * dim);
        scratch.tile.resize(2 * W * dim);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) {
            const Item& item = items[i];
            const int64_t head = item.head * group * dim;
            attend<K>(task, item, q + item.row * task.q_stride + head, pages, tables + item.row * task.table_width, scratch);
            if (item.slot) {
                keep(scratch, group, dim, &parts[i * part]);
                continue;
            }
            T* to = out + item.row * task.heads * dim + head;
            for (int64_t g = 0; g < group; g++) write<K>(&scratch.out[g * dim], scratch.mass[g], dim, to + g * dim);
        }
    }
    for (int64_t i : merged) {
        const Item& item = items[i];
        merge<K>(&parts[i * part], item.slot, group, dim, out + (item.row * task.heads + item.head * group) * dim);
    }
}

}  // namespace

extern "C" {

int64_t phalanx_lanes() { return W; }

// q: [rows, heads, dim] with q_stride between rows. pages: [pages, kv_heads, page, ...]. tables: [rows, table_width].
// out: [rows, heads * dim]. window 0: all tokens, or those of the last block of `block`. softcap 0: disabled. sinks, slopes: [heads], or null. is_bf16: dtype of q and out,
// and of pages without a format. dim is a multiple of the lanes, in bf16 without a format of twice the lanes. At most 128 query heads
// per KV head.
void phalanx_decode(int64_t is_bf16, const void* q, const Pages* pages, const int64_t* tables, const int64_t* lengths, void* out,
                    const int64_t* sizes, double scale, double softcap, const float* sinks, const float* slopes) {
    const Task task{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6], sizes[7], sizes[8],
                    static_cast<float>(scale), static_cast<float>(softcap), sinks, slopes};
    if (!is_bf16)
        decode<float>(task, static_cast<const float*>(q), *pages, tables, lengths, static_cast<float*>(out));
    else if (pages->format == PLAIN)
        decode<bf16>(task, static_cast<const bf16*>(q), *pages, tables, lengths, static_cast<bf16*>(out));
    else
        decode<float>(task, static_cast<const bf16*>(q), *pages, tables, lengths, static_cast<bf16*>(out));
}
}
