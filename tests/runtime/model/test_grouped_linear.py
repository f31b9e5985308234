"""Linears with packed codes against their dequantised weights, for each instruction set, format and number of rows."""

from dataclasses import replace

import pytest
import torch

from phalanx_runtime.model.layers import gate
from phalanx_runtime.model.linear.cpu import NativeGated, NativeLinear, interleave
from phalanx_runtime.model.linear.grouped import GroupedProduct, make_grouped_blocks, make_grouped_product
from phalanx_runtime.model.linear.integer import IntStack, IntWeight, join
from phalanx_runtime.model.linear.linear import DenseLinear, PlainGated, StackedLinear
from phalanx_runtime.model.linear.nested import find_nested
from phalanx_runtime.model.linear.packed.pack import as_int4
from phalanx_runtime.model.linear.packed.reference import DequantizedLinear
from phalanx_runtime.model.linear.registry import Kernels, make_gated, make_linear
from tests.runtime.model.targets import TARGETS, Ones, compiled

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = [1, 2, 3, 8, 17, 66]
FORMATS = {
    "4 bits, half scales": (4, torch.float16, False),
    "4 bits, zero points": (4, torch.bfloat16, True),
    "8 bits, float scales": (8, torch.float32, False),
    "8 bits, zero points": (8, torch.float16, True),
    "e4m3": (8, torch.float32, False),
}
"""Bits, dtype of the scales, and whether there are zero points."""


def chance(*numbers: int) -> torch.Generator:
    return torch.Generator().manual_seed(sum(numbers))


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=chance(*shape)).to(dtype)


def random_weight(shape: tuple[int, int], group: int, name: str, *, is_ordered: bool = False) -> IntWeight:
    """Returns a weight of any codes, scales and zero points; its scales include subnormal halves."""
    bits, dtype, has_zeros = FORMATS[name]
    groups = torch.arange(shape[1]) // group
    size = (shape[0], int(groups[-1]) + 1)
    scales = torch.rand(size, generator=chance(*size)).sub_(0.5).div_(50)
    scales[0] *= 1e-3
    codes = torch.randint(2**bits, shape, generator=chance(*shape), dtype=torch.uint8)
    if name == "e4m3":
        scales, codes = scales / 16, codes.where(codes & 127 != 127, 126)  # numbers
        codes[:, :7] = torch.arange(7) + 1  # below 2^-6
    return IntWeight(
        codes=codes,
        scales=scales.to(dtype),
        zeros=torch.randint(2**bits, size, generator=chance(*size), dtype=torch.uint8) if has_zeros else None,
        groups=groups[torch.randperm(shape[1], generator=chance(*shape))] if is_ordered else groups,
        bits=bits,
        dtype=torch.float32,
        is_e4m3=name == "e4m3",
    )


TABLES = {
    "powers of two": (torch.float8_e8m0fnu, False),
    "e4m3 and factors": (torch.float8_e4m3fn, True),
    "float scales": (torch.float32, False),
}
"""Dtype of the scales, and whether outputs have factors."""


def table_weight(shape: tuple[int, int], group: int, name: str) -> IntWeight:
    """Returns a weight of any codes, scales and values; its values are bf16 numbers, which kernels keep in bf16 too."""
    dtype, has_factors = TABLES[name]
    groups = torch.arange(shape[1]) // group
    scales = torch.randint(1, 127, (shape[0], int(groups[-1]) + 1), generator=chance(*shape), dtype=torch.uint8)
    scales = torch.rand(scales.shape, generator=chance(*shape)) if dtype == torch.float32 else scales.view(dtype)
    return IntWeight(
        codes=torch.randint(16, shape, generator=chance(*shape), dtype=torch.uint8),
        scales=scales,
        zeros=None,
        groups=groups,
        bits=4,
        dtype=torch.float32,
        table=noise(16, dtype=torch.bfloat16).float(),
        factors=noise(shape[0]) if has_factors else None,
    )


@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("target", TARGETS)
def test_kernel_looks_values_up(target: str, dtype: torch.dtype, name: str) -> None:
    for shape, group in [((48, 64), 32), ((23, 88), 16)]:
        weight, bias = table_weight(shape, group, name), noise(shape[0])
        product, exact = make_grouped_product(compiled(target), weight, bias), weight.dequantize(torch.float64)
        assert torch.equal(product.codes.dequantize(torch.float64), exact)
        linear = NativeLinear(product)
        for rows in (1, 3, 66):
            x = noise(rows, shape[1], dtype=dtype)
            close(linear(x), x.double() @ exact.t() + bias, x.double().abs() @ exact.abs().t() + bias.abs())


@pytest.mark.parametrize("name", TABLES)
def test_gated_kernel_looks_values_up(name: str) -> None:
    weight, x = table_weight((66, 64), 16, name), noise(3, 64)
    weight = replace(weight, scales=weight.scales.float().clamp(1e-3, 0.2))
    expected = gate(DenseLinear(weight.dequantize(torch.float32), None)(x), "silu")
    product = make_grouped_product(compiled("native"), weight.by_outputs(interleave), None)
    torch.testing.assert_close(NativeGated(product, len(weight.codes) // 2)(x), expected, rtol=1e-5, atol=1e-5)


def nested_weight(shape: tuple[int, int], group: int, segment: int) -> IntWeight:
    """Returns a weight whose scales are in codes; `segment`: groups with an outer scale."""
    weight = table_weight(shape, group, "float scales")
    codes = torch.randint(256, weight.scales.shape, generator=chance(*shape), dtype=torch.uint8)
    outer = torch.rand(shape[0], -(-codes.shape[1] // segment), generator=chance(*shape)).repeat_interleave(segment, 1)
    nested = find_nested(torch.linspace(-1, 1, 256), outer[:, : codes.shape[1]], 2.0)
    assert nested is not None and nested.outer.shape[1] == -(-codes.shape[1] // segment)
    return replace(weight, scales=codes, nested=nested)


@pytest.mark.parametrize(("shape", "group", "segment"), [((48, 64), 32, 2), ((23, 88), 16, 6), ((40, 160), 16, 4)])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("target", TARGETS)
def test_kernel_looks_scales_up(target: str, dtype: torch.dtype, shape: tuple[int, int], group: int, segment: int) -> None:
    weight, bias = nested_weight(shape, group, segment), noise(shape[0])
    assert weight.nested is not None
    plain = weight.with_plain_scales()
    assert torch.equal(plain.scales, weight.nested.expand(weight.scales)) and plain.scales.dtype == torch.float32
    product, exact = make_grouped_product(compiled(target), weight, bias), plain.dequantize(torch.float64)
    assert torch.equal(weight.dequantize(torch.float64), exact)
    assert torch.equal(product.codes.dequantize(torch.float64), exact)
    linear = NativeLinear(product)
    for rows in (1, 3, 66):
        x = noise(rows, shape[1], dtype=dtype)
        close(linear(x), x.double() @ exact.t() + bias, x.double().abs() @ exact.abs().t() + bias.abs())


def test_gated_kernel_looks_scales_up() -> None:
    weight, x = nested_weight((66, 64), 16, 2), noise(3, 64)
    expected = gate(DenseLinear(weight.dequantize(torch.float32), None)(x), "silu")
    product = make_grouped_product(compiled("native"), weight.by_outputs(interleave), None)
    torch.testing.assert_close(NativeGated(product, len(weight.codes) // 2)(x), expected, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("segments", [(4, 4), (4, 2)], ids=["equal", "other"])
def test_nested_scales_are_joined_if_they_agree(segments: tuple[int, int]) -> None:
    parts = [nested_weight((16, 64), 8, segment) for segment in segments]
    joined = join(parts)
    assert joined is not None and (joined.nested is None) == (segments[0] != segments[1])
    expected = torch.cat([part.dequantize(torch.float32) for part in parts])
    assert torch.equal(joined.dequantize(torch.float32), expected)


def test_outer_scales_of_single_groups_are_expanded() -> None:
    """They would take more memory than scales in fp32."""
    assert find_nested(torch.zeros(256), torch.arange(12.0).view(2, 6), 0.0) is None


def test_smallest_scales_are_kept() -> None:
    least = torch.zeros((16, 1), dtype=torch.uint8)
    for dtype, code in ((torch.float8_e8m0fnu, 0), (torch.float8_e4m3fn, 1)):
        weight = replace(table_weight((16, 8), 8, "float scales"), scales=(least + code).view(dtype))
        x, exact = torch.full((1, 8), 2.0**100), weight.dequantize(torch.float64)
        close(
            NativeLinear(make_grouped_product(compiled("native"), weight, None))(x),
            x.double() @ exact.t(),
            x.double() @ exact.abs().t(),
        )


def close(actual: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor) -> None:
    """Asserts equality within rounding of the result and another order of the sums of `terms`, absolute values.

    In bf16 many rows are multiplied with weights that are rounded to bf16.
    """
    is_narrow = actual.dtype == torch.bfloat16
    of_weights = 2**-8 if is_narrow and len(actual) >= 8 else 1e-6
    bound = expected.abs() * (2**-8 if is_narrow else 0.0) + terms * of_weights + 1e-6
    assert bool(((actual.double() - expected).abs() <= bound).all())


SHAPES = [((48, 64), 32), ((250, 136), 128), ((7, 130), 64), ((200, 96), 96), ((16, 8), 8)]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("is_ordered", [False, True], ids=["in order", "by activation"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_blocks_hold_any_weight_exactly(name: str, shape: tuple[tuple[int, int], int], is_ordered: bool) -> None:
    weight = random_weight(*shape, name, is_ordered=is_ordered)
    blocks = make_grouped_blocks(weight)
    assert torch.equal(blocks.dequantize(torch.float32), weight.dequantize(torch.float32))
    is_whole = all(size % 8 == 0 for size in weight.groups.bincount().tolist())
    assert (blocks.order is None) == (is_whole and bool((weight.groups.diff() >= 0).all()))


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("target", TARGETS)
def test_kernel_equals_dequantised_weights(target: str, dtype: torch.dtype, name: str) -> None:
    for shape, group in SHAPES:
        weight, bias = random_weight(shape, group, name, is_ordered=group == 64), noise(shape[0])
        linear = NativeLinear(make_grouped_product(compiled(target), weight, bias))
        exact = weight.dequantize(torch.float64)
        for rows in ROWS:
            x = noise(rows, shape[1] + 6, dtype=dtype)[:, : shape[1]]
            expected, terms = x.double() @ exact.t() + bias, x.double().abs() @ weight_terms(weight).t()
            close(linear(x), expected, terms)
            residual = noise(rows, shape[0], dtype=dtype)
            sums = residual.double() + expected
            linear.add_to(residual, x)
            close(residual, sums, terms)


def weight_terms(weight: IntWeight) -> torch.Tensor:
    """Returns the largest number of the sums that each weight has: of the codes and of the zero points."""
    zeros = weight.all_zeros().double() if weight.offsets is None else weight.offsets.double() / weight.scales.double()
    middle = (zeros.abs() + weight.middle)[:, weight.groups] + weight.codes
    return middle * weight.scales.double().abs()[:, weight.groups]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("target", TARGETS)
def test_gated_kernel_equals_dequantised_weights(target: str, dtype: torch.dtype, name: str) -> None:
    for inner, inputs, biased in [(48, 64, False), (33, 40, True)]:
        weight, bias = random_weight((2 * inner, inputs), 32, name), noise(2 * inner) if biased else None
        kernels = compiled(target)
        wide = None if bias is None else interleave(bias)
        gated = NativeGated(make_grouped_product(kernels, weight.by_outputs(interleave), wide), inner)
        for rows in ROWS:
            rounded = dtype if kernels.has_bf16_dot and rows >= 32 else torch.float32
            exact = DenseLinear(weight.dequantize(rounded).float(), bias)
            x = noise(rows, inputs, dtype=dtype)
            expected = gate(exact(x.float()), "silu")
            tolerance = 2**-7 if dtype == torch.bfloat16 else 1e-5
            torch.testing.assert_close(gated(x).float(), expected, rtol=tolerance, atol=tolerance)
            shifted = gate(exact(x.float()) + 1, "silu")
            torch.testing.assert_close(gated.with_addition(x, Ones()).float(), shifted, rtol=2 * tolerance, atol=4 * tolerance)


@pytest.mark.parametrize("target", TARGETS)
def test_int4_rounding_uses_the_kernel(target: str) -> None:
    for inputs in (128, 200, 257):
        weight = as_int4(noise(40, inputs))
        x = noise(5, inputs)
        expected, terms = x.double() @ weight.dequantize(torch.float64).t(), x.double().abs() @ weight_terms(weight).t()
        close(NativeLinear(make_grouped_product(compiled(target), weight, None))(x), expected, terms)
    kernels = Kernels(compiled=True, precision="int4")
    linear, gated = make_linear(noise(40, 128), None, kernels), make_gated(noise(40, 128), None, "silu", kernels)
    assert isinstance(linear, NativeLinear) and isinstance(linear.blocks, GroupedProduct)
    assert isinstance(gated, NativeGated) and isinstance(gated.blocks, GroupedProduct)
    assert isinstance(make_gated(noise(40, 128), None, "gelu_tanh", kernels), PlainGated)


def test_codes_without_a_compiler_stay_packed() -> None:
    weight, bias, x = random_weight((40, 64), 32, "4 bits, zero points"), noise(40), noise(3, 64)
    reference = make_linear(weight, bias, Kernels())
    assert isinstance(reference, DequantizedLinear)
    native = make_linear(weight, bias, Kernels(compiled=True))
    assert isinstance(native, NativeLinear) and native.num_bytes == reference.num_bytes + 8 * 4
    torch.testing.assert_close(native(x), reference(x), rtol=1e-5, atol=1e-5)
    double = make_linear(replace(weight, dtype=torch.float64), None, Kernels(compiled=True))
    assert isinstance(double, DequantizedLinear)


def test_weights_without_common_groups_are_stacked() -> None:
    parts = (random_weight((24, 64), 32, "4 bits, half scales"), noise(8, 64))
    weight, bias, x = IntStack(parts), noise(32), noise(3, 64)
    linear = make_linear(weight, bias, Kernels(compiled=True))
    assert isinstance(linear, StackedLinear) and isinstance(linear.linears[0], NativeLinear)
    torch.testing.assert_close(linear(x), x @ weight.dequantize(torch.float32).t() + bias, rtol=1e-5, atol=1e-5)
    residual = torch.ones(3, 32)
    linear.add_to(residual, x)
    torch.testing.assert_close(residual, linear(x) + 1)
    assert isinstance(make_gated(weight, bias, "silu", Kernels(compiled=True)), PlainGated)


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("name", ["4 bits, half scales", "4 bits, zero points"])
def test_memory_is_that_of_the_file(name: str, group: int) -> None:
    weight = random_weight((512, 1024), group, name)
    stored = 512 * 1024 // 2 + weight.scales.nbytes + (0 if weight.zeros is None else weight.zeros.nbytes // 2)
    assert make_linear(weight, None, Kernels(compiled=True)).num_bytes <= 1.05 * stored


@pytest.mark.parametrize("group", [32, 128])
@pytest.mark.parametrize("name", ["4 bits, half scales", "4 bits, zero points"])
def test_activation_order_takes_the_memory_of_the_file(name: str, group: int) -> None:
    weight = random_weight((512, 1024), group, name, is_ordered=True)
    zeros = 0 if weight.zeros is None else weight.zeros.nbytes // 2
    stored = 512 * 1024 // 2 + weight.scales.nbytes + zeros + 4 * 1024
    assert make_linear(weight, None, Kernels(compiled=True)).num_bytes <= 1.04 * stored


@pytest.mark.parametrize("shape", [(64, 512), (500, 1024)])
@pytest.mark.parametrize("name", ["4 bits, half scales", "4 bits, zero points"])
def test_ordered_small_groups_take_more_memory(name: str, shape: tuple[int, int]) -> None:
    weight = random_weight(shape, 16, name, is_ordered=True)
    zeros = 0 if weight.zeros is None else weight.zeros.nbytes // 2
    stored = shape[0] * shape[1] // 2 + weight.scales.nbytes + zeros + 4 * shape[1]
    assert make_linear(weight, None, Kernels(compiled=True)).num_bytes <= 1.08 * stored
