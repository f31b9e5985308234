"""The kernels between the linears against torch, on the GPU, or in the interpreter without one."""

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.model.attention.paged import LayerCache, write_pages
from phalanx_runtime.model.decoder.gpu import MAX_PARTS, MAX_ROW_BYTES, TritonOps
from phalanx_runtime.model.families import Activation
from phalanx_runtime.model.layers import HeadNorm, TorchOps
from tests.examples import examples
from tests.runtime.model.gpu.launches import launches_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = st.sampled_from([torch.bfloat16, torch.float16, torch.float32])
TOLERANCE = {torch.bfloat16: 3e-2, torch.float16: 4e-3, torch.float32: 1e-5}
"""A few roundings of a value apart. The interpreter rounds to bfloat16 towards 0, to float16 as a GPU does."""
SIZES = st.sampled_from([16, 72, 96, 576, 1000])
EPS = 1e-5


class Noise:
    """Random tensors on the device."""

    def __init__(self, seed: int) -> None:
        self._chance = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype: torch.dtype) -> torch.Tensor:
        return torch.randn(*shape, generator=self._chance).to(DEVICE, dtype)

    def slots(self, count: int, rows: int) -> torch.Tensor:
        return torch.randperm(rows, generator=self._chance)[:count].to(DEVICE)


def close(result: torch.Tensor, expected: torch.Tensor) -> None:
    tolerance = TOLERANCE[expected.dtype]
    torch.testing.assert_close(result, expected, rtol=tolerance, atol=2 * tolerance)


def same(result: torch.Tensor, *forms: torch.Tensor) -> None:
    """Float16 is rounded where the reference, in one of its forms, rounds it: only sums differ, which flips few roundings.

    A rounding that is left out flips more than a fifth of them. Of few numbers two may.
    """
    for expected in forms:
        close(result, expected)
    if result.dtype == torch.float16:
        assert min(int((result != expected).sum()) for expected in forms) <= max(2, 0.03 * result.numel())


def sums(x: torch.Tensor, y: torch.Tensor, after: torch.Tensor | None) -> list[torch.Tensor]:
    """Returns x plus y normalised by `after`; on a GPU also as compilers fuse it, without a rounding of the product."""
    plain = x.clone()
    TorchOps().add_norm(plain, y, after, None, EPS)
    if DEVICE.type == "cpu" or after is None or torch.float32 in (x.dtype, after.dtype):
        return [plain]
    normed = TorchOps().norm(y, torch.ones_like(after), EPS)
    return [plain, (x.double() + normed.double() * after.double()).to(x.dtype)]


def check_sum(x: torch.Tensor, result: torch.Tensor, forms: list[torch.Tensor], before: torch.Tensor | None) -> None:
    """x: after the sum. `result`: the same normalised by `before`."""
    same(x, *forms)
    if before is None:
        assert result is x
    else:
        same(result, TorchOps().norm(x, before, EPS))


@settings(max_examples=30)
@given(
    size=SIZES, rows=st.integers(1, 5), dtype=DTYPES, wide_weight=st.booleans(), strided=st.booleans(), seed=st.integers(0, 99)
)
def test_norm(size: int, rows: int, dtype: torch.dtype, wide_weight: bool, strided: bool, seed: int) -> None:
    noise, ops = Noise(seed), TritonOps()
    x = noise(rows, size + 8 * strided, dtype=dtype)[:, :size]
    weight = noise(size, dtype=torch.float32 if wide_weight else dtype)
    results = []
    assert launches_of(lambda: results.append(ops.norm(x, weight, EPS))) == ["phalanx::add_norm"]
    same(results[0], TorchOps().norm(x, weight, EPS))


@settings(max_examples=40)
@given(
    size=SIZES,
    rows=st.integers(1, 5),
    dtype=DTYPES,
    wide_weight=st.booleans(),
    has_after=st.booleans(),
    has_before=st.booleans(),
    seed=st.integers(0, 99),
)
def test_add_norm(
    size: int, rows: int, dtype: torch.dtype, wide_weight: bool, has_after: bool, has_before: bool, seed: int
) -> None:
    noise, ops = Noise(seed), TritonOps()
    x, y = noise(rows, size, dtype=dtype), noise(rows, size, dtype=dtype)
    after, before = (
        noise(size, dtype=torch.float32 if wide_weight else dtype) if has else None for has in (has_after, has_before)
    )
    expected, results = sums(x, y, after), []
    assert launches_of(lambda: results.append(ops.add_norm(x, y, after, before, EPS))) == ["phalanx::add_norm"]
    check_sum(x, results[0], expected, before)


@settings(max_examples=40)
@given(
    size=SIZES,
    rows=st.integers(1, 4),
    num_parts=st.integers(2, MAX_PARTS),
    dtype=DTYPES,
    has_after=st.booleans(),
    has_before=st.booleans(),
    seed=st.integers(0, 99),
)
def test_parts_of_ranks_are_added_in_order(
    size: int, rows: int, num_parts: int, dtype: torch.dtype, has_after: bool, has_before: bool, seed: int
) -> None:
    noise, ops = Noise(seed), TritonOps()
    x, parts = noise(rows, size, dtype=dtype), [noise(rows, size, dtype=dtype) for _ in range(num_parts)]
    after, before = (noise(size, dtype=dtype) if has else None for has in (has_after, has_before))
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part.float()
    expected, results = sums(x, total.to(dtype), after), []
    assert ops.can_add_parts(x, after, before)
    assert launches_of(lambda: results.append(ops.add_parts_norm(x, parts, after, before, EPS))) == ["phalanx::add_parts_norm"]
    check_sum(x, results[0], expected, before)


@settings(max_examples=30)
@given(
    size=SIZES | st.just(5000),
    rows=st.integers(1, 3),
    dtype=DTYPES,
    activation=st.sampled_from(["silu", "gelu_tanh"]),
    seed=st.integers(0, 99),
)
def test_gate(size: int, rows: int, dtype: torch.dtype, activation: Activation, seed: int) -> None:
    ops, gate_up = TritonOps(), 4 * Noise(seed)(rows, 2 * size, dtype=dtype)
    results = []
    assert launches_of(lambda: results.append(ops.gate(gate_up, activation))) == ["phalanx::gate"]
    expected = TorchOps().gate(gate_up, activation)
    (same if activation == "silu" else close)(results[0], expected)  # torch's tanh cancels digits of small results


def test_gate_of_large_values_is_finite() -> None:
    for activation in ("silu", "gelu_tanh"):
        gate_up = torch.tensor([[-200.0, -1e4, 200.0, 1e4, 1, 1, 1, 1]], device=DEVICE)
        assert TritonOps().gate(gate_up, activation).tolist() == [[0, 0, 200, 1e4]], activation


@settings(max_examples=examples(60))
@given(
    heads=st.integers(1, 9),
    kv_heads=st.integers(1, 5),
    dim=st.sampled_from([16, 64, 80, 96, 128, 256]),
    share=st.sampled_from([0.0, 0.25, 0.5, 0.75, 1.0]),
    norm=st.sampled_from([None, "own", "float32"]),
    page=st.sampled_from([8, 16]),
    dtype=DTYPES,
    empty=st.sets(st.integers(0, 3)),
    seed=st.integers(0, 99),
)
def test_prepare_heads(
    heads: int,
    kv_heads: int,
    dim: int,
    share: float,
    norm: str | None,
    page: int,
    dtype: torch.dtype,
    empty: set[int],
    seed: int,
) -> None:
    noise, tokens, rotated = Noise(seed), 4, int(dim * share)
    qkv = noise(tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    weights = [noise(dim, dtype=torch.float32 if norm == "float32" else dtype) for _ in range(2)]
    head_norm = None if norm is None else HeadNorm(weights[0], weights[1], EPS)
    angles = (noise(tokens, 1, rotated, dtype=dtype), noise(tokens, 1, rotated, dtype=dtype)) if rotated else None
    cache = LayerCache(*(noise(4, kv_heads, page, dim, dtype=dtype) for _ in range(2)))
    expected_cache = LayerCache(cache.k.clone(), cache.v.clone())
    slots = noise.slots(tokens * kv_heads, 4 * kv_heads * page)
    kept = torch.tensor([token for token in range(tokens) if token not in empty], dtype=torch.int64, device=DEVICE)

    expected = TorchOps().prepare_heads(qkv.clone(), head_norm, angles, expected_cache, slots)
    write_pages(expected.k[kept], expected.v[kept], expected_cache, slots.view(tokens, -1)[kept].view(-1))
    slots.view(tokens, -1)[sorted(empty)] = -1
    results: list[Any] = []
    prepare = TritonOps().prepare_heads
    assert launches_of(lambda: results.append(prepare(qkv, head_norm, angles, cache, slots))) == ["phalanx::prepare_heads"]
    assert results[0].is_written and not expected.is_written
    for name in ("q", "k", "v"):
        close(getattr(results[0], name), getattr(expected, name))
    close(cache.k, expected_cache.k)
    close(cache.v, expected_cache.v)
    assert torch.equal(qkv[:, :heads], results[0].q), "in place"


def test_other_layouts_are_computed_by_torch() -> None:
    ops = TritonOps()
    wide = torch.ones(2, 16, dtype=torch.float64, device=DEVICE)
    assert ops.norm(wide, wide[0], EPS).dtype == torch.float64
    assert ops.add_norm(wide, wide.clone(), wide[0], wide[0], EPS).dtype == torch.float64
    assert ops.gate(wide, "silu").shape == (2, 8)
    long = torch.ones(1, MAX_ROW_BYTES // 4 + 1, device=DEVICE)
    close(ops.norm(long, long[0], EPS), long)
    close(ops.add_norm(long, long.clone(), None, None, EPS), 2 * torch.ones_like(long))
    qkv = torch.ones(2, 3, 16, dtype=torch.float64, device=DEVICE)
    cache = LayerCache(*(torch.zeros(2, 1, 8, 16, dtype=torch.float64, device=DEVICE) for _ in range(2)))
    assert not ops.prepare_heads(qkv, None, None, cache, torch.arange(2, device=DEVICE)).is_written
    assert ops.num_launched == 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_no_tokens(dtype: torch.dtype) -> None:
    x = torch.empty(0, 32, dtype=dtype, device=DEVICE)
    assert TritonOps().norm(x, x.new_ones(32), EPS).shape == (0, 32)
    assert TritonOps().gate(x, "silu").shape == (0, 16)
