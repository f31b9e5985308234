"""The Triton kernel against `DenseAttention`, on the GPU, or in the interpreter without one."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_runtime.core.step_plan import DraftPath, NewRow, StepPlan
from phalanx_runtime.model.attention.gpu import AttentionLaunch
from phalanx_runtime.model.attention.paged import AttentionParams, DenseAttention, LayerCache, StepBatch, write_pages
from phalanx_runtime.rank.step.batch import BatchBuilder, CacheShape

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
Run = tuple[int, int]
"""Tokens of a request before the step and in the step."""


class Case:
    """A step of random runs over random pages. `trees`: parents of the last tokens, by request."""

    def __init__(
        self,
        runs: list[Run],
        *,
        trees: dict[int, list[int]] | None = None,
        page: int = 16,
        kv_heads: int = 2,
        group: int = 3,
        dim: int = 64,
        seed: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        chance = torch.Generator().manual_seed(seed)
        needed = [-(-(before + count) // page) for before, count in runs]
        pages = torch.randperm(sum(needed) + 3, generator=chance).tolist()
        tables = [pages[sum(needed[:i]) : sum(needed[: i + 1])] for i in range(len(runs))]
        paths = [DraftPath(request=i, depth=len(parents), parents=parents) for i, parents in (trees or {}).items()]
        plan = StepPlan(
            step=1,
            admitted=[],
            rows=list(range(len(runs))),
            starts=[before for before, _ in runs],
            counts=[count for _, count in runs],
            pages=tables,
            tokens=[0] * sum(count for _, count in runs),
            draws=[],
            paths=paths,
        )
        builder = BatchBuilder(CacheShape(page, kv_heads, 1 << 10), dtype, DEVICE)
        builder.params = {row: NewRow(row, wire.Sampling(max_tokens=1, seed=0)) for row in plan.rows}
        self.batch: StepBatch = builder.tensors(_updated(builder, plan))
        tokens = sum(count for _, count in runs)

        def noise(*shape: int) -> torch.Tensor:
            return torch.randn(*shape, generator=chance).to(DEVICE, dtype)

        self.q = noise(tokens, kv_heads * group + 1, dim)[:, :-1]
        self.k, self.v = noise(tokens, kv_heads, dim), noise(tokens, kv_heads, dim)
        self.cache = LayerCache(*(noise(len(pages), kv_heads, page, dim) for _ in range(2)))

    def attended(self, params: AttentionParams, max_splits: int = 1) -> torch.Tensor:
        """Returns the result of the kernels, after the keys were written."""
        segments, out = self.batch.segments(), torch.full_like(self.q.contiguous(), torch.nan)
        launch = AttentionLaunch(q=self.q, out=out, cache=self.cache, segments=segments, params=params)
        launch.run(max_splits)
        return out

    def check(self, params: AttentionParams, max_splits: int = 1) -> None:
        wide = LayerCache(self.cache.k.float(), self.cache.v.float())
        expected = DenseAttention()(self.q.float(), self.k.float(), self.v.float(), wide, self.batch, params)
        write_pages(self.k, self.v, self.cache, self.batch.slots)
        result = self.attended(params, max_splits)
        tolerance = 1e-5 if result.dtype == torch.float32 else 4e-3
        found = result.float().reshape(len(self.q), -1)
        torch.testing.assert_close(found, expected.reshape(len(self.q), -1), rtol=tolerance, atol=tolerance)


def _updated(builder: BatchBuilder, plan: StepPlan) -> StepPlan:
    builder.update(plan)
    return plan


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


@pytest.mark.parametrize("params", FORMS, ids=["plain", "window", "wide window", "scale", "softcap", "sinks", "all"])
@pytest.mark.parametrize("max_splits", [1, 4])
def test_tree_attends_to_its_branches(params: AttentionParams, max_splits: int) -> None:
    Case([(40, 1), (300, 1), (50, 7), (5, 20)], trees={2: TREE, 3: TREE}).check(params, max_splits)


@pytest.mark.parametrize(("kv_heads", "group"), [(1, 1), (3, 1), (1, 8), (2, 7)])
@pytest.mark.parametrize("dim", [32, 64, 96, 128, 256])
def test_any_heads_share_a_kv_head(kv_heads: int, group: int, dim: int) -> None:
    Case([(30, 1), (2, 9)], kv_heads=kv_heads, group=group, dim=dim).check(AttentionParams())


@settings(max_examples=25)
@given(
    runs=st.lists(st.tuples(st.integers(0, 400), st.integers(1, 40)), min_size=1, max_size=4),
    page=st.sampled_from([8, 16, 32]),
    window=st.none() | st.integers(1, 90),
    max_splits=st.sampled_from([1, 2, 8]),
    seed=st.integers(0, 9),
)
def test_runs_of_any_length_and_context(runs: list[Run], page: int, window: int | None, max_splits: int, seed: int) -> None:
    Case(runs, page=page, dim=32, seed=seed).check(AttentionParams(window=window), max_splits)


def test_a_changed_page_changes_the_result() -> None:
    case = Case([(30, 1)])
    write_pages(case.k, case.v, case.cache, case.batch.slots)
    before = case.attended(AttentionParams())
    case.cache.v[int(case.batch.segments().tables[0, 0])] = 0
    assert not torch.equal(case.attended(AttentionParams()), before)


@pytest.mark.parametrize("window", [None, 4])
def test_last_tokens_of_a_tree_attend_to_earlier_ones(window: int | None) -> None:
    Case([(53, 3)], trees={0: TREE}).check(AttentionParams(window=window))


@settings(max_examples=25)
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
    write_pages(case.k, case.v, case.cache, case.batch.slots)
    error = (case.attended(AttentionParams(), max_splits).reshape(len(q), -1) - expected.reshape(len(q), -1)).abs().max()
    assert float(error) < 10 * offset * torch.finfo(torch.float32).eps
