"""Compressed pages: bounds of the rounding, and the kernels against the reference."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.errors import ModelError
from phalanx_runtime.model.attention.cpu import NativeAttention
from phalanx_runtime.model.attention.dense import DenseAttention
from phalanx_runtime.model.attention.page_format import FORMATS, choose_format, e2m5_numbers, encode, hadamard_transform
from phalanx_runtime.model.attention.paged import AttentionParams, LayerCache, transform, write_pages
from phalanx_runtime.model.protocol import KvLayout
from phalanx_runtime.rank.memory.kv_cache import head_bytes, make_caches, page_bytes
from tests.runtime.model.compressed import compress, copied, same_pages
from tests.runtime.model.decode_cases import TOLERANCE, case
from tests.runtime.model.targets import TARGETS, compiled

DIMS = [16, 32, 64, 80, 96, 128, 256]
formats = pytest.mark.parametrize("name", FORMATS)


def numbers(dim: int, spread: float, seed: int, rows: int = 20) -> torch.Tensor:
    """Rows whose dimensions differ in size by powers of `spread`; one row is zero."""
    chance = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, 2, dim, generator=chance) * spread ** torch.randn(dim, generator=chance)
    x[3] = 0
    return x


@formats
@given(dim=st.sampled_from(DIMS), spread=st.floats(1, 8), seed=st.integers(0, 1 << 20))
@settings(max_examples=40, deadline=None)
def test_errors_are_within_half_a_code(name: str, dim: int, spread: float, seed: int) -> None:
    x, format = numbers(dim, spread, seed), FORMATS[name]
    codes, scales = encode(format, x)
    assert codes.shape == (*x.shape[:-1], format.code_dim(dim)) and codes.dtype == format.dtype
    assert scales.shape == (*x.shape[:-1], format.num_scales(dim)) and scales.dtype == torch.bfloat16
    error = (format.decode(codes, scales, torch.float32) - x).abs()
    largest = x.abs().amax(-1, keepdim=True)
    step = {"int8": largest / 127, "fp8": x.abs() / 32 + largest / 7.875 / 32, "int4": 2.0 * largest / 15}[name]
    assert (error <= 0.51 * step * (1 + 2**-7)).all()
    assert (error[3] == 0).all()


def test_codes_of_fp8_are_numbers_of_e2m5() -> None:
    expected = []
    for code in range(256):
        exponent, fraction = code >> 5 & 3, (code & 31) / 32
        size = fraction if exponent == 0 else (1 + fraction) * 2.0 ** (exponent - 1)
        expected.append(-size if code & 128 else size)
    codes = torch.arange(256, dtype=torch.uint8)
    assert e2m5_numbers(codes).tolist() == expected
    assert FORMATS["fp8"].pack(torch.tensor(expected)).tolist() == codes.tolist()
    halves = torch.tensor(expected[:127]) / 2 + torch.tensor(expected[1:128]) / 2
    assert (FORMATS["fp8"].pack(halves) % 2 == 0).all(), "ties go to the even code"


@pytest.mark.parametrize(("freedom", "least", "most"), [(0, 1.05, 1.2), (4, 0.4, 0.65)], ids=["normal", "Student's t"])
def test_errors_of_fp8_beside_those_of_int8(freedom: int, least: float, most: float) -> None:
    chance = torch.Generator().manual_seed(0)
    x = torch.randn(4096, 64, generator=chance)
    if freedom:
        x /= torch.randn(freedom, 4096, 64, generator=chance).square().mean(0).sqrt()
    fp8, int8 = (
        (format.decode(*encode(format, x), torch.float32) - x).square().mean() for format in (FORMATS["fp8"], FORMATS["int8"])
    )
    assert least < fp8 / int8 < most


@pytest.mark.parametrize("dim", DIMS)
def test_hadamard_transform_keeps_products_and_inverts_itself(dim: int) -> None:
    q, k = numbers(dim, 2.0, 1).double(), numbers(dim, 2.0, 2).double()
    torch.testing.assert_close((hadamard_transform(q) * hadamard_transform(k)).sum(-1), (q * k).sum(-1))
    torch.testing.assert_close(hadamard_transform(hadamard_transform(q)), q)


def test_offsets_far_from_zero_lose_no_number() -> None:
    x = 100 + torch.rand(4, 1, 64, generator=torch.Generator().manual_seed(0))
    format = FORMATS["int4"]
    assert (format.decode(*encode(format, x), torch.float32) - x).abs().max() < 2 * 0.5 / 15 + 0.04
    negative = format.decode(*encode(format, -x), torch.float32)
    assert (negative + x).abs().max() < 2 * 0.5 / 15 + 0.04


@pytest.mark.parametrize(("name", "least"), [("int8", 1.9), ("fp8", 1.9), ("int4", 3.4)])
@pytest.mark.parametrize("dim", [64, 128])
def test_pages_hold_more_tokens_than_bf16(name: str, least: float, dim: int) -> None:
    kv, cpu = KvLayout(2, (dim, dim), (None, None)), torch.device("cpu")
    (plain, small) = (make_caches(kv, 10, 16, torch.bfloat16, cpu, format) for format in (None, FORMATS[name]))
    sizes = [sum(part.nbytes for cache in caches for part in cache.tensors) for caches in (plain, small)]
    assert sizes == [10 * page_bytes(kv, 16, torch.bfloat16, format) for format in (None, FORMATS[name])]
    assert sizes[0] / sizes[1] >= least
    assert sizes[0] / sizes[1] == head_bytes(dim, torch.bfloat16) / head_bytes(dim, torch.bfloat16, FORMATS[name])


@pytest.mark.parametrize(("name", "tokens"), [("auto", 46_603), ("fp8", 90_382), ("int8", 90_382), ("int4", 165_700)])
def test_guide_states_the_tokens_of_a_gib(name: str, tokens: int) -> None:
    """SmolLM2-135M: 30 layers of 3 KV heads of 64 dimensions."""
    kv = KvLayout(3, (64,) * 30, (None,) * 30)
    assert 16 * (1 << 30) // page_bytes(kv, 16, torch.bfloat16, choose_format(name, (64,))) == tokens
    guide = (Path(__file__).parents[3] / "docs" / "kv-cache.md").read_text()
    assert any(line.startswith(f"| `{name}`") and f"| {tokens:,}" in line for line in guide.splitlines())


def test_unsupported_heads_are_refused() -> None:
    assert choose_format("auto", (7,)) is None
    assert choose_format("int8", (7,)) is FORMATS["int8"]
    for dim in (7, 160):
        with pytest.raises(ModelError, match=f"heads of {dim} are not {-(-dim // 64)} of them; use int8 or fp8"):
            choose_format("int4", (64, dim))


@pytest.mark.parametrize("target", TARGETS)
@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_kernels_write_the_codes_of_the_reference(target: str, name: str, dtype: torch.dtype) -> None:
    library = compiled(target)
    for dim in DIMS:
        one = case([1, 5, 16, 40], 16, 6, 2, dim, dtype)
        one.cache = compress(one.cache, name)
        expected, k, v = copied(one.cache), numbers(dim, 3.0, dim, 4).to(dtype), numbers(dim, 3.0, dim + 1, 4).to(dtype)
        _, k_transformed = transform(k, k, one.cache)
        native = NativeAttention(library)
        native(one.q.contiguous(), k, v, one.cache, one.batch, AttentionParams())
        assert native.num_decoded == 4 or dim % library.lanes, "the kernel was not used"
        wide = LayerCache(*(part.clone() for part in expected.tensors), format=expected.format)
        write_pages(k_transformed, v, wide, one.batch.slots)
        assert torch.equal(one.cache.v, wide.v)
        assert torch.equal(one.cache.v_scales.view(torch.int16), wide.v_scales.view(torch.int16))  # type: ignore[union-attr]
        is_same = (one.cache.k == wide.k).float().mean()
        assert is_same > 0.99, "transformed keys differ in their last bit, which seldom changes a code"


@pytest.mark.parametrize("target", TARGETS)
@formats
@pytest.mark.parametrize("lost", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("dim", [64, 96])
def test_lost_numbers_are_read_back_as_lost(target: str, name: str, lost: float, dim: int) -> None:
    one = case([1, 5, 16, 40], 16, 6, 2, dim, torch.float32)
    one.cache = compress(one.cache, name)
    k, v = numbers(dim, 3.0, dim, 4), numbers(dim, 3.0, dim + 1, 4)
    v[1, 0, 5] = v[2, 1, dim - 1] = lost
    expected, native = copied(one.cache), NativeAttention(compiled(target))
    out = native(one.q.contiguous(), k, v, one.cache, one.batch, AttentionParams())
    assert native.num_decoded == 4, "the kernel was not used"
    assert (~out.view(4, 2, -1)[[1, 2], [0, 1]].isfinite()).any(-1).all(), "no request reads a plausible number instead"
    write_pages(k, v, expected, one.batch.slots)
    is_lost = []
    for cache in (expected, one.cache):
        values = cache.read(torch.arange(cache.v.shape[0] * 2), torch.float32)[1]
        is_lost.append(~values.view(-1, dim)[one.batch.slots].isfinite())
    assert torch.equal(*is_lost)
    assert is_lost[0].sum() == 2 * (dim if name != "int4" else dim // -(-dim // 64))


@pytest.mark.parametrize("target", TARGETS)
@formats
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("window", [None, 33])
def test_decodes_equal_attention_over_expanded_pages(target: str, name: str, dtype: torch.dtype, window: int | None) -> None:
    for dim in (32, 64, 96, 128, 192, 256):
        one = case([1, 5, 16, 17, 300, 700, 1300], 16, 6, 2, dim, dtype)
        one.cache = compress(one.cache, name)
        native = NativeAttention(compiled(target))
        actual = one.attended(native, AttentionParams(window=window))
        assert native.num_decoded == len(one.q), "the kernel was not used"
        expected = DenseAttention()(
            *transform(one.q.float(), one.k.float(), one.cache),
            v=-one.k.float(),
            cache=one.cache,
            batch=one.batch,
            params=AttentionParams(window=window),
            is_written=True,
        )
        torch.testing.assert_close(actual.float(), expected, rtol=0, atol=2 * TOLERANCE[dtype])


@formats
def test_zeroed_page_changes_the_result(name: str) -> None:
    one = case([40], 16, 6, 2, 64, torch.float32)
    one.cache = compress(one.cache, name)
    before = one.attended(DenseAttention(), AttentionParams())
    kept = copied(one.cache)
    for part in one.cache.tensors:
        part[one.batch.bands[0].tables[0, 0]] = 0
    assert not same_pages(kept, one.cache)
    assert (one.attended(DenseAttention(), AttentionParams()) - before).abs().max() > 0.01
