"""The decode kernel against `DenseAttention`, in every supported shape."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.model.attention.cpu import NativeAttention, can_decode
from phalanx_runtime.model.attention.dense import DenseAttention
from phalanx_runtime.model.attention.paged import AttentionParams, DecodeBand, StepBatch
from phalanx_runtime.model.native.library import Library
from tests.runtime.model.decode_cases import TOLERANCE, Case, case
from tests.runtime.model.targets import TARGETS, compiled


def check(library: Library, one: Case, params: AttentionParams) -> None:
    native = NativeAttention(library)
    actual = one.attended(native, params).float()
    torch.testing.assert_close(actual, one.attended(DenseAttention(), params).float(), rtol=0, atol=TOLERANCE[one.q.dtype])
    assert native.num_decoded == len(one.q), "the kernel was not used"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_kernel_equals_the_definition(target: str, dtype: torch.dtype, dim: int) -> None:
    check(compiled(target), case([1, 5, 16, 17, 300, 700, 1300], 16, 6, 2, dim, dtype), AttentionParams())


@pytest.mark.parametrize(
    "params",
    [
        AttentionParams(window=7),
        AttentionParams(window=600),
        AttentionParams(scale=0.5),
        AttentionParams(softcap=3.0),
        AttentionParams(sinks=torch.tensor([-1.0, 0.0, 2.0, 9.0])),
        AttentionParams(window=600, slopes=torch.tensor([0.5, 0.01, 0.001, 0.0])),
        AttentionParams(block=20),
    ],
    ids=["window", "window over splits", "scale", "softcap", "sinks", "slopes", "block"],
)
@pytest.mark.parametrize("target", TARGETS)
def test_kernel_exists_for_every_configuration(target: str, params: AttentionParams) -> None:
    check(compiled(target), case([3, 40, 1100], 8, 4, 4, 32, torch.float32), params)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_decodes_with_sinks_and_slopes_use_the_kernel(dtype: torch.dtype) -> None:
    params = AttentionParams(window=700, sinks=torch.linspace(-3, 3, 6).to(dtype), slopes=torch.logspace(-9, -1, 6, base=2))
    check(compiled("native"), case([1, 16, 300, 1300], 16, 6, 2, 64, dtype), params)


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.integers(1, 90), min_size=1, max_size=9),
    page=st.integers(1, 20),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 9),
    window=st.none() | st.integers(1, 60),
)
def test_kernel_reads_any_pages(lengths: list[int], page: int, kv_heads: int, group: int, window: int | None) -> None:
    one = case(lengths, page, kv_heads * group, kv_heads, 32, torch.float32, seed=page)
    check(compiled("native"), one, AttentionParams(window=window))


def test_a_row_gives_the_same_bits_in_any_batch() -> None:
    kernels = compiled("native")
    many = case([900, 30, 1500], 16, 6, 2, 64, torch.float32)
    together = many.attended(NativeAttention(kernels), AttentionParams())
    for row, length in enumerate([900, 30, 1500]):
        whole = many.batch.bands[0]
        table = whole.tables[row : row + 1]
        band = DecodeBand(
            start=0,
            size=1,
            cache_rows=whole.cache_rows,
            masks={},
            tables=table.contiguous(),
            lengths=[length],
            device_lengths=torch.tensor([length]),
        )
        batch = StepBatch(
            tokens=many.batch.tokens,
            positions=many.batch.positions,
            slots=many.batch.slots[row * 2 : row * 2 + 2],
            bands=[band],
            chunks=[],
            logits_indices=whole.cache_rows,
        )
        alone = Case(torch.cat((many.q, many.q[:, :1]), 1)[row : row + 1], many.k[row : row + 1], many.cache, batch)
        assert torch.equal(alone.attended(NativeAttention(kernels), AttentionParams())[0], together[row])


def test_unsupported_shapes_are_reported() -> None:
    kernels = compiled("native")
    assert can_decode(kernels, 4, 2, 64, torch.float32)
    assert not can_decode(kernels, 4, 2, kernels.lanes + 1, torch.float32)
    assert not can_decode(kernels, 4, 2, kernels.lanes, torch.bfloat16), "bf16 is read in pairs"
    assert not can_decode(kernels, 4, 2, 64, torch.float64)
    assert not can_decode(kernels, 258, 2, 64, torch.float32), "too many query heads per KV head"
