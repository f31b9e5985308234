"""Further rows of a draft pass: their measured cost, and its effect on draft lengths."""

from collections.abc import Sequence
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.cost import StepModel, StepWork
from phalanx_api.speculation import Method
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.speculation.draft_length import MARGIN, DraftChances, StepCosts, choose_draft_lengths
from phalanx_runtime.core.speculation.verify_cost import VerifyCost
from tests.runtime.core.speculation.speculating import CHANCES
from tests.runtime.fake_runner import FakeRunner, make_request

DRAFTS: frozenset[Method] = frozenset({"self_draft"})


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.builds(DraftChances, CHANCES, st.just(True)), min_size=1, max_size=3),
    *(st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 1)),
    st.integers(0, 8),
    st.integers(1, 6),
)
def test_chosen_drafts_maximize_speed_with_measured_row_costs(
    candidates: list[DraftChances], token_s: float, pass_s: float, share: float, room: int, others: int
) -> None:
    """A further row takes `share` of a pass."""
    decodes, row_s = len(candidates) + others, share * pass_s

    def speed(depths: Sequence[int]) -> float:
        gained = sum(sum(candidate.chances[:depth]) for candidate, depth in zip(candidates, depths, strict=True))
        passes = max(depths)
        return (decodes + gained) / (1 + token_s * sum(depths) + pass_s * passes + row_s * (sum(depths) - passes))

    costs = StepCosts(plain_s=1.0, extra_s=lambda count: count * token_s, pass_s=pass_s, draft_row_s=row_s)
    chosen = [len(taken) for taken in choose_draft_lengths(candidates, costs, decodes, room).selected]
    every = [
        depths for depths in product(*(range(len(candidate.chances) + 1) for candidate in candidates)) if sum(depths) <= room
    ]
    best = max(map(speed, every))
    assert speed(chosen) == pytest.approx(best) if best > MARGIN * decodes * (1 + 1e-9) else not any(chosen)


def test_lookup_precedes_an_expensive_draft_row() -> None:
    candidates = [DraftChances([0.9], True), DraftChances([0.8], True), DraftChances([0.7])]
    costs = StepCosts(plain_s=1.0, extra_s=lambda count: 0.01 * count, pass_s=0.01, draft_row_s=5.0)
    assert choose_draft_lengths(candidates, costs, 3, 10).selected == [[0], [], [0]]


def test_tokens_after_an_expensive_level_are_dropped() -> None:
    """The sibling on the first level is free, but selected nodes are always the first ones."""
    tree = DraftChances([0.9, 0.5, 0.4], True, [0, 1, 0])
    costs = StepCosts(plain_s=1.0, extra_s=lambda count: 0.0, pass_s=0.01, draft_row_s=5.0)
    taken = choose_draft_lengths([DraftChances([0.95, 0.94], True, [0, 1]), tree], costs, 2, 10).selected
    assert all(nodes == list(range(len(nodes))) for nodes in taken)
    assert sum(map(len, taken)) == 2


def test_costs_of_passes_and_rows_are_separate() -> None:
    cost, model, plain = (
        VerifyCost(),
        StepModel(fixed_s=0.005, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0),
        StepWork(0, 64, 1000),
    )
    for rows in (0, 0, 63, 63, 0):
        cost.learn(model, plain, 1 + rows, 1, 0.1, 0.002 + 0.0001 * rows, further_rows=rows)
    measured = cost.costs(model, plain)
    assert measured.pass_s == pytest.approx(0.002)
    assert 0.9 * 0.0001 < measured.draft_row_s < 0.0001, "the time of a row decays"
    assert cost.draft_s(2, 0, 10) == pytest.approx(2 * measured.pass_s + 10 * measured.draft_row_s)


def test_probes_of_one_request_do_not_price_all() -> None:
    """16 requests, steps of 21 ms, and 2 ms of draft per request: drafts never pay, but a probe of one request shows nothing."""
    runner, tokens = FakeRunner(16 * 100, 4, has_pages=False), 300
    limits = Limits(max_model_len=2 * tokens, max_num_seqs=16, max_num_batched_tokens=1024)
    scheduler = make_scheduler(
        limits,
        runner.pool,
        SchedulerConfig(speculation=SpeculationConfig(method="self_draft", num_tokens=1, draft_methods=DRAFTS)),
    )
    for handle in range(1, 17):
        scheduler.submit(handle, make_request(5, tokens, seed=handle))
    while not scheduler.is_idle():
        plan = scheduler.schedule()
        assert plan is not None
        draft_s = 0.002 * sum(plan.depths)
        wall_s = 0.020 + 0.00005 * sum(plan.counts) + draft_s
        scheduler.commit(msgspec.structs.replace(runner.run(plan), draft_s=draft_s), wall_s)
    deep = [sum(plan.depths) for plan in runner.plans if len(plan.rows) == 16]
    assert 0 < sum(count > 1 for count in deep) <= 4, f"drafts ended after some steps of {len(deep)}"


def test_siblings_of_a_tree_share_their_parents_row() -> None:
    """Two trees of three siblings: the second request adds one row, its further tokens add no row."""
    trees = [DraftChances([0.5, 0.4, 0.3], True, [0, 0, 0])] * 2
    costs = StepCosts(plain_s=1.0, extra_s=lambda count: 0.001 * count, pass_s=0.01, draft_row_s=0.2)
    assert choose_draft_lengths(trees, costs, 2, 10).selected == [[0, 1, 2], [0, 1, 2]]
    assert choose_draft_lengths(
        trees, StepCosts(plain_s=1.0, extra_s=lambda count: 0.2 * count, pass_s=0.01), 2, 10
    ).selected != [
        [0, 1, 2],
        [0, 1, 2],
    ]


def test_outdated_row_cost_is_relearned_at_once() -> None:
    cost, model, plain = (
        VerifyCost(),
        StepModel(fixed_s=0.005, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0),
        StepWork(0, 64, 1000),
    )
    for rows in (0, 0, 63, 63, *[0] * 2000):
        cost.learn(model, plain, 1 + rows, 1, 0.1, 0.002 + 0.0001 * rows, further_rows=rows)
    assert cost.draft_row_s == 0
    cost.learn(model, plain, 64, 1, 0.1, 0.002 + 0.0001 * 63, further_rows=63)
    assert cost.draft_row_s == pytest.approx(0.0001)
