"""When a proposal is tried that does not seem to pay, and what is learned of the cost of drafts."""

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
from phalanx_runtime.core.speculation.probing import LONGEST_REST, PROBE_EVERY, PROBE_SHARE, Probing, tokens_after
from phalanx_runtime.core.speculation.speculator import Speculator
from phalanx_runtime.core.speculation.verify_cost import VerifyCost
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder
from tests.runtime.core.speculation.test_speculator import running_request, scheduler
from tests.runtime.fake_runner import VOCAB, FakeRunner, make_request

DRAFTS: frozenset[Method] = frozenset({"draft"})


class Wrong(FakeRunner):
    """What it drafts is never accepted, but after `turns` plans."""

    def __init__(self, num_pages: int, page_size: int, turns: float = math.inf) -> None:
        super().__init__(num_pages, page_size)
        self._turns = turns

    def _tokens(self, known: list[int], parents: list[int], seed: int) -> list[int]:
        found = super()._tokens(known, parents, seed)
        return [(token + 1) % VOCAB for token in found] if len(self.plans) < self._turns else found


def test_unprofitable_drafts_are_probed_periodically() -> None:
    """Every proposal is wrong and costs as much as a decode: few are made, but never none."""
    runner = Wrong(60, 4)
    made = scheduler(runner, SpeculationConfig(method="draft", num_tokens=4, drafts=DRAFTS))
    made.submit(1, make_request(5, 150))
    while not made.is_idle():
        plan = made.schedule()
        assert plan is not None
        made.commit(runner.run(plan), 0.001 * sum(plan.counts))
    deep = [sum(plan.depths) for plan in runner.plans]
    late = deep[len(deep) // 2 :]
    assert 0 < sum(late) <= len(late) / PROBE_EVERY + 1


def drafting_steps(runner: FakeRunner, max_tokens: int, pass_s: float) -> list[bool]:
    """Which steps of one request draft, where a step takes 20 ms and a pass of the draft this long."""
    limits = Limits(max_model_len=4 * max_tokens, max_num_seqs=4, max_num_batched_tokens=64)
    made = make_scheduler(
        limits, runner.pool, SchedulerConfig(speculating=SpeculationConfig(method="draft", num_tokens=4, drafts=DRAFTS))
    )
    made.submit(1, make_request(5, max_tokens))
    while not made.is_idle():
        plan = made.schedule()
        assert plan is not None
        draft_s = pass_s * max(plan.depths, default=0)
        made.commit(msgspec.structs.replace(runner.run(plan), draft_s=draft_s), 0.020 + 0.0001 * sum(plan.counts) + draft_s)
    return [sum(plan.depths) > 0 for plan in runner.plans]


def test_dear_probes_take_little_of_the_time() -> None:
    drafted = drafting_steps(Wrong(1000, 4), 3000, 0.020)
    late = drafted[1000:]
    assert 0 < sum(late) <= 2 * PROBE_SHARE * len(late)


@pytest.mark.parametrize(
    ("over", "rest", "num_vain", "steps"),
    [
        (0.05, 16, 0, PROBE_EVERY),
        (0.35, 64, 0, 35),
        (0.35, 64, 4, 70),
        (0.35, 256, 12, 140),
        (0.35, 16, 12, 32),
        (2.0, 512, 0, 200),
        (2.0, 512, 36, LONGEST_REST),
    ],
    ids=["cheap", "dear", "four in vain", "twelve in vain", "twice the last rest", "dearer", "the longest rest"],
)
def test_next_probe_waits_in_proportion_to_the_last(over: float, rest: int, num_vain: int, steps: int) -> None:
    assert tokens_after(over, rest, num_vain) == steps


@given(st.floats(0.0, 50.0), st.integers(PROBE_EVERY, LONGEST_REST), st.integers(0, 1000))
def test_pause_between_probes_is_bounded(over: float, rest: int, num_vain: int) -> None:
    """A share is not held where that would take more than twice the last rest, or than the longest."""
    steps = tokens_after(over, rest, num_vain)
    assert PROBE_EVERY <= steps <= LONGEST_REST and steps <= 2 * rest
    assert over <= PROBE_SHARE * steps + 1e-9 or steps in (2 * rest, LONGEST_REST)
    assert tokens_after(over, rest, num_vain + 1) >= steps


def test_never_profitable_drafts_are_probed_less_and_less() -> None:
    drafted = drafting_steps(Wrong(1000, 4), 3000, 0.004)
    shares = [sum(drafted[first : first + 750]) / 750 for first in (0, 750, 2250)]
    assert shares[0] > shares[1] > shares[2] > 0
    assert 0.2 * shares[2] < PROBE_SHARE / 3, "a probe takes about a fifth of a step"


def test_probes_go_on_where_a_draft_gets_better() -> None:
    """It is wrong for 1,500 steps, and right from then on: within the longest rest and some probes more it is used."""
    drafted = drafting_steps(Wrong(1000, 4, turns=1500), 3500, 0.004)
    assert sum(drafted[1000:1500]) < 50
    assert sum(drafted[-100:]) > 50 and len(drafted) < 3500


@pytest.mark.parametrize("pause_s", [100.0, 0.0])
def test_pause_in_a_probe_at_most_doubles_the_wait(pause_s: float) -> None:
    """Whatever a probe seemed to cost, the next comes within twice the steps; a cheap one changes nothing. The first two come one
    behind the other, for nothing is known of the draft."""
    request = running_request([8] * 3, "draft", pages=2)
    speculator = Speculator(
        Limits(max_model_len=100_000, max_num_seqs=1, max_num_batched_tokens=400),
        PagePool(8, 4),
        SpeculationConfig(method="draft", drafts=DRAFTS),
    )
    probed, model = [], StepModel(fixed_s=0.001, token_s=1.0, knee_tokens=0, context_s=0.0, attention_s=0.0)
    for step in range(6 * PROBE_EVERY):
        making = StepBuilder(
            step=step, draft_room=400, chunks=[ScheduledChunk(request=request, start=len(request.tokens) - 1, count=1)]
        )
        making.describe_plain()
        speculator.propose(making, model, 0, False)
        if making.chunks[0].depth:
            probed.append(step)
            plain_s = model.predict(making.plain)
            speculator.learn(making, model, plain_s * 1.05 + pause_s, 0.0, "")
    gaps = [later - earlier for earlier, later in pairwise(probed)]
    assert gaps[:2] == [1, (4 if pause_s else 1) * PROBE_EVERY + 1] and max(gaps) <= LONGEST_REST


def test_probe_chooses_a_likely_sampled_token() -> None:
    """What agrees most goes on with a token that the request may not draw, another line with one that it may; neither pays."""
    request = running_request([8, 1, 2, 5, 7, 1, 2, 6, 8, 1, 2], "ngram", pages=2)
    assert request.proposing is not None
    request.proposing.tree, request.row, request.sent = Tree([3], "static"), 0, 1
    speculator = Speculator(
        Limits(max_model_len=100_000, max_num_seqs=1, max_num_batched_tokens=400),
        PagePool(8, 4),
        SpeculationConfig(method="ngram"),
        lambda _row, tokens, _index: 0 if tokens[0] == 5 else 4,
    )
    made = []
    for step in range(PROBE_EVERY + 1):
        making = StepBuilder(
            step=step, draft_room=400, chunks=[ScheduledChunk(request=request, start=len(request.tokens) - 1, count=1)]
        )
        speculator.propose(making, StepModel(fixed_s=0.001, token_s=1.0, knee_tokens=0, context_s=0.0, attention_s=0.0), 0, False)
        made.append(making.chunks[0].proposed)
    assert made == [[]] * PROBE_EVERY + [[6]]


@pytest.mark.parametrize("is_fitted", [True, False], ids=["fitted", "before the fit has its samples"])
def test_one_slow_draft_ends_no_drafting_under_a_target(is_fitted: bool) -> None:
    """Steps of 10 ms and 1 ms for each token, a target of 20 ms, and passes of 0.5 ms, but half a second for the first of all."""
    runner = FakeRunner(60, 4)
    limits = Limits(max_model_len=200, max_num_seqs=4, max_num_batched_tokens=64, itl_target_s=0.020)
    made = make_scheduler(
        limits, runner.pool, SchedulerConfig(speculating=SpeculationConfig(method="draft", num_tokens=8, drafts=DRAFTS))
    )
    made.submit(1, make_request(5, 190))
    slow = 0
    while not made.is_idle():
        plan = made.schedule()
        assert plan is not None
        passes = sum(plan.depths)
        is_first = passes > 0 and not slow and (made.fit.model() is not None) == is_fitted
        draft_s = 0.5 if is_first else 0.0005 * passes
        slow += is_first
        made.commit(msgspec.structs.replace(runner.run(plan), draft_s=draft_s), 0.010 + 0.001 * sum(plan.counts) + draft_s)
    late = runner.plans[-20:]
    assert slow and sum(sum(plan.depths) > 0 for plan in late) > 15


def test_pass_cost_is_learned_from_few_small_drafts() -> None:
    """Sixteen requests whose prompts the draft has not computed, and a draft that never pays: it is known after some steps."""
    runner = Wrong(2000, 4)
    made = make_scheduler(
        Limits(max_model_len=400, max_num_seqs=16, max_num_batched_tokens=512),
        runner.pool,
        SchedulerConfig(speculating=SpeculationConfig(method="draft", num_tokens=4, drafts=DRAFTS)),
    )
    for handle in range(16):
        made.submit(handle, make_request(20, 150, seed=handle))
    while not made.is_idle():
        plan = made.schedule()
        assert plan is not None
        behind = sum(len(one.tokens) for one in plan.catch_ups)
        draft_s = 0.006 * max(plan.depths, default=0) + 0.0001 * behind
        made.commit(msgspec.structs.replace(runner.run(plan), draft_s=draft_s), 0.016 + 0.0002 * sum(plan.counts) + draft_s)
    drafted = [sum(plan.depths) for plan in runner.plans]
    assert max(drafted) == 1 and 2 < sum(map(bool, drafted)) < 15, "one at a time, and seldom"


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
    """The first of all may have loaded what later ones find: alone it is not believed, and soon forgotten."""
    model, plain, cost = (
        StepModel(fixed_s=0.008, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0),
        StepWork(0, 2, 100),
        VerifyCost(),
    )
    believed = []
    for draft_s in (5.0, 0.003, 0.002, 0.002):
        cost.learn(model, plain, 2, 2, 0.012 + draft_s, draft_s)
        believed.append(cost.pass_s)
    assert believed == pytest.approx([0.0, 0.0015, 0.001, 0.001])


UNPAYING = StepModel(fixed_s=0.001, token_s=1.0, knee_tokens=0, context_s=0.0, attention_s=0.0)


def test_steps_with_prompts_do_not_each_probe_a_draft() -> None:
    """A saturated server: a prompt chunk in every step, and nothing known of passes."""
    request = running_request([8] * 3, "draft", pages=2)
    speculator = Speculator(
        Limits(max_model_len=100_000, max_num_seqs=1, max_num_batched_tokens=400),
        PagePool(8, 4),
        SpeculationConfig(method="draft", drafts=DRAFTS),
    )
    tried = 0
    for step in range(10 * PROBE_EVERY):
        making = StepBuilder(
            step=step, draft_room=400, chunks=[ScheduledChunk(request=request, start=len(request.tokens) - 1, count=1)]
        )
        speculator.propose(making, UNPAYING, 0, True)
        tried += making.chunks[0].depth
    assert 0 < tried <= 10


def test_pass_cost_is_learned_from_drafts_not_lookups() -> None:
    """The lookup lacks nothing, the drafted request a prompt; neither pays."""
    found = running_request([8, 1, 2, 5, 7, 1, 2], "ngram", pages=2)
    lacking = running_request([7] * 30, "draft", pages=2)
    pool = PagePool(40, 4)
    for request in (found, lacking):
        request.pages = pool.take(len(request.pages)) or []
    speculator = Speculator(
        Limits(max_model_len=100_000, max_num_seqs=2, max_num_batched_tokens=400),
        pool,
        SpeculationConfig(method="draft", drafts=DRAFTS),
    )
    making = StepBuilder(
        step=0,
        draft_room=400,
        chunks=[ScheduledChunk(request=request, start=len(request.tokens) - 1, count=1) for request in (found, lacking)],
    )
    speculator.propose(making, StepModel(fixed_s=0.001, token_s=0.0007, knee_tokens=0, context_s=0.0, attention_s=0.0), 0, False)
    assert [(chunk.depth, len(chunk.behind)) for chunk in making.chunks] == [(0, 0), (1, 29)]


def test_catch_up_is_part_of_a_probes_cost() -> None:
    def rest_after(parts: int) -> int:
        probing = Probing()
        for step in range(parts):
            probing.probes(step, is_part=True)
            probing.goes_on()
            probing.took(0.08)
        probing.probes(parts)
        probing.proposed()
        probing.took(0.08)
        steps = 0
        while not probing.is_due:
            probing.found_nothing(parts + steps, 1, True)
            steps += 1
        return steps - 1

    assert [rest_after(parts) for parts in (0, 2, 9)] == [PROBE_EVERY, 24, 2 * PROBE_EVERY]


@dataclass(frozen=True, slots=True)
class Asked(StepModel):
    """A step-time function that notes how often it was evaluated."""

    times: list[int] = field(default_factory=list)

    def predict(self, work: StepWork) -> float:
        self.times.append(1)
        return StepModel.predict(self, work)


@pytest.mark.parametrize(("methods", "is_asked"), [(["none", "none"], False), (["none", "ngram"], True)])
def test_steps_without_speculation_compute_no_costs(methods: list[Method], is_asked: bool) -> None:
    requests = [running_request([8, 1, 2, 5, 7, 1, 2], method, pages=2) for method in methods]
    for request, method in zip(requests, methods, strict=True):
        request.proposing = None if method == "none" else request.proposing
    speculator = Speculator(
        Limits(max_model_len=100_000, max_num_seqs=2, max_num_batched_tokens=400),
        PagePool(8, 4),
        SpeculationConfig(method="none"),
    )
    making = StepBuilder(
        step=1,
        draft_room=400,
        chunks=[ScheduledChunk(request=request, start=len(request.tokens) - 1, count=1) for request in requests],
    )
    model = Asked(fixed_s=0.008, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0)
    speculator.propose(making, model, 2, False)
    assert bool(model.times) == is_asked
