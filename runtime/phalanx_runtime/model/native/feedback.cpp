// Rounding with feedback, for the pages of calibrated groups. Reference, with the same codes bit by bit: model/attention/feedback.py.
//
// Products and sums are rounded separately and in a fixed order, so that codes are the same for any instruction set and any other
// tokens of the step.
#include <vector>

#include "codes.h"

#pragma GCC optimize("fp-contract=off")

namespace {

constexpr int64_t FEW = 8192;  // below this size, one thread is faster than two

// Layout of the caller: keys or values of a step, their pages, a `Feedback` of `heads` KV heads, and the margins that are tried.
struct Part {
    const void* x;
    int64_t rows, heads, dim, stride;
    uint8_t* codes;
    bf16* scales;
    const int64_t *slots, *order;
    const float *shift, *triangle, *weights, *margins;
    int64_t num_margins;
};

// Numbers, [dim] in the order of rounding, of LANES tokens, and one group's scale and offset by dimension.
struct Scratch {
    std::vector<float> wide, ordered, left, low, high, steps, offsets, error, best_error;
    std::vector<uint8_t> found, best;
    std::vector<bf16> scales, best_scales;

    Scratch(int64_t dim, int64_t groups, int64_t lanes)
        : wide(dim * lanes), ordered(dim * lanes), left(dim * lanes), low(groups * lanes), high(groups * lanes), steps(groups * lanes), offsets(groups * lanes), error(lanes),
          best_error(lanes), found(dim * lanes), best(dim * lanes), scales(2 * groups * lanes), best_scales(2 * groups * lanes) {}
};

// left[j] -= error * factors[j] from dimension `first` on.
template <int LANES>
inline void subtract(float* __restrict left, const float* error, const float* __restrict factors, int64_t first, int64_t dim) {
    if constexpr (LANES == W) {
        const vf wide = load(error);
        for (int64_t j = first; j < dim; j++) store(left + j * W, load(left + j * W) - wide * factors[j]);
    } else {
        for (int64_t j = first; j < dim; j++) left[j] -= *error * factors[j];
    }
}

template <Format format>
inline uint8_t code_of(float ratio, float& number) {
    const float limit = format == INT8 ? INT8_MAX_CODE : format == FP8 ? FP8_MAX_CODE : INT4_MAX_CODE;
    const float kept = clamped(ratio, format == INT4 ? 0.0f : -limit, limit);
    if (format == FP8) {
        const uint8_t code = to_fp8(kept);
        number = from_fp8(code);
        return code;
    }
    number = rounded(kept);
    return static_cast<uint8_t>(static_cast<int32_t>(number));
}

// Finds codes of `left`, which it overwrites, and their weighted errors.
template <Format format, int LANES>
void round_in_turn(const Part& part, const int64_t* order, const float* triangle, const float* weights, int64_t groups, Scratch& s) {
    const int64_t dim = part.dim, size = dim / groups;
    float* __restrict left = s.left.data();
    float total[LANES] = {};
    for (int64_t i = 0; i < dim; i++) {
        const int64_t group = order[i] / size * LANES;
        float step[LANES], offset[LANES], error[LANES];  // locals, since stores of bytes could change anything else
        uint8_t code[LANES];
        memcpy(step, &s.steps[group], sizeof step);
        memcpy(offset, &s.offsets[group], sizeof offset);
        const float weight = weights[i];
        for (int lane = 0; lane < LANES; lane++) {
            const float by = step[lane] == 0.0f ? 1.0f : step[lane], from = left[i * LANES + lane];
            float number;
            code[lane] = code_of<format>((from - offset[lane]) / by, number);
            error[lane] = from - (number * step[lane] + offset[lane]);
            total[lane] += error[lane] * error[lane] * weight;
        }
        memcpy(&s.found[i * LANES], code, sizeof code);
        subtract<LANES>(left, error, triangle + i * dim, i + 1, dim);
    }
    std::copy(total, total + LANES, s.error.begin());
}

// The range of each group of a token.
template <Format format>
void find_ranges(const float* x, int64_t dim, int64_t groups, float* low, float* high) {
    if (format != INT4) {
        *high = largest_magnitude(x, dim);
        return;
    }
    for (int64_t group = 0, size = dim / groups; group < groups; group++) find_range(x + group * size, size, low[group], high[group]);
}

// Scales of a token, and offsets after them, whose codes leave the margin out at each end of the range.
template <Format format>
void find_scales(const float* low, const float* high, int64_t groups, float margin, bf16* scales) {
    if (format != INT4) return narrow(*high * (1.0f - 2.0f * margin) / (format == INT8 ? INT8_MAX_CODE : FP8_MAX_CODE), scales);
    for (int64_t group = 0; group < groups; group++) {
        const float left_out = (high[group] - low[group]) * margin;
        range_scales(low[group] + left_out, high[group] - left_out, scales[group], scales[groups + group]);
    }
}

// Writes tokens [row, row + LANES) of a head.
template <Format format, int LANES, typename T>
void write_block(const Part& part, int64_t row, int64_t head, Scratch& s) {
    const int64_t dim = part.dim, groups = format == INT4 ? num_groups(dim) : 1, count = num_scales(format, dim);
    const int64_t* order = part.order + head * dim;
    for (int lane = 0; lane < LANES; lane++) {
        const T* from = static_cast<const T*>(part.x) + (row + lane) * part.stride + head * dim;
        float* wide = &s.wide[lane * dim];
        for (int64_t d = 0; d < dim; d++) wide[d] = widen(from[d]) - part.shift[head * dim + d];
        for (int64_t i = 0; i < dim; i++) s.ordered[i * LANES + lane] = wide[order[i]];
        find_ranges<format>(wide, dim, groups, &s.low[lane * groups], &s.high[lane * groups]);
    }
    for (int64_t trial = 0; trial < part.num_margins; trial++) {
        for (int lane = 0; lane < LANES; lane++) {
            bf16* scales = &s.scales[lane * count];
            find_scales<format>(&s.low[lane * groups], &s.high[lane * groups], groups, part.margins[trial], scales);
            for (int64_t group = 0; group < groups; group++) {
                s.steps[group * LANES + lane] = widen(scales[group]);
                s.offsets[group * LANES + lane] = format == INT4 ? widen(scales[groups + group]) : 0.0f;
            }
        }
        std::copy(s.ordered.begin(), s.ordered.begin() + dim * LANES, s.left.begin());
        round_in_turn<format, LANES>(part, order, part.triangle + head * dim * dim, part.weights + head * dim, groups, s);
        for (int lane = 0; lane < LANES; lane++) {
            if (trial && !(s.error[lane] < s.best_error[lane])) continue;
            s.best_error[lane] = s.error[lane];
            std::copy(&s.scales[lane * count], &s.scales[lane * count] + count, &s.best_scales[lane * count]);
            for (int64_t i = 0; i < dim; i++) s.best[lane * dim + order[i]] = s.found[i * LANES + lane];
        }
    }
    for (int lane = 0; lane < LANES; lane++) {
        const int64_t slot = part.slots[(row + lane) * part.heads + head], size = code_bytes(format, dim);
        const uint8_t* codes = &s.best[lane * dim];
        uint8_t* to = part.codes + slot * size;
        for (int64_t d = 0; d < size; d++) to[d] = static_cast<uint8_t>(format == INT4 ? codes[d] | codes[d + size] << 4 : codes[d]);
        std::copy(&s.best_scales[lane * count], &s.best_scales[lane * count] + count, part.scales + slot * count);
    }
}

template <Format format, typename T>
void write_part(const Part& part) {
    const int64_t blocks = (part.rows + W - 1) / W;
#pragma omp parallel if (part.rows * part.heads * part.dim > FEW)
    {
        Scratch scratch(part.dim, num_groups(part.dim), W);
#pragma omp for collapse(2)
        for (int64_t head = 0; head < part.heads; head++)
            for (int64_t block = 0; block < blocks; block++) {
                if ((block + 1) * W <= part.rows)
                    write_block<format, W, T>(part, block * W, head, scratch);
                else
                    for (int64_t row = block * W; row < part.rows; row++) write_block<format, 1, T>(part, row, head, scratch);
            }
    }
}

template <typename T>
void write_any(int64_t format, const Part& part) {
    if (format == INT8)
        write_part<INT8, T>(part);
    else if (format == FP8)
        write_part<FP8, T>(part);
    else
        write_part<INT4, T>(part);
}

}  // namespace

extern "C" {

// Writes codes and scales of a part.
void phalanx_encode_with_feedback(int64_t is_bf16, int64_t format, const Part* part) {
    if (is_bf16)
        write_any<bf16>(format, *part);
    else
        write_any<float>(format, *part);
}
}
