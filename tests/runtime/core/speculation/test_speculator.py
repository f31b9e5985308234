"""Speculation: acceptance rates, draft lengths and costs."""

import math
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import product

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_api.cost import StepModel, StepWork
from phalanx_api.speculation import Method, Speculation, Tree
from phalanx_runtime.core.admission import Limits, Refusal
from phalanx_runtime.core.draft_tree import (
    ROOT,
    AcceptanceRates,
    acceptance_rate_of,
    add_tree,
    draft_grade,
    levels,
    ngram_grade,
    sibling_ranks,
)
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.ngram import MAX_INDEXED_PER_STEP
from phalanx_runtime.core.request import Request
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.candidates import ngram_candidate
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.speculation.draft_length import MARGIN, DraftChances, StepCosts, choose_draft_lengths
from phalanx_runtime.core.speculation.speculator import Speculator
from phalanx_runtime.core.speculation.verify_cost import VerifyCost
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder
from phalanx_runtime.rank.step.draft_paths import NO_TOKEN
from tests.runtime.core.speculation.speculating import CHANCES, DRAFTS, make_engine, running_request
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request, next_token


def propose(
    speculation: SpeculationConfig, requests: Sequence[Request], num_pages: int, running: int = 0
) -> list[ScheduledChunk]:
    """Returns the chunks of one step after `Speculator.propose`, for requests with pages."""
    limits = Limits(max_model_len=100_000, max_num_seqs=len(requests), max_num_batched_tokens=400)
    pool = PagePool(num_pages + sum(len(request.pages.ids) for request in requests), 4)
    for request in requests:
        request.pages.ids = pool.allocate(len(request.pages.ids)) or []
    speculator = Speculator(limits, pool, speculation)
    builder = StepBuilder(
        step=1,
        backfill_budget=400,
        chunks=[ScheduledChunk(request=request, start=len(request.tokens) - 1, count=1) for request in requests],
    )
    speculator.propose(builder, None, running, False)
    return builder.chunks


def test_step_drafts_a_bounded_number_of_prompt_tokens() -> None:
    requests = [running_request([at % 50 for at in range(MAX_INDEXED_PER_STEP // 2 + 2)], "ngram", pages=2) for _ in range(4)]
    config = SpeculationConfig(method="ngram", num_tokens=4, is_adaptive=False)
    assert [chunk.draft.depth for chunk in propose(config, requests, 8)] == [4, 4, 0, 0]
    assert [chunk.draft.depth for chunk in propose(config, requests, 8)] == [4, 4, 4, 4]


def test_request_without_draft_pages_leaves_its_backfill_to_others() -> None:
    """Each backfill takes more than half of the step's budget."""

    def lagging(pages: int) -> Request:
        return running_request([7] * 300, "draft", pages)

    config = SpeculationConfig(method="draft", num_tokens=4, is_adaptive=False, draft_methods=DRAFTS)
    both = propose(config, [lagging(2), lagging(2)], 1)
    assert [(chunk.draft.depth, len(chunk.backfill)) for chunk in both] == [(4, 299), (0, 0)]
    second = propose(config, [lagging(0), lagging(2)], 1, running=9)
    assert [(chunk.draft.depth, len(chunk.backfill)) for chunk in second] == [(0, 0), (4, 299)]


class CountingChances(list[float]):
    """Counts how often the chances are read."""

    reads = 0

    def __iter__(self) -> Iterator[float]:
        self.reads += 1
        return super().__iter__()


def test_draft_tokens_are_ranked_once_or_not_at_all() -> None:
    chances = CountingChances(0.9**at for at in range(1, 17))
    paying = choose_draft_lengths(
        [DraftChances(chances, True)], StepCosts(plain_s=1.0, extra_s=lambda count: 0.001 * count, pass_s=0.001), 1, 100
    )
    assert len(paying.selected[0]) == 16 and chances.reads == 2, "for their sum, and for their order"
    chances.reads = 0
    assert choose_draft_lengths(
        [DraftChances(chances, True)], StepCosts(plain_s=1.0, extra_s=lambda count: 0.0), 10_000, 100
    ).selected == [[]]
    assert chances.reads == 1


def test_acceptance_follows_the_request_from_the_average() -> None:
    engine, own = AcceptanceRates(0.99), AcceptanceRates(0.9)
    line, parents = [([1, 2, 3], 4)], [-1, 0, 1]

    def chances() -> list[float]:
        return ngram_candidate(acceptance_rate_of(own, engine), 3, (), line).chances

    grades = ngram_candidate(acceptance_rate_of(own, engine), 3, (), line).grades
    assert chances() == [0.5, 0.25, 0.125]
    for _ in range(50):
        add_tree(engine, parents, grades, [0, 1, 2])
    assert chances()[2] > 0.7
    for _ in range(20):
        add_tree(own, parents, grades, [])
    assert chances()[0] < 0.4
    every = [grade(at, place) for grade in (ngram_grade, draft_grade) for at in range(16) for place in range(8)]
    assert len(set(every)) == 8 * 5 + 8 * 16, "five magnitudes and sixteen levels"


def test_unverified_drafts_do_not_count() -> None:
    rates = AcceptanceRates(0.9)
    add_tree(rates, [-1, 0, 1], [-1, -2, -3], [0])
    assert [rates.rate(grade, 0.5) for grade in (-1, -2, -3)] == [0.6, 0.4, 0.5]
    add_tree(rates, [-1, -1, 1, 0], [-11, -12, -13, -14], [1])
    assert [rates.rate(grade, 0.5) for grade in (-11, -12, -13, -14)] == [0.4, 0.6, 0.4, 0.5]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.builds(DraftChances, CHANCES, st.booleans()), min_size=1, max_size=3),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
    st.integers(0, 8),
    st.integers(1, 6),
)
def test_selected_depths_are_the_fastest(
    candidates: list[DraftChances], token_s: float, pass_s: float, room: int, others: int
) -> None:
    decodes = len(candidates) + others

    def speed(depths: Sequence[int]) -> float:
        gained = sum(sum(candidate.chances[:depth]) for candidate, depth in zip(candidates, depths, strict=True))
        passes = max((depth for candidate, depth in zip(candidates, depths, strict=True) if candidate.is_drafted), default=0)
        return (decodes + gained) / (1 + token_s * sum(depths) + pass_s * passes)

    found = choose_draft_lengths(
        candidates, StepCosts(plain_s=1.0, extra_s=lambda count: count * token_s, pass_s=pass_s), decodes, room
    )
    chosen = [len(nodes) for nodes in found.selected]
    assert sum(chosen) <= room
    every = [
        depths for depths in product(*(range(len(candidate.chances) + 1) for candidate in candidates)) if sum(depths) <= room
    ]
    best = max(map(speed, every))
    assert speed(chosen) == pytest.approx(best) if best > MARGIN * decodes * (1 + 1e-9) else not any(chosen)


def test_draft_length_falls_with_load() -> None:
    """A step of 10 ms for one decode, and 1 ms per further token: chances that pay alone do not pay among 64."""

    def deepest(decodes: int, chance: float) -> int:
        costs = StepCosts(plain_s=0.009 + 0.001 * decodes, extra_s=lambda count: 0.001 * count)
        selected = choose_draft_lengths(
            [DraftChances([chance**at for at in range(1, 9)])] * decodes, costs, decodes, 1000
        ).selected
        return max(map(len, selected))

    assert [deepest(1, chance) for chance in (0.05, 0.3, 0.6, 0.9)] == [0, 1, 3, 8]
    assert [deepest(64, chance) for chance in (0.3, 0.6, 0.85)] == [0, 0, 0]


def test_likely_drafts_are_used_before_any_measurement() -> None:
    assert choose_draft_lengths([DraftChances([0.9, 0.5, 0.3]), DraftChances([0.3, 0.2], True)], None, 2, 10).selected == [
        [0, 1],
        [],
    ]
    assert choose_draft_lengths([DraftChances([0.9, 0.5]), DraftChances([0.8])], None, 2, 2).selected == [[0], [0]]


def test_a_tree_pays_a_pass_for_each_level_alone() -> None:
    """Three first-level tokens need one pass; where a second pass does not pay, only these are selected."""
    tree = DraftChances([0.5, 0.4, 0.3, 0.2], is_drafted=True, levels=[0, 0, 1, 0])

    def selected(pass_s: float) -> list[list[int]]:
        return choose_draft_lengths(
            [tree], StepCosts(plain_s=1.0, extra_s=lambda count: 0.01 * count, pass_s=pass_s), 1, 10
        ).selected

    assert selected(0.01) == [[0, 1, 2, 3]] and selected(0.2) == [[0, 1, 3]] and selected(5.0) == [[]]


def test_trees_are_used_where_they_beat_chains() -> None:
    """The first sibling is right two times of three, otherwise the second: trees pay unless their tokens cost much more."""

    class IrregularDrafts(FakeRunner):
        def draft_tokens(self, context: list[int], parents: list[int], seed: int) -> list[int]:
            branches: dict[int, list[int]] = {ROOT: context}
            for node, (parent, rank) in enumerate(zip(parents, sibling_ranks(tuple(parents)), strict=True)):
                right = next_token(branches[parent], seed)
                branches[node] = [*branches[parent], right if (right % 3 == 0) == rank else right ^ 64]
            return [branches[node][-1] for node in range(len(parents))]

    tree = SpeculationConfig(method="draft", num_tokens=6, draft_methods=DRAFTS, tree=Tree([2, 2, 2], "static"))
    for tree_token_s, shares in ((0.0, (0.5, 1.0)), (0.02, (0.0, 0.4))):
        runner = IrregularDrafts(60, 4)
        scheduler = make_engine(runner, tree)
        scheduler.submit(1, make_request(5, 190))
        while not scheduler.is_idle():
            plan = scheduler.schedule()
            assert plan is not None
            branches = any(path.parents for path in plan.paths)
            scheduler.commit(runner.run(plan), 0.010 + (0.001 + tree_token_s * branches) * sum(plan.counts))
        late = runner.plans[len(runner.plans) // 2 :]
        branching = sum(any(path.parents for path in plan.paths) for plan in late) / len(late)
        assert shares[0] <= branching <= shares[1], f"{branching:.0%} of the steps had trees"
        assert sum(sum(plan.depths) > 0 for plan in late) > len(late) / 2


def test_draft_cost_is_the_measured_one() -> None:
    model, plain = StepModel(fixed_s=0.008, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0), StepWork(0, 2, 100)
    cost = VerifyCost()
    assert cost.costs(model, plain).plain_s == pytest.approx(0.010)
    assert cost.costs(model, plain).extra_s(4) == pytest.approx(0.004)
    for _ in range(50):
        cost.learn(model, plain, 0, 0, 0.012, 0.0)
    for _ in range(100):
        cost.learn(model, plain, 4, 2, 0.012 + 4 * 0.003 + 0.005, 0.005)
    measured = cost.costs(model, plain)
    assert measured.plain_s == pytest.approx(0.012, rel=0.01)
    assert measured.extra_s(2) == pytest.approx(0.006, rel=0.05)
    assert measured.pass_s == pytest.approx(0.0025, rel=0.01)
    assert cost.verify_s == pytest.approx(100 * 0.012, rel=0.1)
    assert cost.costs(model, StepWork(0, 40, 100)).extra_s(1) == pytest.approx(0.001), "other sizes are measured separately"


def test_noise_does_not_hide_the_draft_cost() -> None:
    """One draft token in steps of sixteen decodes, with noise of six times its cost."""
    chance = random.Random(5)
    model, plain, cost = (
        StepModel(fixed_s=0.05, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0),
        StepWork(0, 16, 1000),
        VerifyCost(),
    )
    for _ in range(400):
        cost.learn(model, plain, 0, 0, 0.066 + chance.uniform(-0.006, 0.006), 0.0)
        cost.learn(model, plain, 1, 0, 0.067 + chance.uniform(-0.006, 0.006), 0.0)
    assert 0.0002 < cost.costs(model, plain).extra_s(1) < 0.002


def test_missing_method_is_refused_but_started_stream_continues() -> None:
    scheduler = make_engine(FakeRunner(40, 4), SpeculationConfig())
    request = make_request(5, 6)
    refusal = scheduler.submit(
        1,
        wire.Request(
            id="a", epoch=0, prompt=request.prompt, delivered=[], sampling=request.sampling, speculation=Speculation("draft")
        ),
    )
    assert isinstance(refusal, Refusal) and refusal.status == 400 and refusal.code == "unsupported_speculation"
    assert "ngram" in refusal.message
    resumed = wire.Request(
        id="b", epoch=1, prompt=request.prompt, delivered=[3], sampling=request.sampling, speculation=Speculation("draft")
    )
    assert scheduler.submit(2, resumed) is None


def finish(runner: FakeRunner, scheduler: Scheduler, wall_s: float | None = None) -> list[int]:
    """Returns the output of the only request."""
    output: list[int] = []
    while not scheduler.is_idle():
        plan = scheduler.schedule()
        assert plan is not None
        output += scheduler.commit(runner.run(plan), wall_s).tokens
    return output


def test_request_selects_its_method_and_depth() -> None:
    for wanted, deepest in (
        (Speculation(), 3),
        (Speculation("none"), 0),
        (Speculation(None, 2), 2),
        (Speculation("draft", 99), 16),
    ):
        runner = FakeRunner(60, 4)
        scheduler = make_engine(runner, SpeculationConfig(method="draft", num_tokens=3, is_adaptive=False, draft_methods=DRAFTS))
        request = msgspec.structs.replace(make_request(5, 60), speculation=wanted)
        assert scheduler.submit(1, request) is None
        assert finish(runner, scheduler) == expected_output(request)
        assert max(max(plan.depths, default=0) for plan in runner.plans) == deepest


@pytest.mark.parametrize("method", ["ngram", "draft"])
def test_drafts_do_not_exceed_the_remaining_tokens(method: Method) -> None:
    """The last token needs no draft: it is sampled anyway."""
    num_drafted = {}
    for left in (1, 2, 3, 9):
        request = running_request([1, 2, 3, 4] * 5, method, pages=2)
        request.params = replace(request.params, max_len=len(request.tokens) + left)
        [chunk] = propose(SpeculationConfig(method=method, num_tokens=4, is_adaptive=False, draft_methods=DRAFTS), [request], 8)
        num_drafted[left] = chunk.draft.depth
    assert num_drafted == {1: 0, 2: 1, 3: 2, 9: 4}


def test_failed_ranks_get_no_drafts() -> None:
    runner = FakeRunner(60, 4)
    scheduler = make_engine(runner, SpeculationConfig(method="draft", num_tokens=3, is_adaptive=False, draft_methods=DRAFTS))
    scheduler.submit(1, make_request(5, 40))
    for turn in range(5):
        plan = scheduler.schedule()
        assert plan is not None and bool(plan.paths) == (1 <= turn <= 2)
        result = runner.run(plan)
        scheduler.commit(msgspec.structs.replace(result, draft_failure="out of memory" * (turn == 2)))
    assert scheduler.load().speculation.draft_failure == "out of memory"


class ShortDrafts(FakeRunner):
    """Drafts end after the second level; the other nodes have no token."""

    def draft_tokens(self, context: list[int], parents: list[int], seed: int) -> list[int]:
        tokens = super().draft_tokens(context, parents, seed)
        return [token if level < 2 else NO_TOKEN for token, level in zip(tokens, levels(tuple(parents)), strict=True)]


class NoDrafts(FakeRunner):
    """Drafts no tokens."""

    def draft_tokens(self, context: list[int], parents: list[int], seed: int) -> list[int]:
        return [NO_TOKEN] * len(parents)


@pytest.mark.parametrize("tree", [Tree(), Tree([2, 2], "static"), Tree([2, 2])], ids=["chain", "static", "best first"])
def test_undrafted_tokens_are_not_counted(tree: Tree) -> None:
    runner = ShortDrafts(80, 4)
    scheduler = make_engine(
        runner, SpeculationConfig(method="draft", num_tokens=8, is_adaptive=False, draft_methods=DRAFTS, tree=tree)
    )
    scheduler.submit(1, make_request(5, 100))
    finish(runner, scheduler)
    counts = scheduler.speculator.counts()
    assert 0 < sum(counts.accepted) == runner.num_accepted
    assert len(counts.drafted) == 2 and counts.drafted[0] > counts.paths * (1 if tree.widths else 0.99)
    num_requested = sum(path.depth for plan in runner.plans for path in plan.paths)
    assert sum(counts.drafted) < num_requested, "the plans have more nodes"
    assert bool(counts.branched) == bool(tree.widths)


def test_silent_draft_adds_no_tokens() -> None:
    runner = NoDrafts(80, 4)
    scheduler = make_engine(runner, SpeculationConfig(method="draft", num_tokens=4, is_adaptive=False, draft_methods=DRAFTS))
    scheduler.submit(1, make_request(5, 40))
    finish(runner, scheduler)
    assert any(plan.paths for plan in runner.plans)
    assert scheduler.speculator.counts().paths == 0 and sum(scheduler.speculator.counts().drafted) == 0


def test_padding_does_not_count_but_missing_nodes_do() -> None:
    rates = AcceptanceRates(0.9)
    add_tree(rates, [-1, 0, 1], [-1, -2, -3], [0, 1], unverified={2})
    assert [rates.rate(grade, 0.5) for grade in (-1, -2, -3)] == [0.6, 0.6, 0.5]
    add_tree(rates, [-1, 0, 1], [-11, -12, -13], [0, 1])
    assert [rates.rate(grade, 0.5) for grade in (-11, -12, -13)] == [0.6, 0.6, 0.4]


def test_draft_tokens_keep_steps_within_the_itl_target() -> None:
    """A step of 10 ms and 1 ms per draft token is cut at the target; a draft pass counts."""
    for limit_s, depths in ((math.inf, [8]), (0.0141, [4]), (0.0105, [0]), (0.005, [0])):
        costs = StepCosts(plain_s=0.010, extra_s=lambda count: 0.001 * count, limit_s=limit_s)
        assert [
            len(taken) for taken in choose_draft_lengths([DraftChances([0.95**at for at in range(1, 9)])], costs, 1, 100).selected
        ] == depths
    costs = StepCosts(plain_s=0.010, extra_s=lambda count: 0.001 * count, pass_s=0.001, limit_s=0.0141)
    assert choose_draft_lengths([DraftChances([0.95**at for at in range(1, 9)], is_drafted=True)], costs, 1, 100).selected == [
        [0, 1]
    ]


def test_itl_target_counts_a_backfill_once_per_request() -> None:
    """Of the remaining 4 ms one request needs 3 before its first draft token, the most probable; the other needs no backfill."""
    costs = StepCosts(plain_s=0.010, extra_s=lambda count: 0.0005 * count, pass_s=0.0001, limit_s=0.0141)

    def depths(limit_s: float, *backfill_s: float) -> list[int]:
        chances = [[0.95, 0.94, 0.93], [0.8, 0.7, 0.6]]
        candidates = [DraftChances(chance, True, backfill_s=seconds) for chance, seconds in zip(chances, backfill_s, strict=True)]
        return [len(taken) for taken in choose_draft_lengths(candidates, replace(costs, limit_s=limit_s), 2, 100).selected]

    assert depths(0.0141, 0.0, 0.0) == [3, 3]
    assert depths(0.01415, 0.003, 0.0) == [1, 1]
    assert depths(0.0161, 0.003, 0.0) == [3, 2]
    assert depths(0.0141, 0.005, 0.0) == [0, 3], "the smaller backfill is selected"
    assert depths(0.0181, 0.003, 0.003) == [3, 0]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.builds(DraftChances, CHANCES, st.booleans()), min_size=1, max_size=3),
    st.floats(0, 0.5),
    st.floats(0, 0.5),
    st.floats(0.5, 3.0),
)
def test_itl_target_holds_for_any_acceptance(
    candidates: list[DraftChances], token_s: float, pass_s: float, limit_s: float
) -> None:
    found = choose_draft_lengths(
        candidates,
        StepCosts(plain_s=1.0, extra_s=lambda count: count * token_s, pass_s=pass_s, limit_s=limit_s),
        len(candidates),
        100,
    )
    depths = [len(nodes) for nodes in found.selected]
    passes = max((depth for candidate, depth in zip(candidates, depths, strict=True) if candidate.is_drafted), default=0)
    assert not any(depths) or 1 + token_s * sum(depths) + pass_s * passes <= limit_s


@pytest.mark.parametrize(("target_ms", "longest_ms"), [(None, 13.0), (20.0, 13.0), (12.5, 12.0), (11.0, 11.0)])
def test_engine_with_itl_target_limits_draft_tokens(target_ms: float | None, longest_ms: float) -> None:
    """Steps of 10 ms and 1 ms per token, every third draft wrong: two draft tokens are best, if the target allows them."""
    runner = FakeRunner(60, 4)
    limits = Limits(
        max_model_len=200, max_num_seqs=4, max_num_batched_tokens=64, itl_target_s=None if target_ms is None else target_ms / 1e3
    )
    scheduler = make_scheduler(
        limits, runner.pool, SchedulerConfig(speculation=SpeculationConfig(method="draft", num_tokens=8, draft_methods=DRAFTS))
    )
    scheduler.submit(1, make_request(5, 190))
    times_ms = []
    while not scheduler.is_idle():
        plan = scheduler.schedule()
        assert plan is not None
        times_ms.append(10.0 + sum(plan.counts))
        scheduler.commit(runner.run(plan), times_ms[-1] / 1e3)
    assert max(times_ms[len(times_ms) // 2 :]) == longest_ms
