// y = x W^T with bf16 or int8 weights and float sums, for any number of rows.
//
// Weights are in blocks of 16 outputs. bf16: [blocks][K / 2][16][2], so that a pair of inputs multiplies 16 outputs in one vector.
// int8: the same order, with a scale per output. A block is read once per strip of rows of x, with the strip's sums in registers.
#include "linear.h"

namespace {

template <class X, class Y>
void chosen(bool is_int8, const X* x, int64_t x_stride, const void* w, const int64_t* sizes, const Output<Y>& output) {
    const int64_t rows = sizes[0], pairs = sizes[2] / 2;
    if (is_int8) return multiply(DenseMatrix<Int8Weights>{static_cast<const uint16_t*>(w), pairs}, x, x_stride, rows, output);
    multiply(DenseMatrix<Bf16Weights>{static_cast<const uint32_t*>(w), pairs}, x, x_stride, rows, output);
}

}  // namespace

extern "C" {

// sizes: rows, outputs, inputs (even), stride of x, stride of y, mode. Mode 0 writes y, 1 adds to y, 2 writes silu(gate) * up from
// alternating blocks of gates and ups, so y has half the columns. x and y: bf16 or float. scales and bias: per output, or null.
void phalanx_linear(int64_t is_bf16, int64_t is_int8, const void* x, const void* w, const float* scales, const float* bias, void* y,
                    const int64_t* sizes) {
    with_inputs(is_bf16, x, y, sizes, bias, scales, [&](const auto* inputs, int64_t stride, const auto& output) {
        chosen(is_int8, inputs, stride, w, sizes, output);
    });
}
}
