"""A step without memory preempts its newest request and is repeated; the second in a row ends the engine. So does a step whose
requests lack their state, without these."""

import random
from collections.abc import Callable, Mapping
from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.speculation.config import SpeculationConfig
from phalanx_runtime.core.step_plan import PoolShape, StepPlan, StepResult
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.errors import RowStateLost, StepOutOfMemory
from tests.runtime.engine.stepped_engine import Inbox
from tests.runtime.fake_runner import VOCAB, FakeRunner, expected_output, make_request

LIMITS = Limits(max_model_len=64, max_num_seqs=5, max_num_batched_tokens=16)
DRAFTS = SpeculationConfig(method="draft", draft_methods=frozenset({"draft"}), is_adaptive=False)
WHY = "CUDA out of memory. Tried to allocate 2.00 GiB"


class ShortRunner:
    """A fake runner that has no memory for some plans, or lacks the states of rows in them."""

    def __init__(
        self, fails: Callable[[StepPlan], bool], runs_ahead: bool, lost: Mapping[int, str] | None = None, depth: int = 1
    ) -> None:
        self.fake = FakeRunner(40, 4, runs_ahead=runs_ahead, num_host_pages=20)
        self.failed: list[StepPlan] = []
        self._fails, self._lost, self._depth = fails, lost, depth

    @property
    def pool(self) -> PoolShape:
        return self.fake.pool

    @property
    def depth(self) -> int:
        return self._depth

    def start(self, plan: StepPlan) -> None:
        if self._fails(plan):
            self.failed.append(plan)
            self.fake.fail(plan)
            if self._lost is not None:
                raise RowStateLost(self._lost)
            raise StepOutOfMemory(WHY)
        self.fake.start(plan)

    def finish(self) -> StepResult:
        return self.fake.finish()


DEFAULT = SchedulerConfig()


def run(
    requests: dict[int, wire.Request],
    runner: ShortRunner,
    lag: int = 0,
    per_turn: int = 99,
    config: SchedulerConfig = DEFAULT,
) -> tuple[EngineLoop, Inbox]:
    """Runs the requests to their end; `per_turn` arrive before each turn."""
    inbox = Inbox()
    loop = EngineLoop(runner, replace(LIMITS, async_scheduling=lag == 1), inbox, config=config)
    pending = list(requests.items())
    for _ in range(2000):
        arrivals, pending = pending[:per_turn], pending[per_turn:]
        inbox.messages += [wire.encode(wire.Submit(handle, request)) for handle, request in arrivals]
        loop.turn()
        assert not loop.scheduler.check()
        if not pending and loop.scheduler.is_idle():
            return loop, inbox
    raise AssertionError("requests do not end")


def outputs(inbox: Inbox) -> dict[int, list[int]]:
    found: dict[int, list[int]] = {}
    for frame in (frame for frame in inbox.sent if isinstance(frame, wire.Tokens)):
        for handle, index, token in zip(frame.handles, frame.indices, frame.tokens, strict=True):
            assert index == len(found.setdefault(handle, [])), "each token once, in order"
            found[handle].append(token)
    return found


def with_prefix(seed: int, shared: int) -> wire.Request:
    """Returns a request with `shared` common prompt tokens."""
    rng = random.Random(seed)
    prompt = [(7 * i) % VOCAB for i in range(shared)] + [rng.randrange(VOCAB) for _ in range(seed % 3)]
    request = make_request(prompt or [1], 3 + seed % 7, seed=seed)
    return msgspec.structs.replace(request, priority=-(seed % 3))


@pytest.mark.parametrize("lag", [0, 1])
def test_newest_request_is_preempted_and_the_step_repeated(lag: int, caplog: pytest.LogCaptureFixture) -> None:
    requests = {handle: make_request(5, 9, seed=handle) for handle in (1, 2, 3)}
    runner = ShortRunner(lambda plan: plan.step == 6, lag == 1)
    loop, inbox = run(requests, runner, lag)
    assert len(runner.failed) == 1 and len(runner.failed[0].rows) == 3
    assert loop.scheduler.num_preemptions == 1
    preempted = [vars(record)["handle"] for record in caplog.records if "preempted" in record.message]
    assert preempted == [3]
    assert outputs(inbox) == {handle: expected_output(request) for handle, request in requests.items()}
    after = next(plan for plan in runner.fake.plans if plan.step > 6)
    assert len(after.rows) == 2 and {new.row for new in after.admitted} == set(after.rows), "rows are sent again"
    assert runner.fake.most_in_flight == 1 + lag


@pytest.mark.parametrize("lag", [0, 1])
def test_a_lost_state_ends_its_request_alone(lag: int, caplog: pytest.LogCaptureFixture) -> None:
    requests = {handle: make_request(5, 9, seed=handle) for handle in (1, 2, 3)}
    why = "row 1 has the state of 3 tokens, the step starts at 7"
    runner = ShortRunner(lambda plan: plan.step == 6, lag == 1, lost={1: why})
    loop, inbox = run(requests, runner, lag)
    assert len(runner.failed) == 1 and len(runner.failed[0].rows) == 3
    (refused,) = [frame for frame in inbox.sent if isinstance(frame, wire.Refused)]
    assert (refused.handle, refused.status, refused.code) == (2, 503, "state_lost")
    found, whole = outputs(inbox), {handle: expected_output(request) for handle, request in requests.items()}
    assert found == {**whole, 2: whole[2][: len(found[2])]} and 0 < len(found[2]) < len(whole[2])
    assert loop.scheduler.num_preemptions == 0 and runner.fake.most_in_flight == 1 + lag
    assert [vars(record)["why"] for record in caplog.records if "lost their state" in record.message] == [why]


def test_a_lost_state_ends_a_group_of_stages() -> None:
    """Other stages have the plan, so that it cannot be taken back."""
    runner = ShortRunner(lambda plan: plan.step == 6, False, lost={1: "why"}, depth=2)
    with pytest.raises(RowStateLost, match="why"):
        run({1: make_request(5, 9, seed=1)}, runner)


@pytest.mark.parametrize("lag", [0, 1])
def test_second_step_without_memory_ends_with_its_reason(lag: int) -> None:
    runner = ShortRunner(lambda plan: plan.step >= 6, lag == 1)
    with pytest.raises(StepOutOfMemory, match=f"two steps in a row, the second with 2 requests: {WHY}"):
        run({handle: make_request(5, 9, seed=handle) for handle in (1, 2, 3)}, runner, lag)


def test_preempted_request_returns_when_another_ends() -> None:
    requests = {1: make_request(5, 6, seed=1), 2: make_request(5, 20, seed=2), 3: make_request(5, 20, seed=3)}
    runner = ShortRunner(lambda plan: len(plan.rows) > 2, False)
    loop, inbox = run(requests, runner)
    assert outputs(inbox) == {handle: expected_output(request) for handle, request in requests.items()}
    assert [len(plan.rows) for plan in runner.failed] == [3], "no step is tried with three again"
    assert loop.scheduler.num_preemptions == 1


def test_queue_time_of_a_repeated_first_step_is_kept() -> None:
    runner = ShortRunner(lambda plan: plan.step == 1, False)
    _, inbox = run({1: make_request(5, 3, seed=1), 2: make_request(5, 3, seed=2)}, runner)
    frames = [frame for frame in inbox.sent if isinstance(frame, wire.Tokens)]
    assert sum(len(frame.queue_times_s) for frame in frames) == 2


def test_unwritten_pages_are_found_by_no_request() -> None:
    """The newest request would write the common prefix, because of its priority; it is preempted, and the other computes it."""
    common = [(5 * i) % VOCAB for i in range(8)]
    requests = {handle: make_request([*common, handle, 9], 4, seed=handle) for handle in range(2)}
    requests[1] = msgspec.structs.replace(requests[1], priority=-1)
    runner = ShortRunner(lambda plan: plan.step == 1, False)
    _, inbox = run(requests, runner, config=SchedulerConfig(scheduling_policy="priority"))
    (failed,) = runner.failed
    assert failed.starts == [0, 8], "the second request skips what the first one writes"
    assert outputs(inbox) == {handle: expected_output(request) for handle, request in requests.items()}


def test_pages_of_draft_tokens_are_returned() -> None:
    requests = {seed: make_request([1, 2, 3] * 5, 12, seed=seed) for seed in (1, 2)}
    drafted: list[int] = []

    def fails(plan: StepPlan) -> bool:
        drafted.append(sum(plan.depths))
        return drafted[-1] > 0 and drafted[-2] == 0

    runner = ShortRunner(fails, False)
    loop, inbox = run(requests, runner, config=SchedulerConfig(speculation=DRAFTS))
    assert runner.failed and loop.scheduler.pool.free_pages == 40
    assert outputs(inbox) == {handle: expected_output(request) for handle, request in requests.items()}


@settings(max_examples=60, deadline=None)
@given(
    seeds=st.lists(st.integers(0, 40), min_size=2, max_size=7, unique=True),
    shared=st.sampled_from([0, 3, 8, 17]),
    failures=st.sets(st.integers(1, 40), max_size=8),
    lag=st.integers(0, 1),
    per_turn=st.integers(1, 4),
    config=st.sampled_from([DEFAULT, SchedulerConfig(scheduling_policy="priority"), SchedulerConfig(speculation=DRAFTS)]),
)
def test_no_token_changes_whichever_steps_fail(
    seeds: list[int], shared: int, failures: set[int], lag: int, per_turn: int, config: SchedulerConfig
) -> None:
    failures = {step for step in failures if step - 1 not in failures}
    requests = {seed: with_prefix(seed, shared) for seed in seeds}
    runner = ShortRunner(lambda plan: plan.step in failures, lag == 1)
    _, inbox = run(requests, runner, lag, per_turn, config)
    assert outputs(inbox) == {handle: expected_output(request) for handle, request in requests.items()}
    assert len(runner.failed) <= len(failures)
