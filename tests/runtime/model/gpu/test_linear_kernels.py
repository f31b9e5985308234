"""Linears with quantised weights against their torch reference, on the GPU, or in the interpreter without one."""

from dataclasses import replace
from typing import get_args

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from phalanx_runtime.model.adapters.gpu import TritonProducts
from phalanx_runtime.model.adapters.products import LinearFactors, TorchProducts
from phalanx_runtime.model.linear.gpu import MAX_ROWS, MAX_SPLITS, GpuShape, PackedTritonLinear, num_splits, tile_of
from phalanx_runtime.model.linear.packed.pack import pack, quantize_fp8
from phalanx_runtime.model.linear.packed.reference import DequantizedLinear
from phalanx_runtime.model.linear.packed.weight import Format, Fp8Weight, PackedWeight
from phalanx_runtime.rank.step.adapters import adapter_rows
from tests.examples import examples
from tests.runtime.model.gpu.launches import launches_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = (torch.bfloat16, torch.float16, torch.float32)
FORMATS = get_args(Format)
RELATIVE = {torch.bfloat16: 2**-6, torch.float16: 2**-9, torch.float32: 2e-6}
"""Roundings of weights and results; the interpreter rounds bfloat16 towards 0."""
ROUNDED = {"int8": 1 / 127, "int4": 1 / 15, "fp8": 2**-4}
"""Largest error of a weight as a share of the largest weight (int8, int4: half of the range of a group or row) or of itself."""


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def close(result: torch.Tensor, expected: torch.Tensor, terms: float = 0.0) -> None:
    """`terms`: largest sum of the absolute products of a result, whose float32 roundings do not shrink when they cancel."""
    relative = RELATIVE[result.dtype]
    absolute = float(expected.abs().max()) * relative + terms * 2**-22 + 1e-30
    torch.testing.assert_close(result.double(), expected, rtol=relative, atol=absolute)


def terms_of(weight: PackedWeight, x: torch.Tensor) -> float:
    return float((x.double().abs() @ weight.dequantize(torch.float32).double().abs().T).max())


@settings(max_examples=examples(20))
@given(
    kind=st.sampled_from(FORMATS),
    rows=st.integers(1, 6) | st.sampled_from([17, 40]),
    outputs=st.integers(1, 40),
    inputs=st.integers(1, 40) | st.sampled_from([128, 250, 513]),
    dtype=st.sampled_from(DTYPES),
    biased=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_linear(
    kind: Format, rows: int, outputs: int, inputs: int, dtype: torch.dtype, biased: bool, strided: bool, seed: int
) -> None:
    if dtype == torch.bfloat16 and DEVICE.type == "cpu":
        rows = min(rows, MAX_ROWS[4 if kind == "int4" else 8])  # the interpreter multiplies tiles of bfloat16 as integers
    weight = pack(noise(seed, outputs, inputs), kind)
    bias = noise(seed + 1, outputs, dtype=dtype) if biased else None
    x = noise(seed + 2, rows, inputs + 8 * strided, dtype=dtype)[:, :inputs]
    residual = noise(seed + 3, rows, outputs + 8 * strided, dtype=dtype)[:, :outputs]
    exact = DequantizedLinear(weight, None if bias is None else bias.double())(x.double())
    expected, terms = residual.double() + exact, terms_of(weight, x)
    linear, results = PackedTritonLinear(weight, bias), []
    assert launches_of(lambda: results.append(linear(x))) == ["phalanx::multiply_packed"]
    close(results[0], exact, terms)
    assert launches_of(lambda: linear.add_to(residual, x)) == ["phalanx::multiply_packed"]
    close(residual, expected, terms)


@settings(max_examples=20)
@given(
    rows=st.sampled_from([1, 3, 9]),
    outputs=st.integers(1, 40),
    inputs=st.sampled_from([48, 100, 300]),
    group=st.sampled_from([16, 32, 48, 64, 128, 192]),
    seed=st.integers(0, 99),
)
@example(rows=1, outputs=1, inputs=100, group=48, seed=67)
def test_fp8_with_groups_of_any_multiple_of_16(rows: int, outputs: int, inputs: int, group: int, seed: int) -> None:
    values = quantize_fp8(noise(seed, outputs, inputs)).values
    scales = noise(seed + 1, outputs, -(-inputs // group)).abs()
    weight = Fp8Weight(values=values, scales=scales, group=group, dtype=torch.float32)
    packed, x = pack(weight, "fp8"), noise(seed + 2, rows, inputs)
    assert torch.equal(packed.dequantize(torch.float32), weight.dequantize(torch.float32))
    close(PackedTritonLinear(packed, None)(x), DequantizedLinear(packed, None)(x.double()), terms_of(packed, x))


@pytest.mark.parametrize("kind", FORMATS)
def test_splits_of_the_inputs_sum_to_the_whole(kind: Format) -> None:
    weight, x = pack(noise(1, 40, 4 * 128 * MAX_SPLITS + 40), kind), noise(2, 5, 4 * 128 * MAX_SPLITS + 40)
    split, whole = GpuShape(), GpuShape(num_multiprocessors=1)
    assert [num_splits(tile_of(5, 9), 5, weight, shape.num_multiprocessors) for shape in (split, whole)] == [MAX_SPLITS, 2]
    linear, expected = PackedTritonLinear(weight, None, split), DequantizedLinear(weight, None)(x.double())
    for _ in range(2):  # the second call needs arrivals of 0
        close(linear(x), expected)
    close(PackedTritonLinear(weight, None, whole)(x), expected)


@settings(max_examples=30)
@given(kind=st.sampled_from(FORMATS), outputs=st.integers(1, 9), inputs=st.integers(1, 300), seed=st.integers(0, 99))
def test_quantised_weights_are_near_the_originals(kind: Format, outputs: int, inputs: int, seed: int) -> None:
    weight = noise(seed, outputs, inputs)
    packed = pack(weight, kind)
    error = (packed.dequantize(torch.float64) - weight).abs()
    bound = ROUNDED[kind] * (weight.abs() if kind == "fp8" else weight.abs().max())
    assert (error <= bound + 1e-3 * weight.abs().max()).all()
    assert packed.words.shape[1] % packed.width == 0
    few = {"int8": 1.0, "fp8": 1.0, "int4": 0.5 + 4 / 128}[kind]
    assert packed.num_bytes <= outputs * (few * (inputs + 128) + 8)


def test_fp8_holds_subnormal_and_large_values() -> None:
    """All 254 finite values of e4m3."""
    values = torch.arange(256, dtype=torch.uint8, device=DEVICE).view(torch.float8_e4m3fn)
    values = values[~values.float().isnan()][None, :].contiguous()
    scales = torch.full((1, 1), 0.5, device=DEVICE)
    weight = pack(Fp8Weight(values=values, scales=scales, group=254, dtype=torch.float32), "fp8")
    identity = torch.eye(254, device=DEVICE)
    assert torch.equal(PackedTritonLinear(weight, None)(identity), 0.5 * values.float().t())
    assert torch.equal(PackedTritonLinear(weight, None)(identity[7:8]), 0.5 * values.float()[:, 7:8])


def test_no_rows_launch_nothing() -> None:
    linear = PackedTritonLinear(pack(noise(1, 8, 16), "int4"), None)
    x = noise(2, 0, 16)
    assert launches_of(lambda: linear(x)) == []
    assert linear(x).shape == (0, 8)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("inputs", "outputs", "rank"), [(40, 24, 5), (144, 136, 16), (130, 32, 33)])
def test_adapters_of_several_slots(dtype: torch.dtype, inputs: int, outputs: int, rank: int) -> None:
    """Adapters of several ranks, one without this linear, tokens without one, more than one tile of rows; y is strided."""
    a, b = noise(1, 4, rank, inputs, dtype=dtype), noise(2, 4, rank, outputs, dtype=dtype)
    ranks = torch.tensor([rank, 0, 3, rank - 1], device=DEVICE)
    factors = LinearFactors(a=a, b=b, ranks=ranks, outputs=slice(7, 7 + outputs))
    step = adapter_rows(
        [1, 0, 4, 3, 2, 1], [1, 2, 20, 3, 2, 1], lambda arrays: [torch.from_numpy(array).to(DEVICE) for array in arrays]
    )
    assert step is not None
    x, y = noise(3, 29, inputs + 8, dtype=dtype)[:, :inputs], noise(4, 29, outputs + 9, dtype=dtype)
    expected = y.double()
    TorchProducts([replace(factors, a=a.double(), b=b.double())]).add(expected, x.double(), step, alternates=False)
    launched = launches_of(lambda: TritonProducts([factors]).add(y, x, step, alternates=False))
    assert launched == ["phalanx::shrink_rows", "phalanx::expand_rows"]
    relative = 2**-9 if dtype == torch.float16 else 2e-6
    torch.testing.assert_close(y.double(), expected, rtol=relative, atol=float(expected.abs().max()) * relative)
