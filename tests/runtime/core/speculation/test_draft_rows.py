"""A draft for many requests costs more than one for one: what is learned of it, and what is chosen by it."""

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
from phalanx_runtime.core.speculation.draft_length import MARGIN, DraftCandidate, StepCosts, choose_draft_lengths
from phalanx_runtime.core.speculation.verify_cost import VerifyCost
from tests.runtime.core.speculation.test_speculator import CHANCES
from tests.runtime.fake_runner import FakeRunner, make_request

DRAFTS: frozenset[Method] = frozenset({"self_draft"})


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.builds(DraftCandidate, CHANCES, st.just(True)), min_size=1, max_size=3),
    *(st.floats(0, 0.5), st.floats(0, 0.5), st.floats(0, 1)),
    st.integers(0, 8),
    st.integers(1, 6),
)
def test_chosen_drafts_maximize_speed_with_measured_row_costs(
    offers: list[DraftCandidate], token_s: float, pass_s: float, share: float, room: int, others: int
) -> None:
    """A row takes at most what a pass with one takes: such a share of it."""
    decodes, row_s = len(offers) + others, share * pass_s

    def speed(depths: Sequence[int]) -> float:
        gained = sum(sum(offer.chances[:depth]) for offer, depth in zip(offers, depths, strict=True))
        passes = max(depths)
        return (decodes + gained) / (1 + token_s * sum(depths) + pass_s * passes + row_s * (sum(depths) - passes))

    costs = StepCosts(plain_s=1.0, extra_s=lambda count: count * token_s, pass_s=pass_s, draft_row_s=row_s)
    chosen = [len(taken) for taken in choose_draft_lengths(offers, costs, decodes, room).taken]
    every = [depths for depths in product(*(range(len(offer.chances) + 1) for offer in offers)) if sum(depths) <= room]
    best = max(map(speed, every))
    assert speed(chosen) == pytest.approx(best) if best > MARGIN * decodes * (1 + 1e-9) else not any(chosen)


def test_lookup_precedes_an_expensive_draft_row() -> None:
    offers = [DraftCandidate([0.9], True), DraftCandidate([0.8], True), DraftCandidate([0.7])]
    costs = StepCosts(plain_s=1.0, extra_s=lambda count: 0.01 * count, pass_s=0.01, draft_row_s=5.0)
    assert choose_draft_lengths(offers, costs, 3, 10).taken == [[0], [], [0]]


def test_levels_behind_an_expensive_level_are_dropped() -> None:
    """Its sibling on the first level would be free, but what an offer gets are its first proposals."""
    tree = DraftCandidate([0.9, 0.5, 0.4], True, [0, 1, 0])
    costs = StepCosts(plain_s=1.0, extra_s=lambda count: 0.0, pass_s=0.01, draft_row_s=5.0)
    taken = choose_draft_lengths([DraftCandidate([0.95, 0.94], True, [0, 1]), tree], costs, 2, 10).taken
    assert all(nodes == list(range(len(nodes))) for nodes in taken)
    assert sum(map(len, taken)) == 2


def test_costs_of_passes_and_rows_are_separate() -> None:
    cost, model, plain = (
        VerifyCost(),
        StepModel(fixed_s=0.005, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0),
        StepWork(0, 64, 1000),
    )
    for rows in (0, 0, 63, 63, 0):
        cost.learn(model, plain, 1 + rows, 1, 0.1, 0.002 + 0.0001 * rows, rows=rows)
    told = cost.costs(model, plain)
    assert told.pass_s == pytest.approx(0.002)
    assert 0.9 * 0.0001 < told.draft_row_s < 0.0001, "what keeps drafts from being tried is forgotten little by little"
    assert cost.draft_s(2, 0, 10) == pytest.approx(2 * told.pass_s + 10 * told.draft_row_s)


def test_probes_of_one_request_do_not_price_all() -> None:
    """16 requests, steps of 21 ms, a pass of 2 ms for each that is drafted for: even if all drafts are right they cost more than
    they bring, and a probe of one tells nothing of it."""
    runner, tokens = FakeRunner(16 * 100, 4, has_pages=False), 300
    limits = Limits(max_model_len=2 * tokens, max_num_seqs=16, max_num_batched_tokens=1024)
    made = make_scheduler(
        limits, runner.pool, SchedulerConfig(speculating=SpeculationConfig(method="self_draft", num_tokens=1, drafts=DRAFTS))
    )
    for handle in range(1, 17):
        made.submit(handle, make_request(5, tokens, seed=handle))
    while not made.is_idle():
        plan = made.schedule()
        assert plan is not None
        draft_s = 0.002 * sum(plan.depths)
        took_s = 0.020 + 0.00005 * sum(plan.counts) + draft_s
        made.commit(msgspec.structs.replace(runner.run(plan), draft_s=draft_s), took_s)
    deep = [sum(plan.depths) for plan in runner.plans if len(plan.rows) == 16]
    assert 0 < sum(count > 1 for count in deep) <= 4, f"it was tried, and given up; {len(deep)} steps"


def test_siblings_of_a_tree_share_their_parents_row() -> None:
    """Two trees of three tokens for one place: a second request is one row more, its further tokens are none."""
    trees = [DraftCandidate([0.5, 0.4, 0.3], True, [0, 0, 0])] * 2
    costs = StepCosts(plain_s=1.0, extra_s=lambda count: 0.001 * count, pass_s=0.01, draft_row_s=0.2)
    assert choose_draft_lengths(trees, costs, 2, 10).taken == [[0, 1, 2], [0, 1, 2]]
    assert choose_draft_lengths(trees, StepCosts(plain_s=1.0, extra_s=lambda count: 0.2 * count, pass_s=0.01), 2, 10).taken != [
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
        cost.learn(model, plain, 1 + rows, 1, 0.1, 0.002 + 0.0001 * rows, rows=rows)
    assert cost.draft_row_s == 0
    cost.learn(model, plain, 64, 1, 0.1, 0.002 + 0.0001 * 63, rows=63)
    assert cost.draft_row_s == pytest.approx(0.0001)
