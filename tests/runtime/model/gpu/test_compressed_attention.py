"""Compressed pages by Triton, on the GPU, or in the interpreter without one: attention and writes against the reference."""

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_runtime.model.attention.dense import DenseAttention
from phalanx_runtime.model.attention.gpu import TritonAttention
from phalanx_runtime.model.attention.page_format import FORMATS
from phalanx_runtime.model.attention.paged import AttentionParams
from tests.examples import examples
from tests.runtime.model.compressed import copied, make_rounding
from tests.runtime.model.gpu.attention_case import DEVICE, Case, Run

formats = pytest.mark.parametrize("name", FORMATS)
names = st.sampled_from(list(FORMATS))
TREE = [-1, 0, 0, -1, 3, 1]
MIXED: list[Run] = [(0, 1), (15, 1), (16, 1), (700, 1), (0, 5), (23, 17)]
FORMS = [
    AttentionParams(),
    AttentionParams(window=7, softcap=3.0, sinks=torch.linspace(4, -2, 6, device=DEVICE)),
]


@pytest.mark.parametrize("params", FORMS, ids=["plain", "all"])
@pytest.mark.parametrize("max_splits", [1, 4])
@formats
def test_mixed_step_equals_the_definition(name: str, params: AttentionParams, max_splits: int) -> None:
    Case(MIXED, format=name).check(params, max_splits)


@pytest.mark.parametrize("dim", [16, 32, 80, 96, 128, 192, 256])
@formats
def test_any_heads_share_a_kv_head(name: str, dim: int) -> None:
    Case([(30, 1), (2, 9)], kv_heads=2, group=4, dim=dim, format=name).check(AttentionParams())


@formats
def test_float16_differs_by_its_rounding(name: str) -> None:
    Case(MIXED, dtype=torch.float16, format=name).check(AttentionParams(softcap=3.0), max_splits=4)


@pytest.mark.parametrize("size", [1e-3, 3e3])
@formats
def test_float16_holds_products_of_small_and_large_values(name: str, size: float) -> None:
    """A weight times a scale alone has no float16."""
    case = Case([(300, 1), (20, 9)], dtype=torch.float16, dim=32)
    case.v *= size
    case.cache.v.mul_(size)
    case.compress(name)
    q, k = case.written()
    expected = DenseAttention()(
        q.float(), k.float(), case.v.float(), cache=case.cache, batch=case.batch, params=AttentionParams(), is_written=True
    )
    found = case.attended(q, AttentionParams(), 2).float().view_as(expected)
    assert (found - expected).norm() < 4e-3 * expected.norm()


@settings(max_examples=examples(25))
@given(
    name=names,
    runs=st.lists(st.tuples(st.integers(0, 300), st.integers(1, 30)), min_size=1, max_size=3),
    page=st.sampled_from([8, 16, 32]),
    window=st.none() | st.integers(1, 90),
    max_splits=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 9),
)
def test_runs_of_any_length_and_context(
    name: str, runs: list[Run], page: int, window: int | None, max_splits: int, seed: int
) -> None:
    Case(runs, page=page, dim=32, seed=seed, format=name).check(AttentionParams(window=window), max_splits)


@settings(max_examples=15)
@given(
    name=names,
    draws=st.lists(st.floats(0, 0.999), min_size=1, max_size=12),
    before=st.integers(0, 60),
    computed=st.integers(0, 11),
    window=st.none() | st.integers(1, 20),
)
def test_trees_of_any_shape_attend_to_their_branches(
    name: str, draws: list[float], before: int, computed: int, window: int | None
) -> None:
    parents = [int(draw * (node + 1)) - 1 for node, draw in enumerate(draws)]
    start = before + min(computed, len(parents) - 1)
    count = before + len(parents) - start
    Case([(20, 1), (start, count)], trees={1: parents}, dim=32, format=name).check(AttentionParams(window=window))


@formats
def test_changed_codes_and_scales_change_the_result(name: str) -> None:
    case = Case([(30, 1)], format=name)
    q, _ = case.written()
    before = case.attended(q, AttentionParams())
    for index, part in enumerate(case.cache.tensors):
        kept = part.clone()
        part[int(case.batch.segments().tables[0, 0])] = 1
        assert not torch.equal(case.attended(q, AttentionParams()), before), f"part {index} is not read"
        part.copy_(kept)
    assert torch.equal(case.attended(q, AttentionParams()), before)


@pytest.mark.parametrize("dim", [32, 96, 128])
@formats
def test_the_backend_writes_what_it_attends_to(name: str, dim: int) -> None:
    """As for models of `transformers`: queries, keys and values as they come."""
    case = Case([(20, 1), (0, 7), (30, 12)], dim=dim, format=name)
    expected_cache = copied(case.cache)
    expected = DenseAttention()(case.q, case.k, case.v, expected_cache, case.batch, AttentionParams())
    backend = TritonAttention()
    found = backend(case.q, case.k, case.v, case.cache, case.batch, AttentionParams())
    assert backend.num_computed == len(case.q), "the kernels were not used"
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert torch.equal(case.cache.v, expected_cache.v)


@formats
def test_the_backend_attends_to_calibrated_pages(name: str) -> None:
    """Over whole heads: it writes keys and values as the reference does, and transforms its result back."""
    case = Case([(20, 1), (0, 3), (30, 5)], dim=32, format=name)
    case.cache = replace(case.cache, rounding=make_rounding(32).to(DEVICE))
    expected_cache = copied(case.cache)
    expected = DenseAttention()(case.q, case.k, case.v, expected_cache, case.batch, AttentionParams())
    found = TritonAttention()(case.q, case.k, case.v, case.cache, case.batch, AttentionParams())
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-2)


EXPANDED: dict[str, tuple[int, AttentionParams]] = {
    "wide heads in fp32": (160, AttentionParams()),
    "images within": (32, AttentionParams()),
    "slopes": (32, AttentionParams(slopes=torch.ones(6, device=DEVICE))),
    "blocks": (32, AttentionParams(block=16)),
}


@pytest.mark.parametrize("name", EXPANDED)
def test_torch_expands_pages_where_no_kernel_reads_them(name: str) -> None:
    dim, params = EXPANDED[name]
    case = Case([(20, 1), (30, 12)], dim=dim, format="int8")
    case.batch = replace(case.batch, has_images_within=name == "images within")
    expected = DenseAttention()(case.q, case.k, case.v, copied(case.cache), case.batch, params)
    backend = TritonAttention()
    found = backend(case.q, case.k, case.v, case.cache, case.batch, params)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-3)
    assert backend.num_computed == 0
