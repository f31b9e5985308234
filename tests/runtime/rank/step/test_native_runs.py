"""The attention kernels equal the definition for any prompt chunks: that of bf16, and that of floats over codes."""

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.model.attention.cpu import NativeAttention, can_attend
from phalanx_runtime.model.attention.dense import DenseAttention
from phalanx_runtime.model.attention.page_format import FORMATS
from phalanx_runtime.model.attention.paged import (
    Attention,
    AttentionChunk,
    AttentionParams,
    DecodeBand,
    LayerCache,
    StepBatch,
    transform,
)
from phalanx_runtime.model.native.library import Library, library
from phalanx_runtime.rank.step.batch import BatchBuilder
from phalanx_runtime.rank.step.page_tables import CacheShape
from tests.runtime.model.compressed import compress
from tests.runtime.model.targets import TARGETS
from tests.runtime.model.targets import compiled as compiled_for
from tests.runtime.rank.step.tree_plans import plan_of

Runs = list[tuple[int, int]]
"""(computed tokens, context length) of each request."""


def compiled() -> Library:
    made = library()
    if made is None or not made.has_bf16_dot:
        pytest.skip("this processor does not multiply pairs of bf16")
    return made


class Case:
    """A step of these runs over random pages; unwritten slots are NaN."""

    def __init__(self, runs: Runs, page: int = 16, kv_heads: int = 2, group: int = 3, dim: int = 64, seed: int = 0) -> None:
        rng = torch.Generator().manual_seed(seed)
        counts = [-(-length // page) for _, length in runs]
        pages = torch.randperm(sum(counts) + 2, generator=rng)
        shape = (len(pages), kv_heads, page, dim)
        self.cache = LayerCache(*(torch.full(shape, float("nan"), dtype=torch.bfloat16) for _ in range(2)))
        self.tables = list(torch.split(pages[: sum(counts)], counts))
        tokens, empty = sum(size for size, _ in runs), torch.empty(0, dtype=torch.int64)
        for table, (_, length) in zip(self.tables, runs, strict=True):
            for part in (self.cache.k, self.cache.v):
                whole = torch.randn(length, kv_heads, dim, generator=rng).bfloat16()
                at = torch.arange(length)
                part[table[at // page], :, at % page] = whole
        wide = torch.randn(tokens, group * kv_heads + 2 * kv_heads, dim, generator=rng).bfloat16()
        self.q, self.k, self.v = torch.split(wide, [group * kv_heads, kv_heads, kv_heads], 1)
        bands, chunks, slots, first = [], [], [], 0
        for table, (size, length) in zip(self.tables, runs, strict=True):
            at = torch.arange(length - size, length)
            rows = (table[at // page][:, None] * kv_heads + torch.arange(kv_heads)) * page + (at % page)[:, None]
            slots.append(rows.reshape(-1))
            if size == 1:
                bands.append(
                    DecodeBand(
                        start=first,
                        size=1,
                        cache_rows=empty,
                        masks={},
                        tables=table[None],
                        lengths=[length],
                        device_lengths=torch.tensor([length]),
                    )
                )
            else:
                chunks.append(AttentionChunk(start=first, size=size, length=length, cache_rows=None, masks={}, table=table))
            first += size
        self.bands, self.chunks = bands, chunks
        self.batch = StepBatch(
            tokens=empty, positions=empty, slots=torch.cat(slots), bands=bands, chunks=chunks, logits_indices=empty
        )

    def attended(self, attention: Attention, form: AttentionParams) -> torch.Tensor:
        return attention(self.q, self.k, self.v, self.cache, self.batch, form)

    def defined(self, form: AttentionParams) -> torch.Tensor:
        """Returns the result of the reference in float32 for the written pages; there runs of one token come first."""
        cache = self.cache
        if cache.format is None:
            cache = LayerCache(cache.k.float(), cache.v.float())
        q, k = transform(self.q.float(), self.k.float(), cache)
        return DenseAttention()(q, k, v=self.v.float(), cache=cache, batch=self.batch, params=form, is_written=True)


def tolerance(one: Case) -> float:
    """Transformed queries are rounded to bf16 once more."""
    return 2e-2 if one.cache.format is None else 5e-2


def check(one: Case, form: AttentionParams) -> None:
    native = NativeAttention(compiled())
    result = one.attended(native, form).float()
    torch.testing.assert_close(result, one.defined(form), rtol=1e-2, atol=tolerance(one))
    decoded = len(one.batch.bands)
    assert (native.num_decoded, native.num_prefilled) == (decoded, len(one.q) - decoded), "the kernel was not used"


FORMS = [
    AttentionParams(),
    AttentionParams(window=7),
    AttentionParams(window=100),
    AttentionParams(scale=0.3),
    AttentionParams(softcap=3.0),
]
MIXED: Runs = [(1, 1), (1, 64), (1, 700), (1, 1300), (5, 5), (17, 40), (130, 130), (70, 333)]


@pytest.mark.parametrize("form", FORMS, ids=["plain", "window", "wide window", "scale", "softcap"])
@pytest.mark.parametrize("dim", [32, 64, 96, 256])
def test_runs_equal_the_definition(dim: int, form: AttentionParams) -> None:
    check(Case(MIXED, dim=dim), form)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("form", FORMS, ids=["plain", "window", "wide window", "scale", "softcap"])
@pytest.mark.parametrize("dim", [32, 96, 256])
def test_runs_over_compressed_pages_equal_the_definition(name: str, dim: int, form: AttentionParams) -> None:
    one = Case(MIXED, dim=dim)
    one.cache = compress(one.cache, name)
    check(one, form)


@pytest.mark.parametrize(("kv_heads", "group"), [(3, 1), (1, 6), (2, 7), (1, 30)])
def test_any_number_of_heads_shares_a_kv_head(kv_heads: int, group: int) -> None:
    check(Case(MIXED, kv_heads=kv_heads, group=group, dim=32), AttentionParams())


@settings(max_examples=40, deadline=None)
@given(
    sizes=st.lists(st.tuples(st.integers(1, 90), st.integers(0, 150)), min_size=1, max_size=6),
    page=st.sampled_from([16, 32, 48]),
    window=st.none() | st.integers(1, 90),
    name=st.none() | st.sampled_from(list(FORMATS)),
    seed=st.integers(0, 9),
)
def test_runs_of_any_length_and_context(sizes: Runs, page: int, window: int | None, name: str | None, seed: int) -> None:
    runs = sorted([(size, before + size) for size, before in sizes], key=lambda run: run[0] > 1)
    one = Case(runs, page=page, dim=32, seed=seed)
    one.cache = one.cache if name is None else compress(one.cache, name)
    check(one, AttentionParams(window=window))


IN_FLOATS = [*[("int8", target, torch.float32) for target in TARGETS], ("int4", "x86-64-v3", torch.bfloat16)]


@pytest.mark.parametrize(
    ("name", "target", "dtype"), [*[(name, "bf16", torch.bfloat16) for name in [None, *FORMATS]], *IN_FLOATS]
)
def test_token_has_equal_bits_for_any_prompt_chunks(name: str | None, target: str, dtype: torch.dtype) -> None:
    attention = NativeAttention(compiled() if target == "bf16" else compiled_for(target))
    whole = Case([(150, 300)])
    whole.cache = whole.cache if name is None else compress(whole.cache, name)
    whole.q, whole.k, whole.v = whole.q.to(dtype), whole.k.to(dtype), whole.v.to(dtype)
    expected = whole.attended(attention, AttentionParams())
    for cut in (2, 7, 64, 148):
        for first, last in ((0, cut), (cut, 150)):
            part = Case([(last - first, 150 + last)])
            part.cache, part.tables = whole.cache, whole.tables
            table, empty = whole.tables[0], whole.batch.tokens
            chunk = AttentionChunk(start=0, size=last - first, length=150 + last, cache_rows=None, masks={}, table=table)
            slots = whole.batch.slots.view(150, -1)[first:last].reshape(-1)
            part.batch = StepBatch(tokens=empty, positions=empty, slots=slots, bands=[], chunks=[chunk], logits_indices=empty)
            part.q, part.k, part.v = whole.q[first:last], whole.k[first:last], whole.v[first:last]
            assert torch.equal(part.attended(attention, AttentionParams()), expected[first:last])


def test_unsupported_kernel_shapes_are_reported() -> None:
    made = compiled()
    assert can_attend(made, 16, 64, torch.bfloat16)
    assert not can_attend(made, 16, 64, torch.float32)
    assert not can_attend(made, 24, 64, torch.bfloat16), "16 keys are read at once"
    assert not can_attend(made, 16, 48, torch.bfloat16), "32 dimensions are read at once"


trees = st.lists(st.integers(0, 15), min_size=1, max_size=16).map(
    lambda raw: [at - 1 - min(far, at) for at, far in enumerate(raw)]
)


def tree_case(runs: Runs, shape: list[int], own: int, page: int, group: int, seed: int, dim: int = 32) -> Case:
    """A step of these runs, then a request with a tree of this shape and `own` further tokens."""
    size, length = own + len(shape), runs[-1][1] + own + len(shape)
    made = Case([*runs, (size, length)], page=page, group=group, dim=dim, seed=seed)
    last = made.chunks[-1] if made.chunks else None
    if last is None or last.size != size:  # a single token is a tree, too
        band = made.bands.pop()
        last = AttentionChunk(start=band.start, size=1, length=length, cache_rows=None, masks={}, table=band.tables[0])
    else:
        made.chunks.pop()
    made.chunks.append(replace(last, parents=tuple(shape)))
    return made


@settings(max_examples=80, deadline=None)
@given(
    shape=trees,
    own=st.integers(0, 2),
    computed=st.integers(0, 3),
    before=st.integers(1, 200),
    page=st.sampled_from([16, 32]),
    group=st.sampled_from([1, 3, 8]),
    window=st.none() | st.integers(16, 90),
    softcap=st.none() | st.just(3.0),
    name=st.none() | st.sampled_from(list(FORMATS)),
    seed=st.integers(0, 9),
)
def test_trees_equal_the_definition(
    shape: list[int],
    own: int,
    computed: int,
    before: int,
    page: int,
    group: int,
    window: int | None,
    softcap: float | None,
    name: str | None,
    seed: int,
) -> None:
    """Each token attends only to its branch, also if a part of the tree was computed in an earlier step."""
    made = tree_case([(1, 9), (3, before)] if before > 2 else [(1, 9), (1, before)], shape, own, page, group, seed)
    if not own and computed < len(shape):
        made = without_first(made, computed)
    made.cache = made.cache if name is None else compress(made.cache, name)
    form = AttentionParams(window=window, softcap=softcap)
    native = NativeAttention(compiled())
    result = made.attended(native, form).float()
    torch.testing.assert_close(result, made.defined(form), rtol=1e-2, atol=tolerance(made))
    decoded = len(made.batch.bands)
    assert (native.num_decoded, native.num_prefilled) == (decoded, len(made.q) - decoded), "no window is narrower than a tree"


def without_first(made: Case, computed: int) -> Case:
    """The same step with the first `computed` tokens of the tree in the pages."""
    last = made.chunks[-1]
    made.chunks[-1] = replace(last, size=last.size - computed)
    end = len(made.q) - computed
    kept = [*range(last.start), *range(last.start + computed, len(made.q))]
    made.q, made.k, made.v = made.q[kept], made.k[kept], made.v[kept]
    slots = made.batch.slots.view(end + computed, -1)[kept].reshape(-1)
    made.batch = replace(made.batch, slots=slots)
    return made


forms = st.one_of(
    st.builds(AttentionParams, window=st.none() | st.integers(1, 90), softcap=st.none() | st.just(3.0)),
    st.builds(AttentionParams, window=st.none() | st.integers(1, 90), sinks=st.just(torch.linspace(-2, 4, 6))),
    st.builds(AttentionParams, window=st.none() | st.integers(1, 90), slopes=st.just(torch.logspace(-6, 0, 6, base=2))),
    st.builds(AttentionParams, block=st.integers(3, 40)),
)


@settings(max_examples=120, deadline=None)
@given(
    target=st.sampled_from(TARGETS),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    name=st.sampled_from(list(FORMATS)),
    sizes=st.lists(st.tuples(st.integers(2, 90), st.integers(0, 150)), min_size=1, max_size=2),
    shape=st.just([]) | trees,
    page=st.sampled_from([8, 16, 24]),
    dim=st.sampled_from([20, 32, 48, 96]),
    form=forms,
    seed=st.integers(0, 9),
)
def test_chunks_over_codes_equal_the_definition_anywhere(
    target: str,
    dtype: torch.dtype,
    name: str,
    sizes: Runs,
    shape: list[int],
    page: int,
    dim: int,
    form: AttentionParams,
    seed: int,
) -> None:
    """On any processor: any form, head dimension and page size, and trees that are wider than the window."""
    runs = [(size, before + size) for size, before in sizes]
    one = tree_case(runs, shape, 1, page, 3, seed, dim=dim) if shape else Case(runs, page=page, dim=dim, seed=seed)
    one.cache, one.q, one.k, one.v = compress(one.cache, name), one.q.to(dtype), one.k.to(dtype), one.v.to(dtype)
    native = NativeAttention(compiled_for(target))
    rtol, atol = (1e-4, 1e-4) if dtype == torch.float32 else (1e-2, tolerance(one))
    torch.testing.assert_close(one.attended(native, form).float(), one.defined(form), rtol=rtol, atol=atol)
    assert native.num_prefilled == len(one.q), "the kernel was not used"


@pytest.mark.parametrize(("window", "num_kernel"), [(40, 6), (4, 0)], ids=["wide", "narrow"])
def test_narrow_window_uses_the_reference_implementation(window: int, num_kernel: int) -> None:
    batch = BatchBuilder(CacheShape(16, 2, 1 << 10), torch.bfloat16, torch.device("cpu")).build(plan_of([-1, 0, 1, 2, 0], 1, 60))
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(7, heads, 32, generator=rng).bfloat16() for heads in (4, 2, 2))
    cache = LayerCache(*(torch.randn(10, 2, 16, 32, generator=rng).bfloat16() for _ in range(2)))
    native, form = NativeAttention(compiled()), AttentionParams(window=window)
    result = native(q, k, v, cache, batch, form).float()
    wide = LayerCache(cache.k.float(), cache.v.float())
    torch.testing.assert_close(result, DenseAttention()(q.float(), k.float(), v.float(), wide, batch, form), rtol=1e-2, atol=2e-2)
    assert native.num_prefilled == num_kernel


PLAIN_FORM = AttentionParams()
EXPANDED: dict[str, tuple[dict[str, Any], AttentionParams, tuple[int, int]]] = {
    "kernels": ({}, PLAIN_FORM, (1, 6)),
    "fp32": ({"dtype": torch.float32}, PLAIN_FORM, (1, 6)),
    "without bf16 dot products": ({"target": "x86-64-v3"}, PLAIN_FORM, (1, 6)),
    "pages of 8": ({"page": 8}, PLAIN_FORM, (1, 6)),
    "heads of 48": ({"dim": 48}, PLAIN_FORM, (1, 6)),
    "heads of 20": ({"dim": 20}, PLAIN_FORM, (1, 6)),
    "129 heads of a KV head": ({"heads": 258}, PLAIN_FORM, (1, 6)),
    "images within": ({"has_images_within": True}, PLAIN_FORM, (1, 0)),
    "sinks": ({}, AttentionParams(sinks=torch.zeros(4, dtype=torch.bfloat16)), (1, 6)),
    "slopes": ({}, AttentionParams(slopes=torch.ones(4)), (1, 6)),
    "blocks": ({}, AttentionParams(block=16), (1, 6)),
    "narrow window": ({}, AttentionParams(window=4), (1, 6)),
    "indexed": ({}, AttentionParams(chosen={}), (0, 0)),
    "float64": ({"dtype": torch.float64}, PLAIN_FORM, (0, 0)),
}
"""Changes, form, and the tokens of a decode and a chunk that kernels compute."""


@pytest.mark.parametrize("name", EXPANDED)
def test_torch_expands_pages_where_no_kernel_reads_them(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changes, form, num_kernel = EXPANDED[name]
    page, dim, dtype = changes.get("page", 16), changes.get("dim", 32), changes.get("dtype", torch.bfloat16)
    compiled()
    if (kernels := library(changes.get("target", "native"))) is None:
        pytest.skip("for x86")
    batch = BatchBuilder(CacheShape(page, 2, 1 << 10), dtype, torch.device("cpu")).build(plan_of([-1, 0, 1, 2, 0], 1, 20))
    batch = replace(batch, has_images_within=changes.get("has_images_within", False))
    if form.chosen is not None:
        rows = {one.start: torch.ones(one.size, one.masks[None].shape[-1], dtype=torch.bool) for one in batch.bands}  # type: ignore[union-attr]
        rows |= {one.start: torch.ones(one.size, one.length, dtype=torch.bool) for one in batch.chunks}
        form = replace(form, chosen=rows)
    rng = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(7, heads, dim, generator=rng).to(dtype) for heads in (changes.get("heads", 4), 2, 2))
    cache = compress(LayerCache(*(torch.randn(10, 2, page, dim, generator=rng).to(dtype) for _ in range(2))), "int8")
    native, expanded = NativeAttention(kernels), list[torch.Tensor]()
    read = LayerCache.read

    def noted(cache: LayerCache, rows: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        expanded.append(rows)
        return read(cache, rows, dtype)

    with monkeypatch.context() as patch:
        patch.setattr(LayerCache, "read", noted)
        result = native(q, k, v, cache, batch, form).float()
    q, k = transform(q.float(), k.float(), cache)
    wanted = DenseAttention()(q, k, v=v.float(), cache=cache, batch=batch, params=form, is_written=True)
    torch.testing.assert_close(result, wanted, rtol=1e-2, atol=5e-2)
    assert (native.num_decoded, native.num_prefilled) == num_kernel
    assert (not expanded) == (num_kernel == (1, 6))
