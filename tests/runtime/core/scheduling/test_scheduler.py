import random

import msgspec
import pytest

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits, Refusal
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.running import RunningSet
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult
from tests.runtime.fake_runner import MODULUS, VOCAB, FakeRunner, expected_output, make_request, next_token

LRU = SchedulerConfig(eviction_policy="lru")


def make_engine(
    num_pages: int = 64, page_size: int = 4, *, model_len: int = 128, seqs: int = 4, budget: int = 16, max_waiting: int = 8
) -> tuple[Scheduler, FakeRunner]:
    runner = FakeRunner(num_pages, page_size)
    limits = Limits(max_model_len=model_len, max_num_seqs=seqs, max_num_batched_tokens=budget, max_waiting=max_waiting)
    return make_scheduler(limits, runner.pool, LRU), runner


def step(scheduler: Scheduler, runner: FakeRunner) -> wire.Tokens:
    plan = scheduler.schedule()
    assert plan is not None
    return scheduler.commit(runner.run(plan))


def finish(scheduler: Scheduler, runner: FakeRunner) -> tuple[dict[int, list[int]], dict[int, wire.FinishReason]]:
    """Runs until all requests end. Returns output tokens and finish reasons by handle."""
    output: dict[int, list[int]] = {}
    reasons: dict[int, wire.FinishReason] = {}
    while not scheduler.is_idle():
        frame = step(scheduler, runner)
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            output.setdefault(handle, []).append(token)
        reasons |= {end.handle: end.reason for end in frame.finished}
        assert scheduler.check() == []
    return output, reasons


def test_a_request_runs_to_max_tokens() -> None:
    scheduler, runner = make_engine()
    request = make_request(5, 6)
    assert scheduler.submit(1, request) is None
    assert finish(scheduler, runner) == ({1: expected_output(request)}, {1: "length"})
    assert scheduler.pool.free_pages == 64
    assert scheduler.schedule() is None


def test_prompt_is_chunked_and_sampled_after_its_last_chunk() -> None:
    scheduler, runner = make_engine(budget=4)
    scheduler.submit(1, make_request(10, 2))
    finish(scheduler, runner)
    assert [(p.starts, p.counts, p.draws) for p in runner.plans] == [
        ([0], [4], []),
        ([4], [4], []),
        ([8], [2], [(0, 0)]),
        ([10], [1], [(0, 1)]),
    ]


def test_decodes_precede_prefill_in_the_budget() -> None:
    scheduler, runner = make_engine(budget=8)
    scheduler.submit(1, make_request(20, 3, seed=1))
    step(scheduler, runner)
    scheduler.submit(2, make_request(2, 3, seed=2))
    step(scheduler, runner)
    assert (runner.plans[1].rows, runner.plans[1].counts) == ([0, 1], [6, 2])
    step(scheduler, runner)
    assert (runner.plans[2].rows, runner.plans[2].counts) == ([1, 0], [1, 6])
    scheduler.submit(3, make_request(30, 3, seed=3))
    step(scheduler, runner)
    assert (runner.plans[3].rows, runner.plans[3].counts) == ([0, 1, 2], [1, 1, 6])


def test_rows_are_bounded_and_reused() -> None:
    scheduler, runner = make_engine(seqs=2)
    for handle in range(5):
        scheduler.submit(handle, make_request(3, 2, seed=handle))
    output, _ = finish(scheduler, runner)
    assert output == {handle: expected_output(make_request(3, 2, seed=handle)) for handle in range(5)}
    assert {row for plan in runner.plans for row in plan.rows} == {0, 1}


def test_plans_name_the_rows_that_requests_left() -> None:
    scheduler, runner = make_engine()
    for handle, length in ((1, 1), (2, 2)):
        scheduler.submit(handle, make_request(3, length))
        finish(scheduler, runner)
    found = [([new.row for new in plan.admitted], plan.left_rows) for plan in runner.plans]
    assert found == [([0], []), ([0], [0]), ([], [])]


def test_frozen_prompt_is_not_computed_before_its_thaw() -> None:
    scheduler, runner = make_engine(budget=4)
    request = make_request(10, 3)
    scheduler.submit(1, request)
    step(scheduler, runner)
    assert scheduler.freeze(1)
    assert scheduler.schedule() is None and scheduler.is_blocked()
    scheduler.thaw(1)
    assert finish(scheduler, runner)[0] == {1: expected_output(request)}


def test_stop_token_ends_the_request_after_delivery() -> None:
    undisturbed = expected_output(make_request(5, 10))
    request = make_request(5, 10, stop=[undisturbed[3]])
    scheduler, runner = make_engine()
    scheduler.submit(1, request)
    output, reasons = finish(scheduler, runner)
    assert output[1] == undisturbed[: undisturbed.index(undisturbed[3]) + 1]
    assert reasons == {1: "stop"}


def test_stop_token_before_min_tokens_is_ignored() -> None:
    undisturbed = expected_output(make_request(5, 10))
    request = make_request(5, 10, stop=[undisturbed[0]], min_tokens=2)
    scheduler, runner = make_engine()
    scheduler.submit(1, request)
    output, _ = finish(scheduler, runner)
    assert len(output[1]) >= 2
    assert output[1] == expected_output(request)


@pytest.mark.parametrize(("num_pages", "model_len"), [(64, 12), (3, 128)], ids=["the model's limit", "the pool's limit"])
def test_a_request_ends_at_the_longest_context(num_pages: int, model_len: int) -> None:
    scheduler, runner = make_engine(num_pages, model_len=model_len)
    request = make_request(5, 1000)
    scheduler.submit(1, request)
    output, reasons = finish(scheduler, runner)
    assert output[1] == expected_output(request, max_model_len=12)
    assert reasons == {1: "length"}


def test_delivered_tokens_are_context_and_advance_the_seed() -> None:
    whole = expected_output(make_request(5, 8))
    scheduler, runner = make_engine()
    scheduler.submit(1, make_request(5, 8, delivered=whole[:3], epoch=2))
    first = step(scheduler, runner)
    assert (first.handles, first.epochs, first.indices, first.tokens) == ([1], [2], [3], [whole[3]])
    output, reasons = finish(scheduler, runner)
    assert output[1] == whole[4:]
    assert reasons == {1: "length"}


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (make_request(5, 2, delivered=[7, 8]), "length"),
        (make_request(5, 9, delivered=[7, 8], stop=[8]), "stop"),
        (make_request(5, 0), "length"),
        (make_request(20, 900, delivered=[1] * 200), "length"),
    ],
    ids=["max_tokens were delivered", "a stop token was delivered", "no token is requested", "the context is full"],
)
def test_delivered_tokens_may_end_the_request_at_once(request_: wire.Request, reason: wire.FinishReason) -> None:
    scheduler, _ = make_engine(max_waiting=0)
    assert scheduler.submit(1, request_) == wire.Finished(1, 0, reason)
    assert scheduler.is_idle()


def test_a_request_that_never_fits_is_refused_with_400() -> None:
    scheduler, _ = make_engine(num_pages=2)
    answer = scheduler.submit(1, make_request(8, 1))
    assert isinstance(answer, Refusal)
    assert (answer.status, answer.code) == (400, "context_length_exceeded")
    assert scheduler.is_idle()


def test_a_full_queue_refuses_with_its_backlog() -> None:
    scheduler, _ = make_engine(max_waiting=2)
    scheduler.submit(1, make_request(5))
    scheduler.submit(2, make_request(6))
    answer = scheduler.submit(3, make_request(7))
    assert isinstance(answer, Refusal)
    assert (answer.status, answer.backlog_tokens) == (429, 11)


def test_backlog_uses_the_recent_output_length() -> None:
    scheduler, runner = make_engine()
    assert scheduler.submit(1, make_request(5, 20)) is None
    finish(scheduler, runner)
    scheduler.submit(2, make_request(6, 20))
    assert scheduler.backlog_tokens == 6 + 20


def test_a_handle_in_use_is_refused() -> None:
    scheduler, _ = make_engine()
    scheduler.submit(1, make_request())
    answer = scheduler.submit(1, make_request())
    assert isinstance(answer, Refusal)
    assert answer.code == "handle_in_use"


def test_newest_request_is_preempted_and_keeps_its_tokens() -> None:
    scheduler, runner = make_engine(num_pages=6, seqs=3, budget=32)
    requests = {handle: make_request(6, 10, seed=handle) for handle in range(3)}
    for handle, request in requests.items():
        scheduler.submit(handle, request)
    output, _ = finish(scheduler, runner)
    assert scheduler.num_preemptions > 0
    assert output == {handle: expected_output(request) for handle, request in requests.items()}
    resumed = next(plan for plan in runner.plans[1:] if plan.admitted and plan.admitted[0].sampling.seed == 1)
    assert resumed.starts[resumed.rows.index(resumed.admitted[0].row)] == 8, "its full pages are cached"


def test_abort_frees_pages() -> None:
    scheduler, runner = make_engine(seqs=1)
    scheduler.submit(1, make_request())
    scheduler.submit(2, make_request())
    step(scheduler, runner)
    scheduler.abort(1)
    scheduler.abort(2)
    scheduler.abort(3)
    assert scheduler.is_idle()
    assert scheduler.check() == []
    assert scheduler.pool.free_pages == 64
    assert scheduler.backlog_tokens == 0


def test_abort_during_a_step_frees_pages_after_commit() -> None:
    scheduler, runner = make_engine()
    scheduler.submit(1, make_request(5, seed=1))
    scheduler.submit(2, make_request(5, seed=2))
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.abort(1)
    assert scheduler.pool.free_pages == 60
    assert not scheduler.is_idle()
    assert scheduler.commit(runner.run(plan)).handles == [2]
    assert scheduler.pool.free_pages == 62
    assert scheduler.check() == []


def test_load_counts_tokens_to_compute_and_tokens_allowed() -> None:
    scheduler, runner = make_engine(seqs=1)
    scheduler.submit(1, make_request(5, 4))
    scheduler.submit(2, make_request(6, 1000))
    load = scheduler.load()
    assert (load.waiting, load.running, load.outstanding_tokens, load.free_pages) == (2, 0, 9 + 128, 64)
    step(scheduler, runner)
    load = scheduler.load()
    assert (load.waiting, load.running, load.outstanding_tokens, load.free_pages) == (1, 1, 4 + 128, 62)
    assert load.prefix_queried_tokens == 5


def test_check_sees_a_lost_row() -> None:
    scheduler, _ = make_engine()
    running = RunningSet(2, scheduler.sharing)
    running.reserve()
    assert running.check() == ["rows are [1], expected each of 2 once"]


@pytest.mark.parametrize(
    "bad", [StepResult(step=7, tokens=[1]), StepResult(step=1, tokens=[])], ids=["another step", "too few tokens"]
)
def test_result_that_mismatches_the_plan_is_a_bug(bad: StepResult) -> None:
    scheduler, _ = make_engine()
    scheduler.submit(1, make_request())
    scheduler.schedule()
    with pytest.raises(AssertionError):
        scheduler.commit(bad)


TRACE = """
1 new=[0, 1] rows=[0, 1] starts=[0, 0] counts=[3, 3] pages=[[0, 1], [2]] draws=[(1, 0)]
2 new=[] rows=[1, 0] starts=[3, 3] counts=[1, 4] pages=[[], []] draws=[(0, 1), (1, 0)]
3 new=[] rows=[0, 1] starts=[7, 4] counts=[1, 1] pages=[[], [3]] draws=[(0, 1), (1, 2)]
4 new=[] rows=[0] starts=[8] counts=[1] pages=[[3]] draws=[(0, 2)]
5 new=[] rows=[0] starts=[9] counts=[1] pages=[[]] draws=[(0, 3)]
6 new=[0] rows=[0] starts=[4] counts=[2] pages=[[2, 3]] draws=[(0, 3)]
"""


def render(plan: StepPlan) -> str:
    new = [row.row for row in plan.admitted]
    return (
        f"{plan.step} new={new} rows={plan.rows} starts={plan.starts} counts={plan.counts} pages={plan.pages} draws={plan.draws}"
    )


def test_the_same_workload_gives_the_same_plans() -> None:
    scheduler, runner = make_engine(num_pages=4, seqs=2, budget=6)
    scheduler.submit(1, make_request(7, 4, seed=1))
    scheduler.submit(2, make_request(3, 4, seed=2))
    finish(scheduler, runner)
    assert "\n".join(render(plan) for plan in runner.plans) == TRACE.strip()


def test_the_fake_model_sees_the_whole_context() -> None:
    for num in (0, 1, 2, 7, 8, 100):
        context = [7 * index % VOCAB for index in range(num)]
        for window in (0, 1, 5):
            value = 3 * 7919 + num
            for token in context[-window:]:
                value = (value * 31 + token + 1) % MODULUS
            assert next_token(context, 3, window) == value % VOCAB
    assert PoolShape(1, 2) == FakeRunner(1, 2).pool


def test_full_queue_accepts_a_stream_started_elsewhere() -> None:
    scheduler, _ = make_engine(max_waiting=0)
    assert isinstance(scheduler.submit(1, make_request(5)), Refusal)
    without_tokens = msgspec.structs.replace(make_request(5), epoch=1)
    delivered = msgspec.structs.replace(make_request(5), delivered=[7])
    assert scheduler.submit(2, without_tokens) is None
    assert scheduler.submit(3, delivered) is None


def test_request_complete_on_arrival_ends_without_a_token() -> None:
    scheduler = make_scheduler(Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16), PoolShape(16, 4), LRU)
    assert scheduler.submit(1, msgspec.structs.replace(make_request(3, 8), epoch=1, delivered=[5])) is None
    plan = scheduler.schedule()
    assert plan is not None
    frame = scheduler.commit(StepResult(step=plan.step, tokens=[0], already_complete=[0]))
    assert (frame.handles, frame.tokens) == ([], [])
    assert frame.finished == [wire.Finished(1, 1, "stop", 0)]
    assert scheduler.is_idle()
    assert scheduler.check() == []


def test_expected_output_goes_on_as_the_fake_model_samples() -> None:
    rng = random.Random(7)
    for _ in range(100):
        prompt, delivered = ([rng.randrange(50) for _ in range(rng.randrange(30))] for _ in range(2))
        request = make_request(prompt, rng.randrange(60), delivered=delivered, seed=rng.randrange(99), stop=[1, 2], min_tokens=3)
        max_model_len, sampling, output = rng.choice((40, 10**9)), request.sampling, list(delivered)
        while len(output) < sampling.max_tokens and len(prompt) + len(output) < max_model_len:
            if len(output) >= 3 and output[-1] in (1, 2):
                break
            output.append(next_token(prompt + output, sampling.seed))
        assert expected_output(request, max_model_len) == output
