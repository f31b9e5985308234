"""Linears with weights as GGUF files have them, against the weights that the library `gguf` dequantises."""

import pytest
import torch
from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.model.ggml.weight import KINDS, GgmlPart, GgmlWeight, join_ggml
from phalanx_runtime.model.layers import gate
from phalanx_runtime.model.linear.cpu import NativeGated, NativeLinear, Precision, interleave
from phalanx_runtime.model.linear.ggml import GgmlProduct, GgmlRows, make_ggml_blocks, make_ggml_product
from phalanx_runtime.model.linear.integer import IntStack
from phalanx_runtime.model.linear.linear import DenseLinear, PlainGated, StackedLinear
from phalanx_runtime.model.linear.packed.reference import DequantizedLinear
from phalanx_runtime.model.linear.packed.weight import Format
from phalanx_runtime.model.linear.registry import Kernels, make_gated, make_linear
from tests.examples import examples
from tests.runtime.checkpoint.gguf_files import SCALES, random_blocks
from tests.runtime.model.targets import TARGETS, Ones, compiled

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ORDERED = sorted(KINDS)
NARROW_ROWS = 48
"""As in ggml.cpp."""


def weight_of(
    kind: GGMLQuantizationType, outputs: int, inputs: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> GgmlWeight:
    raw = torch.from_numpy(random_blocks(kind, (outputs, inputs), seed))
    return GgmlWeight(parts=(GgmlPart(kind, raw),), inputs=inputs, dtype=dtype)


def close(actual: torch.Tensor, expected: torch.Tensor, terms: torch.Tensor) -> None:
    """Asserts equality within rounding of the result and another order of the sums of `terms`, absolute values.

    In bf16 NARROW_ROWS rows and more are multiplied with weights that are rounded to bf16.
    """
    is_narrow = actual.dtype == torch.bfloat16
    of_weights = 2**-8 if is_narrow and len(actual) >= NARROW_ROWS else 3e-5 if is_narrow else 2e-6
    bound = expected.abs() * (2**-8 if is_narrow else 0.0) + terms * of_weights + 1e-6
    assert bool(((actual.double() - expected).abs() <= bound).all())


def test_all_formats_are_tested() -> None:
    assert set(SCALES) == KINDS


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("kind", ORDERED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("target", TARGETS)
@settings(max_examples=examples(12), deadline=None)
@given(data=st.data())
def test_kernel_equals_dequantised_weights(
    target: str, kind: GGMLQuantizationType, dtype: torch.dtype, data: st.DataObject
) -> None:
    size = GGML_QUANT_SIZES[kind][0]
    outputs, rows = data.draw(st.integers(1, 230)), data.draw(st.sampled_from([1, 2, 3, 4, 7, 8, 13, 16, 31, 33, 47, 48, 66]))
    inputs, seed = size * data.draw(st.integers(1, 4)), data.draw(st.integers(0, 99))
    weight, bias = weight_of(kind, outputs, inputs, seed), torch.randn(outputs) if seed % 2 else None
    linear = NativeLinear(make_ggml_product(compiled(target), weight, bias))
    x, exact = torch.randn(rows, inputs + 6).to(dtype)[:, :inputs], weight.dequantize(torch.float64)
    expected = x.double() @ exact.t() + (0 if bias is None else bias)
    terms = x.double().abs() @ exact.abs().t() + (0 if bias is None else bias.abs())
    close(linear(x), expected, terms)
    residual = torch.randn(rows, outputs).to(dtype)
    sums = residual.double() + expected
    linear.add_to(residual, x)
    close(residual, sums, terms)


@pytest.mark.parametrize("kind", ORDERED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("target", TARGETS)
def test_gated_kernel_equals_dequantised_weights(target: str, kind: GGMLQuantizationType) -> None:
    for inner, biased in [(48, False), (33, True)]:
        weight, bias = weight_of(kind, 2 * inner, 256), torch.randn(2 * inner) if biased else None
        wide = None if bias is None else interleave(bias)
        gated = NativeGated(make_ggml_product(compiled(target), weight.by_outputs(interleave), wide), inner)
        exact = DenseLinear(weight.dequantize(torch.float32), bias)
        for rows in (1, 3, 17):
            x = torch.randn(rows, 256)
            torch.testing.assert_close(gated(x), gate(exact(x), "silu"), rtol=1e-5, atol=1e-4)
            torch.testing.assert_close(gated.with_addition(x, Ones()), gate(exact(x) + 1, "silu"), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("kind", ORDERED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("target", TARGETS)
def test_rows_are_bitwise_those_of_the_definition(target: str, kind: GGMLQuantizationType, dtype: torch.dtype) -> None:
    weight, index = weight_of(kind, 37, 512, dtype=dtype), torch.tensor([36, 0, 17, 16, 36])
    rows = GgmlRows(make_ggml_product(compiled(target), weight, None), dtype).index_select(0, index)
    expected = GgmlRows(weight, dtype).index_select(0, index)
    assert rows.dtype == dtype and torch.equal(expected, weight.dequantize(dtype)[index])
    torch.testing.assert_close(rows, expected, rtol=2**-8 if dtype == torch.bfloat16 else 1e-6, atol=1e-7)


@pytest.mark.parametrize("number", [float("inf"), float("nan")], ids=["infinite", "nan"])
@pytest.mark.parametrize("kind", ORDERED, ids=lambda kind: kind.name)
@pytest.mark.parametrize("target", TARGETS)
def test_scales_that_are_no_numbers_spoil_their_output(target: str, kind: GGMLQuantizationType, number: float) -> None:
    weight, at = weight_of(kind, 20, 512), min(SCALES[kind])
    weight.parts[0].raw[17, at : at + 2] = torch.tensor([number], dtype=torch.float16).view(torch.uint8)
    product = make_ggml_product(compiled(target), weight, None)
    for rows, dtype in ((1, torch.float32), (20, torch.float32), (3, torch.bfloat16), (40, torch.bfloat16)):
        is_finite = torch.ones(rows, 20, dtype=torch.bool)
        is_finite[:, 17] = False
        assert torch.equal(NativeLinear(product)(torch.randn(rows, 512).to(dtype)).isfinite(), is_finite), (rows, dtype)
    is_spoilt = ~GgmlRows(product, torch.float32).index_select(0, torch.arange(20)).isfinite()
    assert bool(is_spoilt[17].any()) and not is_spoilt[[*range(17), 18, 19]].any()


@pytest.mark.parametrize("kind", ORDERED, ids=lambda kind: kind.name)
def test_blocks_have_the_bytes_of_the_file(kind: GGMLQuantizationType) -> None:
    (part,) = weight_of(kind, 40, 512).parts
    blocks = make_ggml_blocks(part)
    assert torch.equal(blocks.unpack().raw, part.raw)
    assert make_ggml_blocks(GgmlPart(kind, part.raw[:32])).words.nbytes == part.raw[:32].nbytes


def test_parts_in_several_formats_are_one_product() -> None:
    kinds = [GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q4_K, GGMLQuantizationType.Q6_K]
    weights = [weight_of(kind, outputs, 256, outputs) for kind, outputs in zip(kinds, (23, 24, 9), strict=True)]
    joined, bias, x = join_ggml(weights), torch.randn(56), torch.randn(3, 256)
    assert [part.kind for part in joined.parts] == kinds[1:] and joined.outputs == 56
    linear = make_linear(joined, bias, Kernels(compiled=True))
    assert isinstance(linear, NativeLinear) and isinstance(linear.blocks, GgmlProduct)
    exact = torch.cat([weight.dequantize(torch.float32) for weight in weights])
    torch.testing.assert_close(linear(x), x @ exact.t() + bias, rtol=1e-5, atol=1e-4)
    gated = make_gated(joined, None, "silu", Kernels(compiled=True))
    assert isinstance(gated, PlainGated)
    torch.testing.assert_close(gated(x), gate(x @ exact.t(), "silu"), rtol=1e-4, atol=1e-4)


def test_formats_beside_floats_are_stacked() -> None:
    weight, other, x = weight_of(GGMLQuantizationType.Q8_0, 24, 64), torch.randn(8, 64), torch.randn(3, 64)
    linear = make_linear(IntStack((weight, other)), torch.ones(32), Kernels(compiled=True))
    assert isinstance(linear, StackedLinear) and isinstance(linear.linears[0], NativeLinear)
    expected = x @ torch.cat((weight.dequantize(torch.float32), other)).t() + 1
    torch.testing.assert_close(linear(x), expected, rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("kind", ORDERED, ids=lambda kind: kind.name)
def test_blocks_that_are_cut_are_kept_whole(kind: GGMLQuantizationType) -> None:
    """The kernel multiplies inputs of other ranks with zeros."""
    size, whole = GGML_QUANT_SIZES[kind][0], weight_of(kind, 20, 1024)
    start, stop, (part,) = size + 8, 1000 - size, whole.parts
    of_blocks = slice(1 * part.raw.shape[1] * size // 1024, -(-stop // size) * part.raw.shape[1] * size // 1024)
    cut = GgmlWeight(
        parts=(GgmlPart(kind, part.raw[:, of_blocks].contiguous()),), inputs=stop - start, dtype=torch.float32, skipped=8
    )
    exact, x = whole.dequantize(torch.float32)[:, start:stop], torch.randn(3, stop - start)
    assert torch.equal(cut.dequantize(torch.float32), exact)
    torch.testing.assert_close(make_linear(cut, None, Kernels(compiled=True))(x), x @ exact.t(), rtol=1e-5, atol=1e-4)


def test_weights_without_a_compiler_stay_packed() -> None:
    weight, bias, x = weight_of(GGMLQuantizationType.Q5_K, 40, 256), torch.randn(40), torch.randn(3, 256)
    found = make_linear(weight, bias, Kernels())
    assert isinstance(found, DequantizedLinear) and found.num_bytes == weight.num_bytes + bias.nbytes
    torch.testing.assert_close(make_linear(weight, bias, Kernels(compiled=True))(x), found(x), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_weights_that_are_rounded_again_have_their_kernel(precision: Precision | Format) -> None:
    weight, x = weight_of(GGMLQuantizationType.Q5_K, 64, 256), torch.randn(3, 256)
    kernels, exact = Kernels(compiled=True, precision=precision), weight.dequantize(torch.float32)
    rounded, gated = make_linear(weight, None, kernels), make_gated(weight, None, "silu", kernels)
    assert isinstance(rounded, NativeLinear) and not isinstance(rounded.blocks, GgmlProduct)
    assert isinstance(gated, NativeGated) and not isinstance(gated.blocks, GgmlProduct)
    assert torch.equal(rounded(x), make_linear(exact, None, kernels)(x))
    assert torch.equal(gated(x), make_gated(exact, None, "silu", kernels)(x))
