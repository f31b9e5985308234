// Attention over compressed pages in floats, with the vectors of any instruction set: prompt chunks and trees.
//
// A work item is (run, tile of its tokens, KV head). It expands the context in blocks of 64 keys, in scratch of its thread, and
// multiplies each block with all rows of the tile, with an online softmax. Blocks start at multiples of 64, so results do not depend
// on the chunks of a prompt.
#include <algorithm>
#include <vector>

#include "codes.h"
#include "runs.h"

namespace {

constexpr int BLOCK = 64, STRIP = 6;
constexpr int WIDTH = W == 16 ? 4 : 2;          // vectors of each row of a strip in registers
constexpr int64_t TILE = 64;                    // maximum tokens of a work item
constexpr int64_t TILE_NUMBERS = 64 * 1024;     // of queries and of sums of a tile; they are read for each block of keys

struct Task {
    int64_t heads, kv_heads, dim, page, q_stride, window, block;
    float scale, softcap;
    const float* sinks;   // a logit of each query head without a value, or null
    const float* slopes;  // of each query head, or null: a logit loses slope times the tokens between key and query
    int64_t group() const { return heads / kv_heads; }
    int64_t stride() const { return (dim + W - 1) / W * W; }
};
struct Item {
    const Run* run;
    int64_t head, first, count;
};

// A query. Visible are slots [from, to), and those of `line` from the tree's base on.
struct Row {
    int64_t position, slot, from, to;
    uint64_t line;
    float top, slope;
    vf mass;
};

// Scratch of one thread: queries and sums of the tile, and a block: keys as [dim, BLOCK], values as [BLOCK, stride].
struct Scratch {
    std::vector<vf> q, sums, keys, values, unordered;
    std::vector<Row> rows;
    int64_t base, lowest;  // first slot of the tree; first visible slot of the tile

    void reserve(int64_t num_rows, int64_t stride) {
        q.resize(num_rows * stride / W);
        sums.assign(num_rows * stride / W, vf{});
        keys.resize(stride * BLOCK / W);
        values.resize(stride * BLOCK / W);
        unordered.resize(stride);
        rows.resize(num_rows);
    }
};
inline float* floats(std::vector<vf>& of) { return reinterpret_cast<float*>(of.data()); }

template <int step>
inline void exchange(vf* rows) {
    vi first, second;
    for (int i = 0; i < W; i++) {
        first[i] = i & step ? W + (i ^ step) : i;
        second[i] = i & step ? W + i : i + step;
    }
    for (int i = 0; i < W; i++) {
        if (i & step) continue;
        const vf a = rows[i], b = rows[i + step];
        rows[i] = __builtin_shuffle(a, b, first);
        rows[i + step] = __builtin_shuffle(a, b, second);
    }
}

// Transposes W rows of W numbers: to[BLOCK * column + row].
inline void transpose(const float* from, int64_t stride, float* to) {
    vf rows[W];
    for (int i = 0; i < W; i++) rows[i] = load(from + i * stride);
    if constexpr (W > 8) exchange<8>(rows);
    if constexpr (W > 4) exchange<4>(rows);
    exchange<2>(rows);
    exchange<1>(rows);
    for (int i = 0; i < W; i++) store(to + i * BLOCK, rows[i]);
}

// Expands keys and values of slots [key, end); values of slots that no row sees are 0, for they have no weight but may be NaN.
void expand_block(const Task& task, const Item& item, const Pages& pages, Scratch& s, int64_t key, int64_t end) {
    const int64_t dim = task.dim, stride = task.stride(), bytes = code_bytes(pages.format, dim), scales = num_scales(pages.format, dim);
    for (int64_t at = key; at < end; at += W) {
        float *values = floats(s.values) + (at - key) * stride, *keys = pages.is_latent() ? values : floats(s.unordered);
        for (int64_t i = 0; i < std::min<int64_t>(W, end - at); i++) {
            const int64_t token = at + i;
            if (token < s.lowest) {
                std::fill(values + i * stride, values + (i + 1) * stride, 0.0f);
                continue;
            }
            const int64_t slot = (item.run->table[token / task.page] * task.kv_heads + item.head) * task.page + token % task.page;
            expand(pages.format, pages.k + slot * bytes, pages.k_scales + slot * scales, dim, keys + i * stride);
            if (!pages.is_latent()) expand(pages.format, pages.v + slot * bytes, pages.v_scales + slot * scales, dim, values + i * stride);
        }
        for (int64_t d = 0; d < stride; d += W) transpose(keys + d, stride, floats(s.keys) + d * BLOCK + at - key);
    }
}

struct Matrix {
    const float* at;
    int64_t stride;
};

// out[r] = out[r] * kept[r], or 0 without `kept`, + a[r] x b, for `vectors` vectors.
template <int rows, int vectors>
inline void add_products(Matrix a, Matrix b, int64_t count, const float* kept, float* out, int64_t stride) {
    vf total[rows][vectors];
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) total[r][v] = kept ? load(out + r * stride + v * W) * kept[r] : vf{};
    for (int64_t k = 0; k < count; k++) {
        vf right[vectors];
        for (int v = 0; v < vectors; v++) right[v] = load(b.at + k * b.stride + v * W);
        for (int r = 0; r < rows; r++) {
            const vf left = all(a.at[r * a.stride + k]);
            for (int v = 0; v < vectors; v++) total[r][v] += left * right[v];
        }
    }
    for (int r = 0; r < rows; r++)
        for (int v = 0; v < vectors; v++) store(out + r * stride + v * W, total[r][v]);
}

// Lanes of the visible slots among W from `key` on.
inline vi seen(const Row& row, int64_t base, int64_t key) {
    vi slots;
    for (int i = 0; i < W; i++) slots[i] = static_cast<int32_t>(key) + i;
    vi found = (slots >= static_cast<int32_t>(row.from)) & (slots < static_cast<int32_t>(row.to));
    if (row.line && key + W > base)
        for (int64_t i = std::max<int64_t>(0, base - key); i < std::min<int64_t>(W, row.slot + 1 - key); i++)
            if (row.line >> (key + i - base) & 1) found[i] = -1;
    return found;
}

// Tokens from the query to W visible slots from `key` on, negative: in a tree, nodes between them.
inline vf distances(const Row& row, int64_t base, int64_t key) {
    vf out{};
    for (int i = 0; i < W; i++) {
        const int64_t slot = std::min(key + i, row.slot);
        const bool in_tree = row.line && slot >= base;
        const int64_t nodes = in_tree ? __builtin_popcountll(row.line >> (slot - base) >> 1) : row.position - slot;
        out[i] = static_cast<float>(-nodes);
    }
    return out;
}

inline vf capped(vf score, float softcap) { return softcap - 2 * softcap / (exponential(score * (2 / softcap)) + 1.0f); }

// Online softmax: turns scores of `count` slots from `key` on into weights, and returns the factor on the previous sums.
float soften(const Task& task, int64_t base, Row& row, int64_t key, int64_t count, bool masked, float* scores) {
    vf best = all(LOWEST);
    for (int64_t at = 0; at < count; at += W) {
        vf score = load(scores + at);
        if (task.softcap > 0) score = capped(score, task.softcap);
        if (row.slope != 0) score += row.slope * distances(row, base, key + at);
        if (masked) score = seen(row, base, key + at) ? score : all(-INFINITY);
        store(scores + at, score);
        best = larger(best, score);
    }
    const float top = std::max(row.top, largest(best)), shrink = row.top < top ? std::exp(row.top - top) : 1.0f;
    row.top = top;
    row.mass *= shrink;
    for (int64_t at = 0; at < count; at += W) {
        const vf weight = exponential(load(scores + at) - top);
        store(scores + at, weight);
        row.mass += weight;
    }
    return shrink;
}

// Attention of `rows` rows of the tile over slots [key, end).
template <int rows>
void meet(const Task& task, Scratch& s, int64_t row, int64_t key, int64_t end, bool masked) {
    alignas(64) float weights[rows][BLOCK];
    float kept[rows];
    const int64_t stride = task.stride(), count = end - key;
    const Matrix q{floats(s.q) + row * stride, stride};
    for (int64_t at = 0; at < count; at += WIDTH * W)
        add_products<rows, WIDTH>(q, {floats(s.keys) + at, BLOCK}, task.dim, nullptr, &weights[0][at], BLOCK);
    for (int r = 0; r < rows; r++) kept[r] = soften(task, s.base, s.rows[row + r], key, count, masked, weights[r]);
    float *sums = floats(s.sums) + row * stride, *values = floats(s.values);
    int64_t d = 0;
    for (; d + WIDTH * W <= stride; d += WIDTH * W)
        add_products<rows, WIDTH>({weights[0], BLOCK}, {values + d, stride}, count, kept, sums + d, stride);
    for (; d < stride; d += W) add_products<rows, 1>({weights[0], BLOCK}, {values + d, stride}, count, kept, sums + d, stride);
}

template <int rows>
void meet_any(int64_t count, const Task& task, Scratch& s, int64_t row, int64_t key, int64_t end, bool masked) {
    if constexpr (rows > 0) {
        if (count == rows) return meet<rows>(task, s, row, key, end, masked);
        meet_any<rows - 1>(count, task, s, row, key, end, masked);
    }
}

// Attention of all rows of the tile over slots [key, to).
void meet_block(const Task& task, Scratch& s, int64_t key, int64_t to) {
    const int64_t num_rows = static_cast<int64_t>(s.rows.size());
    for (int64_t row = 0; row < num_rows; row += STRIP) {
        const int64_t count = std::min<int64_t>(STRIP, num_rows - row);
        const auto first = s.rows.begin() + row, last = first + count;
        const int64_t end = std::min(to, (last - 1)->slot + 1);
        if (end <= key || std::all_of(first, last, [&](const Row& one) { return one.from >= key + BLOCK; })) continue;
        const bool cut = std::any_of(first, last, [&](const Row& one) { return one.from > key || one.to < end; });
        meet_any<STRIP>(count, task, s, row, key, end, cut || (end - key) % W);
    }
}

Row row_of(const Task& task, const Run& run, int64_t token, int64_t head) {
    const int64_t slot = run.length - run.size + token, position = run.lines ? run.lines[2 * token] : slot;
    const int64_t in_window = task.window > 0 ? position + 1 - task.window : 0;
    const int64_t in_block = task.block > 0 ? position / task.block * task.block : 0;
    Row row{position, slot, std::max<int64_t>({0, in_window, in_block}), run.lines ? std::min(position + 1, run.base) : slot + 1,
            run.lines ? static_cast<uint64_t>(run.lines[2 * token + 1]) : 0, LOWEST, 0.0f, vf{}};
    while (__builtin_popcountll(row.line) > position + 1 - row.from) row.line &= row.line - 1;  // the oldest leave a narrow window
    if (task.slopes) row.slope = task.slopes[head];
    if (task.sinks) row.top = task.sinks[head], row.mass[0] = 1.0f;
    return row;
}

template <typename T>
void attend(const Task& task, const Item& item, const T* q, const Pages& pages, Scratch& s, T* out) {
    const Run& run = *item.run;
    const int64_t dim = task.dim, stride = task.stride(), group = task.group(), num_rows = item.count * group;
    s.reserve(num_rows, stride);
    s.base = run.lines ? run.base : NO_TREE;
    s.lowest = run.length;
    for (int64_t i = 0; i < num_rows; i++) {
        const int64_t token = item.first + i / group, head = item.head * group + i % group;
        s.rows[i] = row_of(task, run, token, head);
        s.lowest = std::min(s.lowest, s.rows[i].from);
        const T* from = q + (run.start + token) * task.q_stride + head * dim;
        for (int64_t d = 0; d < dim; d++) floats(s.q)[i * stride + d] = widen(from[d]) * task.scale;
    }
    const int64_t to = s.rows.back().slot + 1;
    for (int64_t key = s.lowest / BLOCK * BLOCK; key < to; key += BLOCK) {
        expand_block(task, item, pages, s, key, std::min(to, key + BLOCK));
        meet_block(task, s, key, std::min(to, key + BLOCK));
    }
    for (int64_t i = 0; i < num_rows; i++) {
        T* row = out + ((run.start + item.first + i / group) * task.heads + item.head * group + i % group) * dim;
        const float mass = sum(s.rows[i].mass);
        for (int64_t d = 0; d < dim; d++) narrow(floats(s.sums)[i * stride + d] / mass, row + d);
    }
}

template <typename T>
void attend_all(const Task& task, const T* q, const Pages& pages, const Run* runs, int64_t num_runs, T* out) {
    const int64_t tile = std::clamp<int64_t>(TILE_NUMBERS / (task.group() * task.dim), 1, TILE);
    std::vector<Item> items;  // longest first
    for (int64_t i = num_runs - 1; i >= 0; i--)
        for (int64_t first = (runs[i].size - 1) / tile * tile; first >= 0; first -= tile)
            for (int64_t head = 0; head < task.kv_heads; head++)
                items.push_back({&runs[i], head, first, std::min(tile, runs[i].size - first)});
    const int64_t count = static_cast<int64_t>(items.size());
#pragma omp parallel if (count > 1)
    {
        static thread_local Scratch scratch;
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < count; i++) attend(task, items[i], q, pages, scratch, out);
    }
}

}  // namespace

extern "C" {

// q: [tokens, heads, dim] with q_stride between rows, bf16 or float. pages: [pages, kv_heads, page, ...], with a format. runs: see
// phalanx_attend. out: [tokens, heads * dim]. sizes: heads, kv_heads, dim, page, q_stride, window (0: all tokens), block (0: no
// blocks). softcap 0: disabled. sinks, slopes: [heads], or null.
void phalanx_attend_codes(int64_t is_bf16, const void* q, const Pages* pages, const void* runs, int64_t num_runs, void* out,
                          const int64_t* sizes, double scale, double softcap, const float* sinks, const float* slopes) {
    const Task task{sizes[0], sizes[1], sizes[2], sizes[3], sizes[4], sizes[5], sizes[6],
                    static_cast<float>(scale), static_cast<float>(softcap), sinks, slopes};
    const auto* of = static_cast<const Run*>(runs);
    if (is_bf16)
        attend_all(task, static_cast<const bf16*>(q), *pages, of, num_runs, static_cast<bf16*>(out));
    else
        attend_all(task, static_cast<const float*>(q), *pages, of, num_runs, static_cast<float*>(out));
}
}
