"""Backfill of a draft model: nothing for requests without draft tokens, and the missing tokens before it drafts again.

The fake runner's draft has its own slots, and asserts before each draft that they have all tokens of the request.
"""

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_api.cost import StepModel
from phalanx_api.speculation import Speculation
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.speculation.draft_length import StepCosts, could_pay, deduct_backfill
from phalanx_runtime.core.speculation.probing import LOOK_INTERVAL, PROBE_INTERVAL
from phalanx_runtime.core.speculation.speculator import Speculator
from phalanx_runtime.core.step_builder import ChunkDraft, ScheduledChunk, StepBuilder
from phalanx_runtime.core.step_plan import StepPlan
from tests.runtime.core.speculation.speculating import DRAFTS, make_engine, running_request
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request

ADAPTIVE = SpeculationConfig(method="draft", num_tokens=4, draft_methods=DRAFTS)


def run_step(runner: FakeRunner, scheduler: Scheduler, pass_s: float) -> tuple[StepPlan, wire.Tokens]:
    """Runs one step of 20 ms and draft passes of `pass_s`."""
    plan = scheduler.schedule()
    assert plan is not None
    num_backfilled = sum(len(backfill.tokens) for backfill in plan.backfills)
    draft_s = pass_s * max(plan.depths, default=0) + 1e-5 * num_backfilled
    result = msgspec.structs.replace(runner.run(plan), draft_s=draft_s)
    return plan, scheduler.commit(result, 0.020 + 0.0001 * sum(plan.counts) + draft_s)


def test_draft_skips_paused_request_and_computes_it_later() -> None:
    runner = FakeRunner(500, 4)
    scheduler = make_engine(runner, ADAPTIVE, model_len=2000)
    request = make_request(5, 1500)
    scheduler.submit(1, request)
    output, plans, step = list[int](), list[StepPlan](), 0
    while not scheduler.is_idle():
        plan, frame = run_step(runner, scheduler, pass_s=0.050 if 100 <= step < 400 else 0.0002)
        output, step = output + frame.tokens, step + 1
        plans.append(plan)
    assert output == expected_output(request)
    assert all(plan.paths for plan in plans[40:90]), "drafts pay"
    expensive = plans[150:400]
    assert sum(bool(plan.paths or plan.backfills) for plan in expensive) < 10, "only probes and their backfills"
    probes = [len(backfill.tokens) for plan in expensive for backfill in plan.backfills]
    assert probes and max(probes) > PROBE_INTERVAL, "each probe backfills the tokens since the previous one"
    assert sum(bool(plan.paths) for plan in plans[-40:]) > 30, "drafts pay again"


def test_long_backfill_is_split_over_steps() -> None:
    """The draft is too slow for 150 steps, and a step has at num_tokens 32 tokens."""
    runner = FakeRunner(400, 4)
    scheduler = make_engine(runner, ADAPTIVE, model_len=2000, budget=32)
    request = make_request(5, 900)
    scheduler.submit(1, request)
    output, plans, step = list[int](), list[StepPlan](), 0
    while not scheduler.is_idle():
        plan, frame = run_step(runner, scheduler, pass_s=0.020 if step < 150 else 0.0001)
        output, step = output + frame.tokens, step + 1
        plans.append(plan)
    assert output == expected_output(request)
    sizes = [len(backfill.tokens) for plan in plans for backfill in plan.backfills]
    assert max(sizes) == 32 and any(plan.backfills and not plan.paths for plan in plans[10:]), "in parts, without draft tokens"
    assert sum(bool(plan.paths) for plan in plans[-100:]) > 80


@pytest.mark.parametrize("pass_s", [0.00001, 0.1], ids=["drafts pay", "a probe completes the backfill"])
def test_long_backfill_takes_consecutive_steps(pass_s: float) -> None:
    """A request without the draft's KV needs twenty steps of backfill; the time of a pass is known."""
    length, pool = 20 * 512, PagePool(3000, 4)
    request = running_request([7] * (length + 1), "draft", pages=2)
    request.pages.ids = pool.allocate(len(request.pages.ids)) or []
    speculator = Speculator(Limits(max_model_len=100_000, max_num_seqs=1, max_num_batched_tokens=600), pool, ADAPTIVE)
    model, backfilled, depths = StepModel(fixed_s=0.001, token_s=1e-6, knee_tokens=0, context_s=0.0, attention_s=0.0), [], []
    for step in range(3):
        measured = StepBuilder(
            step=step,
            chunks=[
                ScheduledChunk(request=request, start=length, count=1, draft=ChunkDraft(depth=1, parents=[-1], is_drafted=True))
            ],
        )
        measured.measure_plain_work()
        speculator.learn(measured, model, 0.001 + pass_s, pass_s, "")
    for step in range(3, 25):
        builder = StepBuilder(step=step, backfill_budget=512, chunks=[ScheduledChunk(request=request, start=length, count=1)])
        speculator.propose(builder, model, 1, False)
        speculator.learn(
            builder, model, 0.001 + pass_s * builder.chunks[0].draft.depth, pass_s * builder.chunks[0].draft.depth, ""
        )
        backfilled.append(len(builder.chunks[0].backfill))
        depths.append(builder.chunks[0].draft.depth)
    assert sorted(backfilled[:21]) == [0] + [512] * 20, "except the step in which drafts do not seem to pay"
    assert not any(depths[:20]) and depths[20] > 0, "drafts follow the backfill"


@pytest.mark.parametrize(("num_tokens", "max_tokens"), [(0, 30), (4, 1), (4, 2), (4, 3)])
def test_prompt_of_a_request_without_drafts_is_not_drafted(num_tokens: int, max_tokens: int) -> None:
    runner = FakeRunner(200, 4)
    scheduler = make_engine(runner, ADAPTIVE, model_len=2000)
    scheduler.submit(1, msgspec.structs.replace(make_request(30, max_tokens), speculation=Speculation(num_tokens=num_tokens)))
    plan, _ = run_step(runner, scheduler, 0.0)
    assert [len(backfill.tokens) for backfill in plan.backfills] == ([30] if num_tokens and max_tokens > 2 else [])
    while not scheduler.is_idle():
        plan, _ = run_step(runner, scheduler, 0.0)
        assert num_tokens or not plan.paths


def test_prompts_are_drafted_only_while_drafts_pay() -> None:
    for pass_s, is_drafted in ((0.0001, True), (0.100, False)):
        runner = FakeRunner(400, 4)
        scheduler = make_engine(runner, ADAPTIVE, model_len=2000)
        scheduler.submit(1, make_request(5, 300))
        for _ in range(100):
            run_step(runner, scheduler, pass_s)
        scheduler.submit(2, make_request(50, 4, seed=3))
        plan, _ = run_step(runner, scheduler, pass_s)
        backfills = [backfill for backfill in plan.backfills if plan.starts[backfill.request] == 0]
        assert [(backfill.start, len(backfill.tokens)) for backfill in backfills] == ([(0, 50)] if is_drafted else [])


def test_request_that_finds_undrafted_pages_backfills_them() -> None:
    """The first request has no drafts; the second finds its pages, which lack the draft's KV."""
    runner = FakeRunner(200, 4)
    scheduler = make_engine(runner, SpeculationConfig(method="draft", num_tokens=4, is_adaptive=False, draft_methods=DRAFTS))
    first = msgspec.structs.replace(make_request(30, 30), speculation=Speculation("none"))
    scheduler.submit(1, first)
    while not scheduler.is_idle():
        plan, _ = run_step(runner, scheduler, 0.0)
        assert not plan.backfills
    whole = [*first.prompt, *expected_output(first)]
    later = make_request([*whole, 7], 20)
    scheduler.submit(2, later)
    plan, _ = run_step(runner, scheduler, 0.0)
    assert plan.starts == [(len(whole) - 1) // 4 * 4]
    assert [(backfill.start, len(backfill.tokens)) for backfill in plan.backfills] == [(0, len(whole) + 1)]
    output = list[int]()
    while not scheduler.is_idle():
        output += run_step(runner, scheduler, 0.0)[1].tokens
    assert expected_output(later)[-len(output) :] == output


def test_copied_page_keeps_the_drafts_kv() -> None:
    pool = PagePool(4, 4)
    source, target, other, _ = pool.allocate(4) or []
    pool.mark_drafted(source, 3)
    pool.mark_drafted(target, 4)
    pool.record_copy(source, target, 2, is_drafted=True)
    pool.record_copy(source, other, 3, is_drafted=False)
    assert (pool.drafted(target), pool.drafted(other)) == (2, 0)
    pool.mark_drafted(target, 1)
    assert pool.drafted(target) == 2, "the mark never decreases"
    pool.release([source])
    assert [pool.drafted(page) for page in pool.allocate(1) or []] == [0], "an allocated page has no mark"


@given(
    st.lists(st.floats(0.01, 0.99), min_size=1, max_size=4).map(lambda chances: sorted(chances, reverse=True)),
    st.integers(1, 5000),
    st.integers(0, 200),
    st.floats(1e-6, 1e-2),
)
def test_backfill_must_pay_for_itself(chances: list[float], missing: int, steps: int, backfill_token_s: float) -> None:
    costs = StepCosts(plain_s=0.010, extra_s=lambda count: 0.0, backfill_token_s=backfill_token_s)
    net = deduct_backfill(chances, costs, 1, missing, steps)
    assert sum(net) <= sum(chances) and list(net) == sorted(net, reverse=True)
    assert sum(deduct_backfill(chances, costs, 1, missing, steps + 1)) >= sum(net), "more steps pay for it"
    assert sum(deduct_backfill(chances, costs, 1, missing + 1, steps)) <= sum(net)
    assert deduct_backfill(chances, None, 1, missing, steps) == chances
    assert bool(net) == (missing * backfill_token_s / (0.010 * min(max(steps, 1), 64)) < sum(chances))


class CountingPool(PagePool):
    """Counts calls of `drafted`."""

    num_calls = 0

    def drafted(self, page: int) -> int:
        self.num_calls += 1
        return super().drafted(page)


def test_unprofitable_draft_is_not_reconsidered_each_step() -> None:
    """A draft pass takes a hundred steps: candidates are built rarely."""
    pool = CountingPool(100, 4)
    speculator = Speculator(Limits(max_model_len=1000, max_num_seqs=4, max_num_batched_tokens=64), pool, ADAPTIVE)
    model, searched = StepModel(fixed_s=0.001, token_s=1e-6, knee_tokens=0, context_s=0.0, attention_s=0.0), []
    requests = [running_request([7] * 9, "draft", pages=1) for _ in range(4)]
    for request in requests:
        request.pages.ids = pool.allocate(4) or []
    for step in range(200):
        builder = StepBuilder(
            step=step, backfill_budget=64, chunks=[ScheduledChunk(request=request, start=8, count=1) for request in requests]
        )
        before = pool.num_calls
        speculator.propose(builder, model, 4, False)
        searched.append(pool.num_calls > before)
        depth = max(chunk.draft.depth for chunk in builder.chunks)
        speculator.learn(builder, model, 0.001 + 0.1 * depth, 0.1 * depth, "")
    assert 0 < sum(searched[100:]) <= 100 // LOOK_INTERVAL + 2
    builder = StepBuilder(
        step=200, backfill_budget=64, chunks=[ScheduledChunk(request=request, start=8, count=1) for request in requests[:2]]
    )
    before = pool.num_calls
    speculator.propose(builder, model, 2, False)
    assert pool.num_calls > before, "another number of decodes is searched at once"


@pytest.mark.parametrize(("token_s", "pays"), [(0.0004, True), (0.0009, True), (0.00099, False), (0.002, False)])
def test_lookup_is_skipped_where_certain_tokens_do_not_pay(token_s: float, pays: bool) -> None:
    """Sixteen decodes in 16 ms: a certain token pays below 1 ms, less the margin."""
    costs = StepCosts(plain_s=0.016, extra_s=lambda count: count * token_s)
    assert could_pay(costs, 16, 200) == pays
    rows = list[int]()

    def fitting(row: int, tokens: object, index: int) -> int:
        rows.append(row)
        return 4

    request = running_request([1, 2, 3, 4] * 5, "ngram", pages=2)
    request.row, request.pages.num_sent = 0, 1
    speculator = Speculator(
        Limits(max_model_len=1000, max_num_seqs=1, max_num_batched_tokens=64),
        PagePool(20, 4),
        SpeculationConfig(method="ngram"),
        fitting,
    )
    model = StepModel(fixed_s=max(0.0, 0.001 - token_s), token_s=token_s, knee_tokens=0, context_s=0.0, attention_s=0.0)
    for step in range(PROBE_INTERVAL):
        speculator.propose(
            StepBuilder(step=step, backfill_budget=64, chunks=[ScheduledChunk(request=request, start=19, count=1)]),
            model,
            0,
            False,
        )
    assert bool(rows) == pays
