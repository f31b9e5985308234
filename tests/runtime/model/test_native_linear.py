"""Compiled linears and operations against their references, for each instruction set and number of rows."""

import pytest
import torch

from phalanx_runtime.model.attention.cpu import NativeAttention
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.model.attention.registry import choose_attention
from phalanx_runtime.model.decoder.cpu import NativeOps
from phalanx_runtime.model.decoder.load import choose_ops
from phalanx_runtime.model.layers import HeadNorm, TorchOps, gate, rms_norm
from phalanx_runtime.model.linear.cpu import NativeGated, NativeLinear, Precision, can_multiply, interleave, make_blocks, quantize
from phalanx_runtime.model.linear.linear import DenseLinear, PlainGated, QuantizedLinear
from phalanx_runtime.model.linear.registry import Kernels, choose_kernels, make_gated, make_linear
from phalanx_runtime.model.processor import Processor
from phalanx_runtime.model.rope import rotate
from tests.runtime.model.targets import TARGETS, compiled

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROWS = [1, 2, 3, 5, 7, 8, 15, 17, 66, 130]
CPU = torch.device("cpu")


def noise(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def rounded_weight(weight: torch.Tensor, precision: Precision) -> torch.Tensor:
    """Returns the weight after rounding, in fp32."""
    if precision == "bf16":
        return weight.bfloat16().float()
    rounded, scales = quantize(weight)
    return rounded.float() * scales[:, None]


def close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Asserts equality within rounding and another summation order."""
    relative = 2**-8 if actual.dtype == torch.bfloat16 else 2e-6
    torch.testing.assert_close(actual.float(), expected, rtol=relative, atol=float(expected.abs().max()) * relative)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("target", TARGETS)
def test_linear_equals_its_reference_implementation(target: str, dtype: torch.dtype, precision: Precision) -> None:
    for outputs, inputs, biased in [(48, 64, False), (250, 38, True), (16, 2, True), (7, 130, False), (400, 96, True)]:
        weight, bias = noise(outputs, inputs), noise(outputs) if biased else None
        linear = NativeLinear(make_blocks(compiled(target), weight, bias, precision))
        exact = DenseLinear(rounded_weight(weight, precision), bias)
        for rows in ROWS:
            wide = noise(rows, inputs + 6, dtype=dtype)
            x = wide[:, :inputs]
            close(linear(x), exact(x.float()))
            residual = noise(rows, outputs, dtype=dtype)
            expected = residual.float() + exact(x.float())
            linear.add_to(residual, x)
            close(residual, expected)


@pytest.mark.parametrize("precision", ["bf16", "int8"])
@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("target", TARGETS)
def test_gated_linear_equals_its_reference_implementation(target: str, dtype: torch.dtype, precision: Precision) -> None:
    for inner, inputs, biased in [(48, 64, False), (33, 38, True), (200, 96, True)]:
        weight, bias = noise(2 * inner, inputs), noise(2 * inner) if biased else None
        wide = None if bias is None else interleave(bias)
        linear = NativeGated(make_blocks(compiled(target), interleave(weight), wide, precision), inner)
        exact = DenseLinear(rounded_weight(weight, precision), bias)
        for rows in ROWS:
            x = noise(rows, inputs, dtype=dtype)
            close(linear(x), gate(exact(x.float()), "silu"))


@pytest.mark.parametrize("dtype", DTYPES.values(), ids=DTYPES.keys())
@pytest.mark.parametrize("target", TARGETS)
def test_steps_equal_their_twins(target: str, dtype: torch.dtype) -> None:
    ops = NativeOps(compiled(target))
    for rows, size in [(1, 64), (5, 41), (300, 96)]:
        x, weight = noise(rows, size + 3, dtype=dtype)[:, :size], noise(size)
        for scale in (weight, weight.to(dtype)):
            close(ops.norm(x, scale, 1e-5), rms_norm(x.float(), scale.float(), 1e-5))
    for rows, heads, dim, rotated_dims in [(1, 3, 16, 16), (40, 5, 64, 64), (9, 2, 40, 20)]:
        x = noise(rows, heads + 1, dim, dtype=dtype)
        cos, sin = noise(rows, 1, rotated_dims, dtype=dtype), noise(rows + 1, 1, rotated_dims, dtype=dtype)[:rows]
        expected = rotate(x[:, :heads].float(), (cos.float(), sin.float()))
        rest = x[:, heads:].clone()
        close(ops.rotate(x[:, :heads], (cos, sin)), expected)
        assert torch.equal(x[:, heads:], rest)
    for rows, dim in [(1, 16), (40, 64), (9, 41)]:
        qkv, weights = noise(rows, 9, dim, dtype=dtype), noise(2, dim)
        cache = LayerCache(*(torch.empty(1, 2, 16, dim, dtype=dtype) for _ in range(2)))
        for q, k in (weights, weights.to(dtype)):
            wide = TorchOps().prepare_heads(qkv.float(), HeadNorm(q.float(), k.float(), 1e-5), None, cache, torch.empty(0))
            heads_of = ops.prepare_heads(qkv.clone(), HeadNorm(q, k, 1e-5), None, cache, torch.empty(0))
            close(heads_of.q, wide.q)
            close(heads_of.k, wide.k)
            assert torch.equal(heads_of.v, qkv[:, 7:])


def test_weights_are_compiled_only_when_bf16_holds_them_exactly() -> None:
    compiled("native")
    kernels = Kernels(compiled=True)
    rough, exact = torch.full((32, 16), 1 / 3), torch.full((32, 16), 0.375)
    assert isinstance(make_linear(exact, None, kernels), NativeLinear)
    assert isinstance(make_linear(rough, None, kernels), DenseLinear)
    assert isinstance(make_linear(rough.bfloat16(), None, kernels), NativeLinear)
    assert isinstance(make_linear(rough, None, Kernels(compiled=True, precision="int8")), NativeLinear)
    assert isinstance(make_gated(exact, None, "silu", kernels), NativeGated)
    assert isinstance(make_gated(exact, None, "gelu_tanh", kernels), PlainGated)
    assert not can_multiply(noise(4, 3), torch.float32), "pairs of inputs"
    assert not can_multiply(noise(4, 4), torch.float64)


def test_int8_without_a_compiler_gives_the_same_numbers() -> None:
    weight, bias, x = noise(40, 32), noise(40), noise(3, 32)
    reference = make_linear(weight, bias, Kernels(precision="int8"))
    assert isinstance(reference, QuantizedLinear) and reference.num_bytes < weight.nbytes / 2
    native = NativeLinear(make_blocks(compiled("native"), weight, bias, "int8"))
    torch.testing.assert_close(native(x), reference(x), rtol=1e-5, atol=1e-5)
    residual = torch.ones(3, 40)
    reference.add_to(residual, x)
    torch.testing.assert_close(residual, reference(x) + 1)


def test_tied_embedding_is_read_from_the_heads_blocks() -> None:
    weight = noise(37, 48, dtype=torch.bfloat16)
    blocks = make_blocks(compiled("native"), weight, None, "bf16")
    assert torch.equal(blocks.index_select(0, torch.tensor([36, 0, 15, 16])), weight[[36, 0, 15, 16]])


def test_this_machine_uses_its_compiled_kernels() -> None:
    compiled("native")
    assert choose_kernels(torch.bfloat16, CPU, Processor(), 0, 1).compiled
    assert isinstance(choose_attention(CPU), NativeAttention)
    assert isinstance(choose_ops(CPU), NativeOps)
