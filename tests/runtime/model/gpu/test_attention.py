"""The Triton kernel against `DenseAttention`, on the GPU, or in the interpreter without one."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch._subclasses.fake_tensor import FakeTensorMode

from phalanx_runtime.model.attention.dense import DenseAttention
from phalanx_runtime.model.attention.paged import AttentionParams, LayerCache
from tests.examples import examples
from tests.runtime.model.gpu.attention_case import DEVICE, Case, Run

TREE = [-1, 0, 0, -1, 3, 1]
MIXED: list[Run] = [(0, 1), (15, 1), (16, 1), (700, 1), (0, 5), (23, 17), (40, 33)]
FORMS = [
    AttentionParams(),
    AttentionParams(window=7),
    AttentionParams(window=100),
    AttentionParams(scale=0.3),
    AttentionParams(softcap=3.0),
    AttentionParams(sinks=torch.linspace(-1, 3, 6, device=DEVICE)),
    AttentionParams(window=7, softcap=3.0, sinks=torch.linspace(4, -2, 6, device=DEVICE)),
]


@pytest.mark.parametrize("params", FORMS, ids=["plain", "window", "wide window", "scale", "softcap", "sinks", "all"])
@pytest.mark.parametrize("max_splits", [1, 4])
def test_mixed_step_equals_the_definition(params: AttentionParams, max_splits: int) -> None:
    Case(MIXED).check(params, max_splits)


def test_float16_differs_by_its_rounding() -> None:
    Case(MIXED, dtype=torch.float16).check(AttentionParams(softcap=3.0), max_splits=4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="torch pins no fake tensors")
def test_the_definition_mixes_no_devices() -> None:
    """Fake tensors of a GPU raise where it does."""

    def fake(part: torch.Tensor) -> torch.Tensor:
        return torch.empty(part.shape, dtype=part.dtype, device="cuda")

    case = Case([(30, 1), (50, 7)], trees={1: TREE})
    with FakeTensorMode():
        bands = [replace(band, tables=fake(band.tables)) for band in case.batch.bands]
        chunks = [replace(chunk, table=fake(chunk.table)) for chunk in case.batch.chunks]
        batch = replace(case.batch, bands=bands, chunks=chunks, slots=fake(case.batch.slots))
        q, k, v, cache = fake(case.q), fake(case.k), fake(case.v), LayerCache(fake(case.cache.k), fake(case.cache.v))
        params = AttentionParams(window=7, softcap=3.0, sinks=torch.ones(6, device="cuda"))
        found = DenseAttention()(q, k, v, cache, batch, params)
        assert (len(batch.bands), len(batch.chunks), found.device.type, found.shape) == (1, 1, "cuda", (8, 6 * 64))


@pytest.mark.parametrize("params", FORMS, ids=["plain", "window", "wide window", "scale", "softcap", "sinks", "all"])
@pytest.mark.parametrize("max_splits", [1, 4])
def test_tree_attends_to_its_branches(params: AttentionParams, max_splits: int) -> None:
    Case([(40, 1), (300, 1), (50, 7), (5, 20)], trees={2: TREE, 3: TREE}).check(params, max_splits)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 1), (1, 8), (2, 7)])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_any_heads_share_a_kv_head(kv_heads: int, group: int, dim: int) -> None:
    Case([(30, 1), (2, 9)], kv_heads=kv_heads, group=group, dim=dim).check(AttentionParams())


@settings(max_examples=examples(25))
@given(
    runs=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 40)), min_size=1, max_size=4),
    page=st.sampled_from([8, 16, 32]),
    window=st.none() | st.integers(1, 90),
    max_splits=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 9),
)
def test_runs_of_any_length_and_context(runs: list[Run], page: int, window: int | None, max_splits: int, seed: int) -> None:
    Case(runs, page=page, dim=32, seed=seed).check(AttentionParams(window=window), max_splits)


@settings(max_examples=examples(15))
@given(
    dim=st.sampled_from([64, 80, 96, 128, 192, 256]),
    heads=st.tuples(st.integers(1, 3), st.integers(1, 8)),
    context=st.integers(500, 4000),
    runs=st.lists(st.tuples(st.integers(0, 60), st.integers(1, 9)), max_size=2),
    params=st.builds(AttentionParams, window=st.none() | st.integers(1, 2000), softcap=st.none() | st.floats(1, 30)),
    max_splits=st.sampled_from([1, 4, 32]),
)
def test_heads_of_any_shape_over_long_contexts(
    dim: int, heads: tuple[int, int], context: int, runs: list[Run], params: AttentionParams, max_splits: int
) -> None:
    kv_heads, group = heads
    Case([(context, 1), *runs], kv_heads=kv_heads, group=group, dim=dim).check(params, max_splits)


def test_a_changed_page_changes_the_result() -> None:
    case = Case([(30, 1)])
    case.written()
    before = case.attended(case.q, AttentionParams())
    case.cache.v[int(case.batch.segments().tables[0, 0])] = 0
    assert not torch.equal(case.attended(case.q, AttentionParams()), before)


@pytest.mark.parametrize("window", [None, 4])
def test_last_tokens_of_a_tree_attend_to_earlier_ones(window: int | None) -> None:
    Case([(53, 3)], trees={0: TREE}).check(AttentionParams(window=window))


@settings(max_examples=examples(25))
@given(
    draws=st.lists(st.floats(0, 0.999), min_size=1, max_size=12),
    before=st.integers(0, 60),
    computed=st.integers(0, 11),
    window=st.none() | st.integers(1, 20),
)
def test_tree_of_any_shape_attends_to_its_branches(draws: list[float], before: int, computed: int, window: int | None) -> None:
    parents = [int(draw * (node + 1)) - 1 for node, draw in enumerate(draws)]
    start = before + min(computed, len(parents) - 1)
    count = before + len(parents) - start
    Case([(20, 1), (start, count)], trees={1: parents}, dim=32).check(AttentionParams(window=window))


@pytest.mark.parametrize("max_splits", [1, 32])
def test_long_contexts_cost_few_roundings(max_splits: int) -> None:
    """Values of one sign, whose sums are largest, against float64. The splits of a decode are the second level of its sums."""
    offset, case = 4.0, Case([(16_000, 1), (16_000, 3)], kv_heads=1, group=2, dim=32)
    case.cache.v.add_(offset)
    wide_cache = LayerCache(case.cache.k.double(), case.cache.v.double())
    q, k, v = (part.double() for part in (case.q, case.k, case.v))
    expected = DenseAttention()(q, k, v, wide_cache, case.batch, AttentionParams())
    case.written()
    error = (case.attended(case.q, AttentionParams(), max_splits).reshape(len(q), -1) - expected.reshape(len(q), -1)).abs().max()
    assert float(error) < 10 * offset * torch.finfo(torch.float32).eps
