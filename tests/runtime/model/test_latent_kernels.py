"""The CPU kernels over latents against `DenseAttention`: keys that are the values too, in every format, at DeepSeek's sizes."""

import pytest
import torch

from phalanx_runtime.model.attention.cpu import NativeAttention
from phalanx_runtime.model.attention.dense import DenseAttention
from phalanx_runtime.model.attention.paged import AttentionChunk, AttentionParams, LayerCache, StepBatch
from tests.runtime.model.compressed import compress
from tests.runtime.model.decode_cases import TOLERANCE, Case, case
from tests.runtime.model.targets import compiled

DIM = 512 + 64
PARAMS = AttentionParams(scale=0.05)
FORMATS = ["auto", "int8", "fp8", "int4"]


def latents(one: Case, kv_cache_dtype: str) -> Case:
    """Returns the step over pages without values."""
    pages = one.cache if kv_cache_dtype == "auto" else compress(one.cache, kv_cache_dtype)
    one.cache = LayerCache(pages.k, pages.k, pages.k_scales, pages.k_scales, format=pages.format)
    return one


def assert_close(actual: torch.Tensor, expected: torch.Tensor) -> None:
    """Also up to the rounding of large numbers."""
    tolerance = TOLERANCE[actual.dtype]
    torch.testing.assert_close(actual.float(), expected.float(), rtol=tolerance / 2, atol=tolerance)


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("heads", [4, 16, 128])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_decodes_equal_the_definition(dtype: torch.dtype, heads: int, kv_cache_dtype: str) -> None:
    one, native = latents(case([1, 17, 600], 16, heads, 1, DIM, dtype), kv_cache_dtype), NativeAttention(compiled("native"))
    assert_close(one.attended(native, PARAMS), one.attended(DenseAttention(), PARAMS))
    assert native.num_decoded == 3, "the kernel was not used"


@pytest.mark.parametrize("kv_cache_dtype", FORMATS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_chunks_equal_the_definition(dtype: torch.dtype, kv_cache_dtype: str) -> None:
    kernels = compiled("native")
    if kv_cache_dtype == "auto" and (dtype == torch.float32 or not kernels.has_bf16_dot):
        pytest.skip("torch computes these chunks")
    size, length, wide = 19, 75, torch.randn(19, 17, DIM, generator=torch.Generator().manual_seed(1)).to(dtype)
    one = latents(case([length], 16, 16, 1, DIM, dtype), kv_cache_dtype)
    table, at = one.batch.bands[0].tables[0], torch.arange(length - size, length)
    empty = torch.empty(0, dtype=torch.int64)
    chunk = AttentionChunk(start=0, size=size, length=length, cache_rows=empty, masks={}, table=table)
    slots = table[at // 16] * 16 + at % 16
    batch = StepBatch(tokens=empty, positions=empty, slots=slots, bands=[], chunks=[chunk], logits_indices=empty)
    q, k = wide[:, :16], wide[:, 16:]
    native = NativeAttention(kernels)
    outputs = [attention(q, k, k, one.cache, batch, PARAMS) for attention in (native, DenseAttention())]
    assert_close(*outputs)
    assert native.num_prefilled == size, "the kernel was not used"
