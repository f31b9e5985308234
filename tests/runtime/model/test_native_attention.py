"""Decode attention that reads pages in place gives the numbers of the definition, in every shape that it takes."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.model.attention.cpu import NativeAttention, decodes
from phalanx_runtime.model.attention.paged import Attention, AttentionForm, DecodeBand, DenseAttention, LayerCache, StepBatch
from phalanx_runtime.model.native.library import Library, library

TARGETS = ["native", "x86-64-v3", "x86-64"]
"""This processor; one with AVX2 and no more; one with neither."""
TOLERANCE = {torch.float32: 2e-5, torch.bfloat16: 2e-2}


def compiled(target: str) -> Library:
    made = library(target)
    if made is None:
        pytest.skip("no compiler here")
    return made


def case(lengths: list[int], page: int, heads: int, kv_heads: int, dim: int, dtype: torch.dtype, seed: int = 0) -> "Case":
    """A step in which every request decodes, over pages dealt at random from a pool of random numbers."""
    chance = torch.Generator().manual_seed(seed)

    def noise(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=chance).to(dtype)

    counts = [-(-length // page) for length in lengths]
    pages = torch.randperm(sum(counts) + 3, generator=chance)
    cache = LayerCache(noise(len(pages), kv_heads, page, dim), noise(len(pages), kv_heads, page, dim))
    tables = torch.stack([pages[sum(counts[:i]) :][: max(counts)].clone().resize_(max(counts)) for i in range(len(lengths))])
    for row, count in enumerate(counts):
        tables[row, count:] = tables[row, 0]
    at = torch.tensor(lengths) - 1
    slots = tables[torch.arange(len(lengths)), at // page, None] * kv_heads + torch.arange(kv_heads)
    slots = (slots * page + (at % page)[:, None]).reshape(-1)
    none = torch.empty(0, dtype=torch.int64)
    band = DecodeBand(
        start=0, size=len(lengths), lumps=none, masks={}, tables=tables, lengths=lengths, ends=torch.tensor(lengths)
    )
    batch = StepBatch(tokens=none, positions=none, slots=slots, bands=[band], chunks=[], drawn=none)
    return Case(noise(len(lengths), heads + 1, dim), noise(len(lengths), kv_heads, dim), cache, batch)


class Case:
    """Queries are a slice of something wider, as the fused linear leaves them."""

    def __init__(self, wide: torch.Tensor, k: torch.Tensor, cache: LayerCache, batch: StepBatch) -> None:
        self.q, self.k, self.cache, self.batch = wide[:, :-1], k, cache, batch

    def attended(self, attention: Attention, form: AttentionForm) -> torch.Tensor:
        return attention(self.q, self.k, -self.k, self.cache, self.batch, form)


def check(library: Library, one: Case, form: AttentionForm) -> None:
    native = NativeAttention(library)
    given = one.attended(native, form).float()
    torch.testing.assert_close(given, one.attended(DenseAttention(), form).float(), rtol=0, atol=TOLERANCE[one.q.dtype])
    assert native.num_decoded == len(one.q), "the kernel was not used"


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_kernel_equals_the_definition(target: str, dtype: torch.dtype, dim: int) -> None:
    check(compiled(target), case([1, 5, 16, 17, 300, 700, 1300], 16, 6, 2, dim, dtype), AttentionForm())


@pytest.mark.parametrize(
    "form",
    [AttentionForm(window=7), AttentionForm(window=600), AttentionForm(scale=0.5), AttentionForm(softcap=3.0)],
    ids=["window", "window over splits", "scale", "softcap"],
)
@pytest.mark.parametrize("target", TARGETS)
def test_kernel_exists_for_every_configuration(target: str, form: AttentionForm) -> None:
    check(compiled(target), case([3, 40, 1100], 8, 4, 4, 32, torch.float32), form)


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
    check(compiled("native"), one, AttentionForm(window=window))


def test_a_row_gives_the_same_bits_in_any_batch() -> None:
    made = compiled("native")
    many = case([900, 30, 1500], 16, 6, 2, 64, torch.float32)
    together = many.attended(NativeAttention(made), AttentionForm())
    for row, length in enumerate([900, 30, 1500]):
        whole = many.batch.bands[0]
        table = whole.tables[row : row + 1]
        band = DecodeBand(
            start=0, size=1, lumps=whole.lumps, masks={}, tables=table.contiguous(), lengths=[length], ends=torch.tensor([length])
        )
        batch = StepBatch(
            tokens=many.batch.tokens,
            positions=many.batch.positions,
            slots=many.batch.slots[row * 2 : row * 2 + 2],
            bands=[band],
            chunks=[],
            drawn=whole.lumps,
        )
        alone = Case(torch.cat((many.q, many.q[:, :1]), 1)[row : row + 1], many.k[row : row + 1], many.cache, batch)
        assert torch.equal(alone.attended(NativeAttention(made), AttentionForm())[0], together[row])


def test_unsupported_shapes_are_reported() -> None:
    made = compiled("native")
    assert decodes(made, 4, 2, 64, torch.float32)
    assert not decodes(made, 4, 2, made.lanes + 1, torch.float32)
    assert not decodes(made, 4, 2, made.lanes, torch.bfloat16), "bf16 is read in pairs"
    assert not decodes(made, 4, 2, 64, torch.float64)
    assert not decodes(made, 130, 2, 64, torch.float32), "too many heads share one"
