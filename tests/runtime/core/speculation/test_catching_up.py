"""What a draft model computes beside its drafts: nothing for requests that rest, and what is missing before it drafts again.

The fake runner's draft has slots of its own, and asserts before each draft that they hold the request up to its own token.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_api.cost import StepModel
from phalanx_api.speculation import Method, Speculation
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.speculation.draft_length import StepCosts, could_pay, with_catching_up
from phalanx_runtime.core.speculation.probing import LOOK_EVERY, PROBE_EVERY
from phalanx_runtime.core.speculation.speculator import Speculator
from phalanx_runtime.core.step_builder import ScheduledChunk, StepBuilder
from phalanx_runtime.core.step_plan import StepPlan
from tests.runtime.core.speculation.test_speculator import running_request
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request

DRAFTS: frozenset[Method] = frozenset({"draft"})
ADAPTIVE = SpeculationConfig(method="draft", num_tokens=4, drafts=DRAFTS)


def scheduler(runner: FakeRunner, speculating: SpeculationConfig = ADAPTIVE, budget: int = 64) -> Scheduler:
    return make_scheduler(
        Limits(max_model_len=2000, max_num_seqs=4, max_num_batched_tokens=budget),
        runner.pool,
        SchedulerConfig(speculating=speculating),
    )


def turn(runner: FakeRunner, made: Scheduler, pass_s: float) -> tuple[StepPlan, wire.Tokens]:
    """One step of 20 ms, with passes of the draft that take so long."""
    plan = made.schedule()
    assert plan is not None
    behind = sum(len(one.tokens) for one in plan.catch_ups)
    draft_s = pass_s * max(plan.depths, default=0) + 1e-5 * behind
    result = msgspec.structs.replace(runner.run(plan), draft_s=draft_s)
    return plan, made.commit(result, 0.020 + 0.0001 * sum(plan.counts) + draft_s)


def test_draft_skips_paused_request_and_computes_it_later() -> None:
    runner = FakeRunner(500, 4)
    made = scheduler(runner)
    asked = make_request(5, 1500)
    made.submit(1, asked)
    output, plans, step = list[int](), list[StepPlan](), 0
    while not made.is_idle():
        plan, frame = turn(runner, made, pass_s=0.050 if 100 <= step < 400 else 0.0002)
        output, step = output + frame.tokens, step + 1
        plans.append(plan)
    assert output == expected_output(asked)
    assert all(one.paths for one in plans[40:90]), "it pays"
    dear = plans[150:400]
    assert sum(bool(one.paths or one.catch_ups) for one in dear) < 10, "now and then a probe, or what one has to catch up with"
    probes = [len(told.tokens) for one in dear for told in one.catch_ups]
    assert probes and max(probes) > PROBE_EVERY, "each probe caught up with what was decoded since the one before"
    assert sum(bool(one.paths) for one in plans[-40:]) > 30, "and it pays again"


def test_long_catch_up_is_split_over_steps() -> None:
    """The draft is too slow for 150 steps, and a step holds 32 tokens."""
    runner = FakeRunner(400, 4)
    made = scheduler(runner, budget=32)
    asked = make_request(5, 900)
    made.submit(1, asked)
    output, plans, step = list[int](), list[StepPlan](), 0
    while not made.is_idle():
        plan, frame = turn(runner, made, pass_s=0.020 if step < 150 else 0.0001)
        output, step = output + frame.tokens, step + 1
        plans.append(plan)
    assert output == expected_output(asked)
    sizes = [len(told.tokens) for plan in plans for told in plan.catch_ups]
    assert max(sizes) == 32 and any(one.catch_ups and not one.paths for one in plans[10:]), "in pieces, without a draft behind"
    assert sum(bool(plan.paths) for plan in plans[-100:]) > 80


@pytest.mark.parametrize("pass_s", [0.00001, 0.1], ids=["it pays", "it does not: what drafts began a probe ends"])
def test_long_catch_up_takes_consecutive_steps(pass_s: float) -> None:
    """A request came without what a draft computed: twenty steps of room, and what a pass takes is known."""
    length, pool = 20 * 512, PagePool(3000, 4)
    request = running_request([7] * (length + 1), "draft", pages=2)
    request.pages = pool.take(len(request.pages)) or []
    speculator = Speculator(Limits(max_model_len=100_000, max_num_seqs=1, max_num_batched_tokens=600), pool, ADAPTIVE)
    model, behind, depths = StepModel(fixed_s=0.001, token_s=1e-6, knee_tokens=0, context_s=0.0, attention_s=0.0), [], []
    for step in range(3):
        known = StepBuilder(
            step=step, chunks=[ScheduledChunk(request=request, start=length, count=1, depth=1, parents=[-1], is_drafted=True)]
        )
        known.describe_plain()
        speculator.learn(known, model, 0.001 + pass_s, pass_s, "")
    for step in range(3, 25):
        making = StepBuilder(step=step, draft_room=512, chunks=[ScheduledChunk(request=request, start=length, count=1)])
        speculator.propose(making, model, 1, False)
        speculator.learn(making, model, 0.001 + pass_s * making.chunks[0].depth, pass_s * making.chunks[0].depth, "")
        behind.append(len(making.chunks[0].behind))
        depths.append(making.chunks[0].depth)
    assert sorted(behind[:21]) == [0] + [512] * 20, "but for the step in which drafts seem to pay no more"
    assert not any(depths[:20]) and depths[20] > 0, "and then it drafts"


@pytest.mark.parametrize(("most", "max_tokens"), [(0, 30), (4, 1), (4, 2), (4, 3)])
def test_prompt_of_a_request_without_drafts_is_not_drafted(most: int, max_tokens: int) -> None:
    runner = FakeRunner(200, 4)
    made = scheduler(runner)
    made.submit(1, msgspec.structs.replace(make_request(30, max_tokens), speculation=Speculation(num_tokens=most)))
    plan, _ = turn(runner, made, 0.0)
    assert [len(one.tokens) for one in plan.catch_ups] == ([30] if most and max_tokens > 2 else [])
    while not made.is_idle():
        plan, _ = turn(runner, made, 0.0)
        assert most or not plan.paths


def test_prompts_are_drafted_only_while_drafts_pay() -> None:
    for pass_s, is_drafted in ((0.0001, True), (0.100, False)):
        runner = FakeRunner(400, 4)
        made = scheduler(runner)
        made.submit(1, make_request(5, 300))
        for _ in range(100):
            turn(runner, made, pass_s)
        made.submit(2, make_request(50, 4, seed=3))
        plan, _ = turn(runner, made, pass_s)
        told = [one for one in plan.catch_ups if plan.starts[one.request] == 0]
        assert [(one.start, len(one.tokens)) for one in told] == ([(0, 50)] if is_drafted else [])


def test_request_that_finds_undrafted_pages_catches_up() -> None:
    """The first request has no drafts; the second finds its pages and drafts: from nothing that the draft did not compute."""
    runner = FakeRunner(200, 4)
    made = scheduler(runner, SpeculationConfig(method="draft", num_tokens=4, is_adaptive=False, drafts=DRAFTS))
    first = msgspec.structs.replace(make_request(30, 30), speculation=Speculation("none"))
    made.submit(1, first)
    while not made.is_idle():
        plan, _ = turn(runner, made, 0.0)
        assert not plan.catch_ups
    whole = [*first.prompt, *expected_output(first)]
    later = make_request([*whole, 7], 20)
    made.submit(2, later)
    plan, _ = turn(runner, made, 0.0)
    assert plan.starts == [(len(whole) - 1) // 4 * 4]
    assert [(one.start, len(one.tokens)) for one in plan.catch_ups] == [(0, len(whole) + 1)]
    output = list[int]()
    while not made.is_idle():
        output += turn(runner, made, 0.0)[1].tokens
    assert expected_output(later)[-len(output) :] == output


def test_copied_page_keeps_the_drafts_earlier_work() -> None:
    pool = PagePool(4, 4)
    source, target, other, _ = pool.take(4) or []
    pool.mark_drafted(source, 3)
    pool.mark_drafted(target, 4)
    pool.copied(source, target, 2, is_drafted=True)
    pool.copied(source, other, 3, is_drafted=False)
    assert (pool.drafted(target), pool.drafted(other)) == (2, 0)
    pool.mark_drafted(target, 1)
    assert pool.drafted(target) == 2, "it lacks nothing that it has"
    pool.give_back([source])
    assert [pool.drafted(page) for page in pool.take(1) or []] == [0], "who takes a page finds nothing"


@given(
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=4).map(lambda some: sorted(some, reverse=True)),
    st.integers(1, 5000),
    st.integers(0, 200),
    st.floats(1e-6, 1e-2),
)
def test_catch_up_cost_must_be_earned_back(chances: list[float], missing: int, steps: int, behind_s: float) -> None:
    costs = StepCosts(plain_s=0.010, extra_s=lambda count: 0.0, behind_s=behind_s)
    worth = with_catching_up(chances, costs, 1, missing, steps)
    assert sum(worth) <= sum(chances) and list(worth) == sorted(worth, reverse=True)
    assert sum(with_catching_up(chances, costs, 1, missing, steps + 1)) >= sum(worth), "the longer it is of use"
    assert sum(with_catching_up(chances, costs, 1, missing + 1, steps)) <= sum(worth)
    assert with_catching_up(chances, None, 1, missing, steps) == chances
    assert bool(worth) == (missing * behind_s / (0.010 * min(max(steps, 1), 64)) < sum(chances))


class Counting(PagePool):
    """Counts how often somebody asks what the draft computed."""

    num_asked = 0

    def drafted(self, page: int) -> int:
        self.num_asked += 1
        return super().drafted(page)


def test_unprofitable_draft_is_not_reconsidered_each_step() -> None:
    """A pass of the draft takes a hundred steps: requests are looked at now and then, for a probe at the latest."""
    pool = Counting(100, 4)
    speculator = Speculator(Limits(max_model_len=1000, max_num_seqs=4, max_num_batched_tokens=64), pool, ADAPTIVE)
    model, looked = StepModel(fixed_s=0.001, token_s=1e-6, knee_tokens=0, context_s=0.0, attention_s=0.0), []
    requests = [running_request([7] * 9, "draft", pages=1) for _ in range(4)]
    for request in requests:
        request.pages = pool.take(4) or []
    for step in range(200):
        making = StepBuilder(
            step=step, draft_room=64, chunks=[ScheduledChunk(request=request, start=8, count=1) for request in requests]
        )
        before = pool.num_asked
        speculator.propose(making, model, 4, False)
        looked.append(pool.num_asked > before)
        depth = max(chunk.depth for chunk in making.chunks)
        speculator.learn(making, model, 0.001 + 0.1 * depth, 0.1 * depth, "")
    assert 0 < sum(looked[100:]) <= 100 // LOOK_EVERY + 2
    making = StepBuilder(
        step=200, draft_room=64, chunks=[ScheduledChunk(request=request, start=8, count=1) for request in requests[:2]]
    )
    before = pool.num_asked
    speculator.propose(making, model, 2, False)
    assert pool.num_asked > before, "another load is looked at"


@pytest.mark.parametrize(("token_s", "pays"), [(0.0004, True), (0.0009, True), (0.00099, False), (0.002, False)])
def test_lookup_is_skipped_where_certain_tokens_do_not_pay(token_s: float, pays: bool) -> None:
    """Sixteen decodes in 16 ms: a token for sure has to take less than a millisecond, and the margin."""
    costs = StepCosts(plain_s=0.016, extra_s=lambda count: count * token_s)
    assert could_pay(costs, 16, 200) == pays
    asked = list[int]()

    def fitting(row: int, tokens: object, index: int) -> int:
        asked.append(row)
        return 4

    request = running_request([1, 2, 3, 4] * 5, "ngram", pages=2)
    request.row, request.sent = 0, 1
    speculator = Speculator(
        Limits(max_model_len=1000, max_num_seqs=1, max_num_batched_tokens=64),
        PagePool(20, 4),
        SpeculationConfig(method="ngram"),
        fitting,
    )
    model = StepModel(fixed_s=max(0.0, 0.001 - token_s), token_s=token_s, knee_tokens=0, context_s=0.0, attention_s=0.0)
    for step in range(PROBE_EVERY):
        speculator.propose(
            StepBuilder(step=step, draft_room=64, chunks=[ScheduledChunk(request=request, start=19, count=1)]), model, 0, False
        )
    assert bool(asked) == pays
