"""Functions that several Triton kernels call."""

import triton
import triton.language as tl


@triton.jit
def weighted(values, scale, weight, dtype: tl.constexpr):
    """Returns values * scale * weight as `dtype`. An fp32 weight multiplies before the values are rounded, as in `rms_norm`."""
    if weight.dtype == tl.float32:
        normed = (values * scale * weight).to(dtype)
    else:
        normed = ((values * scale).to(dtype).to(tl.float32) * weight.to(tl.float32)).to(dtype)
    return normed


@triton.jit
def gelu_exponent(gates):
    """Returns the exponent of gelu by tanh: 0.5 * (1 + tanh(u)) = 1 / (1 + exp(-2 u)), without cancellation. fp32."""
    return 1.5957691216057308 * (gates + 0.044715 * gates * gates * gates)


@triton.jit
def times_sigmoid(gates, exponent):
    """Returns gates * sigmoid(exponent). fp32."""
    power = tl.exp(-tl.abs(exponent))
    return gates * tl.where(exponent < 0, power, 1.0) / (1.0 + power)


@triton.jit
def gated(gates, up, dtype: tl.constexpr, is_silu: tl.constexpr):
    """Returns activation(gates) * up in fp32, the activation rounded to `dtype`: silu, or gelu by tanh. Both fp32."""
    exponent = gates
    if not is_silu:
        exponent = gelu_exponent(gates)
    return times_sigmoid(gates, exponent).to(dtype).to(tl.float32) * up


@triton.jit
def await_inputs():
    """Waits for the preceding kernels of the stream, and lets the next one start its programs meanwhile.

    For launches with `launch_pdl` (programmatic dependent launch, compute capability 9.0 and later): what such a kernel does
    before writes nothing, and reads only what no launch writes. CUDA C++ Programming Guide, "Programmatic Dependent Launch".
    """
    tl.extra.cuda.gdc_launch_dependents()
    tl.extra.cuda.gdc_wait()


@triton.jit
def from_e2m5(codes):
    """Returns fp32 of e2m5 in the low bits of int32: shifted into an fp32 with an exponent that is 126 too small, which is exact
    for subnormal values too."""
    bits = ((codes & 0x80) << 24) | ((codes & 0x7F) << 18)
    return bits.to(tl.float32, bitcast=True) * 8.507059173023462e37


@triton.jit
def to_e2m5(x):
    """Returns e2m5 bits, int32, of fp32 up to 7.875 in size, rounded to the nearest even code."""
    bits = x.to(tl.int32, bitcast=True)
    size = bits & 0x7FFFFFFF
    normal = ((size + 0x1FFFF + ((size >> 18) & 1)) >> 18) - 4032  # 32 * the difference of exponents
    subnormal = nearest_integer(tl.abs(x) * 32.0) & 0x3F
    return tl.where(size < 0x3F800000, subnormal, normal) | ((bits >> 24) & 0x80)  # below 1


@triton.jit
def nearest_integer(x):
    """Returns int32 whose low 22 bits are those of fp32 x as an integer, rounded to the nearest even one: the sum's last bits."""
    return (x + 12582912.0).to(tl.int32, bitcast=True)


@triton.jit
def to_bfloat16(x):
    """Returns fp32 rounded to the nearest even bfloat16. The interpreter's conversion rounds towards 0."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def down_to_bfloat16(x):
    """Returns the largest bfloat16 up to fp32 x."""
    bits = x.to(tl.int32, bitcast=True)
    return (tl.where(bits < 0, bits + 0xFFFF, bits) >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)


@triton.jit
def hadamard(x, ROWS: tl.constexpr, DIM_PADDED: tl.constexpr, STAGES: tl.constexpr):
    """Returns [ROWS, DIM_PADDED] in fp32 times Sylvester's matrix of 1 and -1 for each 2 ** STAGES dimensions.

    Each stage puts sums of neighbours before their differences, so that all stages have one form (Pease 1968).
    """
    SIZE: tl.constexpr = 1 << STAGES
    COUNT: tl.constexpr = ROWS * DIM_PADDED // SIZE
    x = tl.reshape(x, [COUNT, SIZE])
    for _ in tl.static_range(STAGES):
        first, second = tl.split(tl.reshape(x, [COUNT, SIZE // 2, 2]))
        x = tl.reshape(tl.permute(tl.join(first + second, first - second), [0, 2, 1]), [COUNT, SIZE])
    return tl.reshape(x, [ROWS, DIM_PADDED])


@triton.jit
def transformed(x, factor, dtype: tl.constexpr, ROWS: tl.constexpr, DIM_PADDED: tl.constexpr, STAGES: tl.constexpr):
    """Returns [ROWS, DIM_PADDED] times the Hadamard matrix, whose elements have the size `factor`, as `dtype`."""
    sums = hadamard(x.to(tl.float32), ROWS=ROWS, DIM_PADDED=DIM_PADDED, STAGES=STAGES)
    return tl.fma(sums, factor, 0.0).to(dtype)  # a product alone would be fused with the difference to an offset


@triton.jit
def divisor(scale):
    """Returns scales of codes, 1 in place of 0: the codes of zeros are zeros."""
    return tl.where(scale == 0.0, 1.0, scale)
