"""Probes of draft tokens that do not seem to pay, and the measured cost of drafts."""

import math
from dataclasses import dataclass, field
from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.cost import StepModel, StepWork
from phalanx_api.speculation import Method, Tree
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.speculation.probing import MAX_INTERVAL, PROBE_INTERVAL, PROBE_SHARE, Probing, next_interval
from phalanx_runtime.core.speculation.speculator import Speculator
from phalanx_runtime.core.speculation.verify_cost import VerifyCost
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder
from tests.runtime.core.speculation.speculating import DRAFTS, make_engine, running_request
from tests.runtime.fake_runner import VOCAB, FakeRunner, make_request


class WrongDrafts(FakeRunner):
    """Drafts are never accepted before `turns` plans."""

    def __init__(self, num_pages: int, page_size: int, turns: float = math.inf) -> None:
        super().__init__(num_pages, page_size)
        self._turns = turns

    def draft_tokens(self, context: list[int], parents: list[int], seed: int) -> list[int]:
        tokens = super().draft_tokens(context, parents, seed)
        return [(token + 1) % VOCAB for token in tokens] if len(self.plans) < self._turns else tokens


def test_unprofitable_drafts_are_probed_periodically() -> None:
    """All draft tokens are wrong and cost as much as a decode: few are num_drafted, but some."""
    runner = WrongDrafts(60, 4)
    scheduler = make_engine(runner, SpeculationConfig(method="draft", num_tokens=4, draft_methods=DRAFTS))
    scheduler.submit(1, make_request(5, 150))
    while not scheduler.is_idle():
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(runner.run(plan), 0.001 * sum(plan.counts))
    deep = [sum(plan.depths) for plan in runner.plans]
    late = deep[len(deep) // 2 :]
    assert 0 < sum(late) <= len(late) / PROBE_INTERVAL + 1


def drafting_steps(runner: FakeRunner, max_tokens: int, pass_s: float) -> list[bool]:
    """Returns whether each step of one request drafts, with steps of 20 ms and draft passes of `pass_s`."""
    limits = Limits(max_model_len=4 * max_tokens, max_num_seqs=4, max_num_batched_tokens=64)
    scheduler = make_scheduler(
        limits, runner.pool, SchedulerConfig(speculation=SpeculationConfig(method="draft", num_tokens=4, draft_methods=DRAFTS))
    )
    scheduler.submit(1, make_request(5, max_tokens))
    while not scheduler.is_idle():
        plan = scheduler.schedule()
        assert plan is not None
        draft_s = pass_s * max(plan.depths, default=0)
        scheduler.commit(msgspec.structs.replace(runner.run(plan), draft_s=draft_s), 0.020 + 0.0001 * sum(plan.counts) + draft_s)
    return [sum(plan.depths) > 0 for plan in runner.plans]


@pytest.mark.slow
def test_expensive_probes_take_little_time() -> None:
    drafted = drafting_steps(WrongDrafts(1000, 4), 3000, 0.020)
    late = drafted[1000:]
    assert 0 < sum(late) <= 2 * PROBE_SHARE * len(late)


@pytest.mark.parametrize(
    ("cost", "interval", "num_vain", "steps"),
    [
        (0.05, 16, 0, PROBE_INTERVAL),
        (0.35, 64, 0, 35),
        (0.35, 64, 4, 70),
        (0.35, 256, 12, 140),
        (0.35, 16, 12, 32),
        (2.0, 512, 0, 200),
        (2.0, 512, 36, MAX_INTERVAL),
    ],
    ids=["cheap", "expensive", "four in vain", "twelve in vain", "twice the last interval", "very expensive", "longest interval"],
)
def test_next_probe_waits_in_proportion_to_the_last(cost: float, interval: int, num_vain: int, steps: int) -> None:
    assert next_interval(cost, interval, num_vain) == steps


@given(st.floats(0.0, 50.0), st.integers(PROBE_INTERVAL, MAX_INTERVAL), st.integers(0, 1000))
def test_pause_between_probes_is_bounded(cost: float, interval: int, num_vain: int) -> None:
    """The share is exceeded where the interval would more than double, or exceed the longest."""
    steps = next_interval(cost, interval, num_vain)
    assert PROBE_INTERVAL <= steps <= MAX_INTERVAL and steps <= 2 * interval
    assert cost <= PROBE_SHARE * steps + 1e-9 or steps in (2 * interval, MAX_INTERVAL)
    assert next_interval(cost, interval, num_vain + 1) >= steps


def test_never_profitable_drafts_are_probed_less_and_less() -> None:
    drafted = drafting_steps(WrongDrafts(1000, 4), 3000, 0.004)
    shares = [sum(drafted[first : first + 750]) / 750 for first in (0, 750, 2250)]
    assert shares[0] > shares[1] > shares[2] > 0
    assert 0.2 * shares[2] < PROBE_SHARE / 3, "a probe takes a fifth of a step"


@pytest.mark.slow
def test_probes_find_a_draft_that_improves() -> None:
    """Drafts are wrong for 1,500 steps, then right: they are used after the longest interval and some probes."""
    drafted = drafting_steps(WrongDrafts(1000, 4, turns=1500), 3500, 0.004)
    assert sum(drafted[1000:1500]) < 50
    assert sum(drafted[-100:]) > 50 and len(drafted) < 3500


@pytest.mark.parametrize("pause_s", [100.0, 0.0])
def test_pause_in_a_probe_at_most_doubles_the_wait(pause_s: float) -> None:
    """An expensive probe at most doubles the interval, a cheap one keeps it. The first two are consecutive, to measure twice."""
    request = running_request([8] * 3, "draft", pages=2)
    speculator = Speculator(
        Limits(max_model_len=100_000, max_num_seqs=1, max_num_batched_tokens=400),
        PagePool(8, 4),
        SpeculationConfig(method="draft", draft_methods=DRAFTS),
    )
    probe_steps, model = [], StepModel(fixed_s=0.001, token_s=1.0, knee_tokens=0, context_s=0.0, attention_s=0.0)
    for step in range(6 * PROBE_INTERVAL):
        builder = StepBuilder(
            step=step, backfill_budget=400, chunks=[ScheduledChunk(request=request, start=len(request.tokens) - 1, count=1)]
        )
        builder.measure_plain_work()
        speculator.propose(builder, model, 0, False)
        if builder.chunks[0].draft.depth:
            probe_steps.append(step)
            plain_s = model.predict(builder.plain_work)
            speculator.learn(builder, model, plain_s * 1.05 + pause_s, 0.0, "")
    gaps = [later - earlier for earlier, later in pairwise(probe_steps)]
    assert gaps[:2] == [1, (4 if pause_s else 1) * PROBE_INTERVAL + 1] and max(gaps) <= MAX_INTERVAL


def test_probe_chooses_a_likely_sampled_token() -> None:
    """The longest match continues with a token that the request may not sample, another with one that it may; neither pays."""
    request = running_request([8, 1, 2, 5, 7, 1, 2, 6, 8, 1, 2], "ngram", pages=2)
    request.speculation.tree, request.row, request.pages.num_sent = Tree([3], "static"), 0, 1
    speculator = Speculator(
        Limits(max_model_len=100_000, max_num_seqs=1, max_num_batched_tokens=400),
        PagePool(8, 4),
        SpeculationConfig(method="ngram"),
        lambda _row, tokens, _index: 0 if tokens[0] == 5 else 4,
    )
    scheduler = []
    for step in range(PROBE_INTERVAL + 1):
        builder = StepBuilder(
            step=step, backfill_budget=400, chunks=[ScheduledChunk(request=request, start=len(request.tokens) - 1, count=1)]
        )
        speculator.propose(
            builder, StepModel(fixed_s=0.001, token_s=1.0, knee_tokens=0, context_s=0.0, attention_s=0.0), 0, False
        )
        scheduler.append(list(builder.chunks[0].draft.tokens))
    assert scheduler == [[]] * PROBE_INTERVAL + [[6]]


@pytest.mark.parametrize("is_fitted", [True, False], ids=["fitted", "before the fit"])
def test_one_slow_draft_ends_no_drafting_under_a_target(is_fitted: bool) -> None:
    """Steps of 10 ms and 1 ms per token, a target of 20 ms, and draft passes of 0.5 ms, except the first with 0.5 s."""
    runner = FakeRunner(60, 4)
    limits = Limits(max_model_len=200, max_num_seqs=4, max_num_batched_tokens=64, itl_target_s=0.020)
    scheduler = make_scheduler(
        limits, runner.pool, SchedulerConfig(speculation=SpeculationConfig(method="draft", num_tokens=8, draft_methods=DRAFTS))
    )
    scheduler.submit(1, make_request(5, 190))
    slow = 0
    while not scheduler.is_idle():
        plan = scheduler.schedule()
        assert plan is not None
        passes = sum(plan.depths)
        is_first = passes > 0 and not slow and (scheduler.fit.model() is not None) == is_fitted
        draft_s = 0.5 if is_first else 0.0005 * passes
        slow += is_first
        scheduler.commit(msgspec.structs.replace(runner.run(plan), draft_s=draft_s), 0.010 + 0.001 * sum(plan.counts) + draft_s)
    late = runner.plans[-20:]
    assert slow and sum(sum(plan.depths) > 0 for plan in late) > 15


def test_pass_cost_is_learned_from_few_small_drafts() -> None:
    """Sixteen requests without the draft's KV of their prompts, and drafts that never pay: the cost is known after some steps."""
    runner = WrongDrafts(2000, 4)
    scheduler = make_scheduler(
        Limits(max_model_len=400, max_num_seqs=16, max_num_batched_tokens=512),
        runner.pool,
        SchedulerConfig(speculation=SpeculationConfig(method="draft", num_tokens=4, draft_methods=DRAFTS)),
    )
    for handle in range(16):
        scheduler.submit(handle, make_request(20, 150, seed=handle))
    while not scheduler.is_idle():
        plan = scheduler.schedule()
        assert plan is not None
        num_backfilled = sum(len(backfill.tokens) for backfill in plan.backfills)
        draft_s = 0.006 * max(plan.depths, default=0) + 0.0001 * num_backfilled
        scheduler.commit(msgspec.structs.replace(runner.run(plan), draft_s=draft_s), 0.016 + 0.0002 * sum(plan.counts) + draft_s)
    drafted = [sum(plan.depths) for plan in runner.plans]
    assert max(drafted) == 1 and 2 < sum(map(bool, drafted)) < 15, "one token at a time, in few steps"


def test_pause_in_a_draft_is_no_pass_cost() -> None:
    model, plain, cost = (
        StepModel(fixed_s=0.008, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0),
        StepWork(0, 2, 100),
        VerifyCost(),
    )
    for draft_s in (0.001, 0.001, 0.001, 5.0):
        cost.learn(model, plain, 1, 1, 0.012 + draft_s, draft_s)
    assert cost.pass_s == pytest.approx(0.0011)


def test_first_passes_count_by_the_fastest() -> None:
    """The first pass may include loading: it is not used alone."""
    model, plain, cost = (
        StepModel(fixed_s=0.008, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0),
        StepWork(0, 2, 100),
        VerifyCost(),
    )
    pass_times = []
    for draft_s in (5.0, 0.003, 0.002, 0.002):
        cost.learn(model, plain, 2, 2, 0.012 + draft_s, draft_s)
        pass_times.append(cost.pass_s)
    assert pass_times == pytest.approx([0.0, 0.0015, 0.001, 0.001])


UNPAYING = StepModel(fixed_s=0.001, token_s=1.0, knee_tokens=0, context_s=0.0, attention_s=0.0)


def test_steps_with_prompts_do_not_each_probe_a_draft() -> None:
    """A prompt chunk in every step, and draft passes not measured."""
    request = running_request([8] * 3, "draft", pages=2)
    speculator = Speculator(
        Limits(max_model_len=100_000, max_num_seqs=1, max_num_batched_tokens=400),
        PagePool(8, 4),
        SpeculationConfig(method="draft", draft_methods=DRAFTS),
    )
    num_drafted = 0
    for step in range(10 * PROBE_INTERVAL):
        builder = StepBuilder(
            step=step, backfill_budget=400, chunks=[ScheduledChunk(request=request, start=len(request.tokens) - 1, count=1)]
        )
        speculator.propose(builder, UNPAYING, 0, True)
        num_drafted += builder.chunks[0].draft.depth
    assert 0 < num_drafted <= 10


def test_pass_cost_is_learned_from_drafts_not_lookups() -> None:
    """The drafted request needs a backfill, the n-gram request does not; neither pays."""
    ngram = running_request([8, 1, 2, 5, 7, 1, 2], "ngram", pages=2)
    drafted = running_request([7] * 30, "draft", pages=2)
    pool = PagePool(40, 4)
    for request in (ngram, drafted):
        request.pages.ids = pool.allocate(len(request.pages.ids)) or []
    speculator = Speculator(
        Limits(max_model_len=100_000, max_num_seqs=2, max_num_batched_tokens=400),
        pool,
        SpeculationConfig(method="draft", draft_methods=DRAFTS),
    )
    builder = StepBuilder(
        step=0,
        backfill_budget=400,
        chunks=[ScheduledChunk(request=request, start=len(request.tokens) - 1, count=1) for request in (ngram, drafted)],
    )
    speculator.propose(builder, StepModel(fixed_s=0.001, token_s=0.0007, knee_tokens=0, context_s=0.0, attention_s=0.0), 0, False)
    assert [(chunk.draft.depth, len(chunk.backfill)) for chunk in builder.chunks] == [(0, 0), (1, 29)]


def test_backfill_is_part_of_a_probes_cost() -> None:
    def interval_after(parts: int) -> int:
        probing = Probing()
        for step in range(parts):
            probing.start(step, is_partial=True)
            probing.search_next()
            probing.record_cost(0.08)
        probing.start(parts)
        probing.record_draft()
        probing.record_cost(0.08)
        steps = 0
        while not probing.is_due:
            probing.record_unpaid(parts + steps, 1, True)
            steps += 1
        return steps - 1

    assert [interval_after(parts) for parts in (0, 2, 9)] == [PROBE_INTERVAL, 24, 2 * PROBE_INTERVAL]


@dataclass(frozen=True, slots=True)
class CountingModel(StepModel):
    """Counts its evaluations."""

    calls: list[int] = field(default_factory=list)

    def predict(self, work: StepWork) -> float:
        self.calls.append(1)
        return StepModel.predict(self, work)


@pytest.mark.parametrize(("methods", "is_evaluated"), [(["none", "none"], False), (["none", "ngram"], True)])
def test_steps_without_speculation_compute_no_costs(methods: list[Method], is_evaluated: bool) -> None:
    requests = [running_request([8, 1, 2, 5, 7, 1, 2], method, pages=2) for method in methods]
    speculator = Speculator(
        Limits(max_model_len=100_000, max_num_seqs=2, max_num_batched_tokens=400),
        PagePool(8, 4),
        SpeculationConfig(method="none"),
    )
    builder = StepBuilder(
        step=1,
        backfill_budget=400,
        chunks=[ScheduledChunk(request=request, start=len(request.tokens) - 1, count=1) for request in requests],
    )
    model = CountingModel(fixed_s=0.008, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0)
    speculator.propose(builder, model, 2, False)
    assert bool(model.calls) == is_evaluated
