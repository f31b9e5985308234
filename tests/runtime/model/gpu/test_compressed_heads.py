"""`prepare_heads` for compressed pages, on the GPU, or in the interpreter without one: transforms, codes and scales."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.model.attention.compression import NO_STEPS, compress, restore
from phalanx_runtime.model.attention.feedback import shifted_back
from phalanx_runtime.model.attention.page_format import FORMATS, e2m5_numbers, encode, hadamard_transform
from phalanx_runtime.model.attention.paged import LayerCache, transform, write_pages
from phalanx_runtime.model.decoder.gpu import TritonOps
from phalanx_runtime.model.layers import HeadNorm, TorchOps
from tests.examples import examples
from tests.runtime.model.compressed import copied, make_rounding, same_pages
from tests.runtime.model.gpu.launches import launches_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
EPS = 1e-5
TOLERANCE = {torch.float16: 8e-3, torch.float32: 2e-5}
formats = pytest.mark.parametrize("name", FORMATS)


def noise(seed: int, *shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype)


def pages(name: str, kv_heads: int, page: int, dim: int) -> LayerCache:
    """Four pages whose bytes are 7."""
    format = FORMATS[name]
    sizes = [(format.code_dim(dim), format.dtype)] * 2 + [(format.num_scales(dim), torch.bfloat16)] * 2
    return LayerCache(
        *(torch.full((4, kv_heads, page, size), 7, dtype=dtype, device=DEVICE) for size, dtype in sizes), format=format
    )


def stored(part: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    return part.view(-1, part.shape[-1])[slots]


def check_codes(cache: LayerCache, slots: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> None:
    """Codes and scales are those of the reference for these keys, which are transformed, and values: bit by bit."""
    assert cache.format is not None and cache.k_scales is not None and cache.v_scales is not None
    for x, codes, scales in ((k, cache.k, cache.k_scales), (v, cache.v, cache.v_scales)):
        expected_codes, expected_scales = encode(cache.format, x)
        assert torch.equal(stored(codes, slots), expected_codes.flatten(0, 1))
        found, expected = (part.view(torch.int16) for part in (stored(scales, slots), expected_scales.flatten(0, 1)))
        assert torch.equal(found, expected)


@settings(max_examples=examples(15))
@given(
    name=st.sampled_from(list(FORMATS)),
    heads=st.integers(1, 6),
    kv_heads=st.integers(1, 4),
    dim=st.sampled_from([16, 64, 80, 96, 128, 192, 256]),
    share=st.sampled_from([0.0, 0.5, 0.75, 1.0]),
    norm=st.sampled_from([None, "own", "float32"]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    empty=st.sets(st.integers(0, 3)),
    seed=st.integers(0, 99),
)
def test_heads_are_transformed_and_written_as_codes(
    name: str,
    heads: int,
    kv_heads: int,
    dim: int,
    share: float,
    norm: str | None,
    dtype: torch.dtype,
    empty: set[int],
    seed: int,
) -> None:
    if dtype == torch.float32 and dim > 128:
        dtype = torch.float16  # wider heads of float32 are computed by torch
    tokens, rotated, page = 4, int(dim * share), 8
    qkv = noise(seed, tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    weights = [noise(seed + i, dim, dtype=torch.float32 if norm == "float32" else dtype) for i in range(2)]
    head_norm = None if norm is None else HeadNorm(weights[0], weights[1], EPS)
    angles = (noise(1, tokens, 1, rotated, dtype=dtype), noise(2, tokens, 1, rotated, dtype=dtype)) if rotated else None
    cache, before = pages(name, kv_heads, page, dim), pages(name, kv_heads, page, dim)
    slots = torch.randperm(4 * kv_heads * page, generator=torch.Generator().manual_seed(seed))[: tokens * kv_heads].to(DEVICE)
    kept = torch.tensor([token for token in range(tokens) if token not in empty], dtype=torch.int64, device=DEVICE)
    kept_slots = slots.view(tokens, -1)[kept].view(-1)

    expected = TorchOps().prepare_heads(qkv.clone(), head_norm, angles, cache, slots)
    expected_q, expected_k = transform(expected.q, expected.k, cache)
    slots.view(tokens, -1)[sorted(empty)] = -1
    results: list[Any] = []
    prepare = TritonOps().prepare_heads
    assert launches_of(lambda: results.append(prepare(qkv, head_norm, angles, cache, slots))) == ["phalanx::compress_heads"]
    found = results[0]
    assert found.is_written and not expected.is_written
    tolerance = TOLERANCE[dtype]
    for result, reference in ((found.q, expected_q), (found.k, expected_k), (found.v, expected.v)):
        torch.testing.assert_close(result, reference, rtol=tolerance, atol=2 * tolerance * float(expected_k.abs().max()))
    check_codes(cache, kept_slots, found.k[kept], found.v[kept])
    others = torch.ones(4 * kv_heads * page, dtype=torch.bool, device=DEVICE)
    others[kept_slots] = False
    for part, known in zip(cache.tensors, before.tensors, strict=True):
        assert torch.equal(stored(part, others), stored(known, others)), "a slot of no token was written"


@settings(max_examples=20)
@given(
    name=st.sampled_from(list(FORMATS)),
    spread=st.floats(1, 9),
    shift=st.sampled_from([0.0, 100.0, -100.0]),
    seed=st.integers(0, 99),
)
def test_codes_of_any_numbers_are_those_of_the_reference(name: str, spread: float, shift: float, seed: int) -> None:
    """Ties, subnormal fp8, zeros, offsets far from zero, and dimensions of any size."""
    kv_heads, dim = 2, 64
    v = noise(seed, 8, kv_heads, dim) * spread ** noise(seed + 1, dim) + shift
    v[0], v[1, 0] = 0, torch.arange(dim, device=DEVICE) - 31.5
    v[2, 1, 1:] *= 1e-4
    cache, slots = pages(name, kv_heads, 8, dim), torch.arange(8 * kv_heads, device=DEVICE)
    heads = compress(torch.cat((v, v), 1), v, cache, slots, NO_STEPS)
    check_codes(cache, slots, heads[:, kv_heads:], v)


@formats
def test_every_code_of_values_is_read_back(name: str) -> None:
    """A head whose values are all codes."""
    format = FORMATS[name]
    numbers = {"int8": torch.arange(-127.0, 128), "int4": torch.arange(16.0), "fp8": torch.arange(256, dtype=torch.uint8)}[name]
    if name == "fp8":
        numbers = e2m5_numbers(numbers)
    largest = numbers.abs().max()
    v = torch.zeros(16, 1, 64)
    v.view(-1)[: len(numbers)] = numbers
    v[:, 0, 0] = largest if name != "int4" else 0.0
    v[:, 0, 63] = 15.0 if name == "int4" else -largest
    v = v.to(DEVICE)
    cache, slots = pages(name, 1, 8, 64), torch.arange(16, device=DEVICE)
    compress(torch.cat((v, v), 1), v, cache, slots, NO_STEPS)
    assert cache.v_scales is not None
    decoded = format.decode(stored(cache.v, slots), stored(cache.v_scales, slots), torch.float32)
    assert torch.equal(decoded, v[:, 0])


@pytest.mark.slow
@settings(max_examples=examples(8))
@given(
    name=st.sampled_from(list(FORMATS)),
    heads=st.integers(1, 3),
    kv_heads=st.integers(1, 2),
    tokens=st.integers(1, 19),
    dim=st.sampled_from([16, 48, 64, 80]),
    dtype=st.sampled_from([torch.float16, torch.float32]),
    empty=st.sets(st.integers(0, 18), max_size=3),
    seed=st.integers(0, 99),
)
def test_calibrated_heads_get_the_codes_of_the_reference(
    name: str, heads: int, kv_heads: int, tokens: int, dim: int, dtype: torch.dtype, empty: set[int], seed: int
) -> None:
    """Keys and values are transformed, and for equal transformed ones codes and scales are equal bit by bit."""
    qkv = 3 * noise(seed, tokens, heads + 2 * kv_heads, dim, dtype=dtype)
    qkv[tokens // 2, heads:] = 0
    rounding = make_rounding(dim, seed, kv_heads).to(DEVICE)
    cache = replace(pages(name, kv_heads, 16, dim), rounding=rounding)
    expected = copied(cache)
    slots = torch.randperm(4 * kv_heads * 16, generator=torch.Generator().manual_seed(seed))[: tokens * kv_heads].to(DEVICE)
    slots.view(tokens, -1)[[token for token in empty if token < tokens]] = -1
    results: list[Any] = []
    found = launches_of(lambda: results.append(TritonOps().prepare_heads(qkv, None, None, cache, slots)))
    assert found == ["phalanx::compress_heads", "phalanx::round_in_turn"]
    (made,) = results
    tolerance = 16 * TOLERANCE[dtype]
    transformed = torch.split(hadamard_transform(qkv), [heads, kv_heads, kv_heads], 1)
    for result, reference in zip((made.q, made.k, made.v), transformed, strict=True):
        torch.testing.assert_close(result, reference, rtol=tolerance, atol=tolerance)
    kept = (slots.view(tokens, -1)[:, 0] >= 0).nonzero().flatten()
    write_pages(made.k[kept], made.v[kept], expected, slots.view(tokens, -1)[kept].flatten())
    assert same_pages(cache, expected)


@pytest.mark.parametrize("dim", [16, 80, 256])
def test_results_over_calibrated_pages_are_restored(dim: int) -> None:
    out, shift = noise(1, 3, 6, dim), noise(2, 2, dim)
    expected = hadamard_transform(shifted_back(out, shift))
    restore(out, shift)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
