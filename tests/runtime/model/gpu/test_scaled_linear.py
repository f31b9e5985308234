"""fp8 activations against rounding in torch, on a GPU with e4m3, or in the interpreter with `torch._scaled_mm` of the CPU."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.model.linear.gpu import GpuShape, PackedTritonLinear
from phalanx_runtime.model.linear.packed.pack import quantize_fp8
from phalanx_runtime.model.linear.packed.reference import DequantizedLinear
from phalanx_runtime.model.linear.packed.weight import FP8, Format, Fp8Weight, unpack
from phalanx_runtime.model.linear.scaled import MAX_UNROUNDED_ROWS, ScaledLinear, make_triton_linear
from tests.runtime.model.gpu.launches import launches_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
ROWS = MAX_UNROUNDED_ROWS + 1
GPU = GpuShape()


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, torch.bfloat16)


def make(weight: torch.Tensor | Fp8Weight, bias: torch.Tensor | None = None, gpu: GpuShape = GPU) -> ScaledLinear:
    linear = make_triton_linear(weight, bias, "fp8", gpu)
    assert isinstance(linear, ScaledLinear)
    return linear


@pytest.mark.slow
@settings(max_examples=4)
@given(
    inputs=st.integers(1, 300) | st.just(1500),
    outputs=st.sampled_from([16, 48]),
    biased=st.booleans(),
    strided=st.booleans(),
    seed=st.integers(0, 99),
)
def test_many_rows_are_rounded_with_a_scale_each(inputs: int, outputs: int, biased: bool, strided: bool, seed: int) -> None:
    weight, bias = noise(seed, outputs, inputs), noise(seed + 1, outputs) if biased else None
    x = noise(seed + 2, ROWS, inputs + 8 * strided)[:, :inputs] * torch.rand(ROWS, 1, device=DEVICE).bfloat16()
    rounded = quantize_fp8(x).dequantize(torch.float64)
    expected = rounded @ quantize_fp8(weight).dequantize(torch.float64).t() + (0 if bias is None else bias.double())
    linear, results, residual = make(weight, bias), [], noise(seed + 3, ROWS, outputs)
    total = residual.double() + expected
    assert launches_of(lambda: results.append(linear(x))) == ["phalanx::quantize_rows", "aten::_scaled_mm"]
    tolerance = 2**-7 * float(expected.abs().max())
    torch.testing.assert_close(results[0].double(), expected, rtol=2**-7, atol=tolerance)
    linear.add_to(residual, x)
    torch.testing.assert_close(residual.double(), total, rtol=2**-6, atol=2 * tolerance)


def test_rounding_is_to_the_nearest_even_value() -> None:
    """All values of e4m3, and the middle of each two, with a scale of 1."""
    values = torch.arange(127, dtype=torch.uint8).view(FP8).double()
    x = torch.cat((values, (values[1:] + values[:-1]) / 2, -values)).to(DEVICE, torch.float32)
    rows = torch.cat((x, torch.full((1,), 448.0, device=DEVICE)))[None, :].contiguous()
    words, scales = torch.empty(1, 128, dtype=torch.int32, device=DEVICE), torch.empty(1, 1, device=DEVICE)
    torch.ops.phalanx.quantize_rows(rows, words, scales, 32)
    assert scales.item() == 1.0
    assert torch.equal(unpack(words, 8, 32)[:, : rows.shape[1]].view(FP8).float(), rows.to(FP8).float())


def test_few_rows_are_not_rounded() -> None:
    linear, x, residual = make(noise(1, 16, 40)), noise(2, 1, 40), noise(3, 1, 16)
    exact = DequantizedLinear(linear.packed.weight, None)(x.double())
    results: list[torch.Tensor] = []
    expected = residual.double() + exact
    assert launches_of(lambda: results.append(linear(x))) == ["phalanx::multiply_packed"]
    assert launches_of(lambda: linear.add_to(residual, x)) == ["phalanx::multiply_packed"]
    torch.testing.assert_close(results[0].double(), exact, rtol=2**-6, atol=2**-6)
    torch.testing.assert_close(residual.double(), expected, rtol=2**-6, atol=2**-6)


@pytest.mark.parametrize(
    ("weight", "kind", "gpu", "expected"),
    [
        (noise(1, 16, 32), "fp8", GPU, ScaledLinear),
        (noise(1, 16, 32), "fp8", GpuShape(has_fp8=False), PackedTritonLinear),
        (noise(1, 16, 32).half(), "fp8", GPU, PackedTritonLinear),
        (noise(1, 15, 32), "fp8", GPU, PackedTritonLinear),
        (noise(1, 16, 32), "int8", GPU, PackedTritonLinear),
    ],
    ids=["bf16", "old device", "fp16", "outputs", "int8"],
)
def test_activations_are_rounded_only_where_the_device_multiplies_them(
    weight: torch.Tensor, kind: Format, gpu: GpuShape, expected: type
) -> None:
    assert isinstance(make_triton_linear(weight, None, kind, gpu), expected)


def test_blocks_are_multiplied_unrounded() -> None:
    values = noise(1, 16, 256).to(FP8)
    weight = Fp8Weight(values=values, scales=torch.ones(16, 2, device=DEVICE), group=128, dtype=torch.bfloat16)
    assert isinstance(make_triton_linear(weight, None, "fp8", GPU), PackedTritonLinear)


def test_fake_tensors_of_a_gpu_pass() -> None:
    with FakeTensorMode(), torch.no_grad():
        linear = make(torch.empty(32, 64, dtype=torch.bfloat16, device="cuda"))
        x = torch.empty(ROWS, 64, dtype=torch.bfloat16, device="cuda")
        assert launches_of(lambda: linear(x)) == ["phalanx::quantize_rows", "aten::_scaled_mm"]
        assert linear(x).shape == (ROWS, 32)
        assert launches_of(lambda: linear(x[:5])) == ["phalanx::multiply_packed"]
