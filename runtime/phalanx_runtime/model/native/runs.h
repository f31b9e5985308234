// Runs, the last tokens of a request's context, as kernels read them.
#pragma once
#include <cstdint>

constexpr int64_t NO_TREE = int64_t{1} << 62;
constexpr float LOWEST = -1e30f;  // below every logit, but finite, so that differences are no NaN

// Layout of the caller. lines: for each token of a tree, its position, and bits of the visible slots from `base` on; all slots
// before `base` are visible up to its position. Null without a tree.
struct Run {
    int64_t start, size, length;
    const int64_t *table, *lines;
    int64_t base;
};
