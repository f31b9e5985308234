"""Linears of a single row equal those of the layers, with norm, bias, residual and gate, on any shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.layers import TorchOps
from phalanx_runtime.model.linear.linear import DenseLinear, PlainGated
from phalanx_runtime.model.linear.single_row import NARROW, WIDE, TritonRowLinears, row_tile
from tests.examples import examples

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
EPS = 0.1
BOUNDS = {torch.float32: 1e-5, torch.float16: 4e-3} | ({torch.bfloat16: 3e-2} if DEVICE == "cuda" else {})
"""Of `error`. The reference rounds the normalised row too."""


def drawn(*shape: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    chance = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(*shape, generator=chance).to(DEVICE, dtype)


def error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Of sums of about 1, which may cancel."""
    return float((found.double() - expected.double()).norm() / (expected.double().norm() + expected.numel() ** 0.5))


@settings(max_examples=examples(20))
@given(
    outputs=st.integers(1, 70),
    inputs=st.sampled_from([16, 96, 576, 1024, 1040, 2100, 4096]),
    dtype=st.sampled_from(list(BOUNDS)),
    has_bias=st.booleans(),
    norm=st.sampled_from([None, "same", "float32"]),
    activation=st.sampled_from(["silu", "gelu_tanh"]),
)
def test_single_rows_of_any_shape(
    outputs: int, inputs: int, dtype: torch.dtype, has_bias: bool, norm: str | None, activation: Activation
) -> None:
    rows, reference, bound = TritonRowLinears(), TorchOps(), BOUNDS[dtype]
    x, residual = drawn(1, inputs, dtype=dtype), drawn(1, outputs, dtype=dtype, seed=1)
    weight = None if norm is None else drawn(inputs, dtype=dtype if norm == "same" else torch.float32, seed=2)
    bias = drawn(2 * outputs, dtype=dtype, seed=3) if has_bias else None
    linear = DenseLinear(drawn(2 * outputs, inputs, dtype=dtype, seed=4) / inputs**0.5, bias)
    h = x if weight is None else reference.norm(x, weight, EPS)
    assert error(rows.project(x, weight, linear, EPS), linear(h)) < bound
    assert error(rows.gate(x, weight, PlainGated(linear, activation), EPS), PlainGated(linear, activation)(h)) < bound
    half = DenseLinear(linear.weight[:outputs], None if bias is None else bias[:outputs])
    expected = residual + half(x)
    rows.add(half, x, residual)
    assert error(residual, expected) < bound
    assert rows.num_launched == 3


def test_a_tile_covers_narrow_and_wide_inputs() -> None:
    for form in ("", "add", "silu", "gelu_tanh"):
        assert row_tile(1024, form) in NARROW.values() and row_tile(1040, form) in WIDE.values()


@pytest.mark.parametrize(("rows", "dtype"), [(2, torch.float32), (1, torch.float64)])
def test_others_are_not_supported(rows: int, dtype: torch.dtype) -> None:
    assert not TritonRowLinears().supports(torch.zeros(rows, 4, dtype=dtype))
    assert TritonRowLinears().supports(torch.zeros(1, 4))
