"""A request that runs alone shares no step with others, and both make progress."""

from collections.abc import Callable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.step_plan import StepPlan
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request


def make_lone(handle: int, is_alone: bool, prompt: int = 5, output: int = 6) -> wire.Request:
    return msgspec.structs.replace(make_request(prompt, output, seed=handle), alone=is_alone)


class RowWatcher:
    """Follows the plans: which request has which row."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler
        self._rows: dict[int, int] = {}

    def handles(self, plan: StepPlan) -> set[int]:
        new_rows = [row for row in plan.rows if row in {new.row for new in plan.admitted}]
        self._rows |= dict(zip(new_rows, self._scheduler.started_handles(), strict=True))
        return {self._rows[row] for row in plan.rows}


@settings(deadline=None, max_examples=60)
@given(
    kinds=st.lists(st.tuples(st.booleans(), st.integers(1, 30), st.integers(1, 12)), min_size=1, max_size=7),
    in_flight=st.sampled_from([1, 2]),
    pages=st.sampled_from([12, 64]),
)
def test_isolated_request_runs_alone_and_all_finish(kinds: list[tuple[bool, int, int]], in_flight: int, pages: int) -> None:
    runner = FakeRunner(pages, 4)
    scheduler = make_scheduler(
        Limits(max_model_len=40, max_num_seqs=4, max_num_batched_tokens=16, max_waiting=8, plans_in_flight=in_flight),
        runner.pool,
        SchedulerConfig(eviction_policy="lru"),
    )
    requests = {i: make_lone(i, *kind) for i, kind in enumerate(kinds)}
    for handle, request in requests.items():
        assert scheduler.submit(handle, request) is None
    watcher, flights, output = RowWatcher(scheduler), [], {handle: [] for handle in requests}  # type: ignore[var-annotated]
    for _ in range(2000):
        plan = scheduler.schedule() if len(flights) < in_flight else None
        if plan is not None:
            handles = watcher.handles(plan)
            if any(requests[handle].alone for handle in handles):
                assert len(handles) == 1 and not flights
            assert not any(requests[handle].alone for _, others in flights for handle in others)
            flights.append((plan, handles))
            continue
        if not flights:
            break
        frame = scheduler.commit(runner.run(flights.pop(0)[0]))
        for handle, token in zip(frame.handles, frame.tokens, strict=True):
            output[handle].append(token)
        assert scheduler.check() == []
    assert scheduler.is_idle()
    assert output == {handle: expected_output(request, max_model_len=40) for handle, request in requests.items()}


@pytest.mark.parametrize("order", [[True, False], [False, True]])
def test_steps_alternate_while_both_have_work(order: list[bool]) -> None:
    runner = FakeRunner(64, 4)
    scheduler = make_scheduler(Limits(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=16, max_waiting=8), runner.pool)
    for handle, is_alone in enumerate(order):
        scheduler.submit(handle, make_lone(handle, is_alone, 3, 20))
    watcher, steps = RowWatcher(scheduler), []
    while (plan := scheduler.schedule()) is not None:
        steps.append(watcher.handles(plan))
        scheduler.commit(runner.run(plan))
    assert all(len(handles) == 1 for handles in steps)
    assert all(steps[i] != steps[i + 1] for i in range(2, 38))


@pytest.mark.parametrize("leaves", [Scheduler.abort, Scheduler.freeze], ids=["aborted", "frozen"])
def test_no_step_starts_beside_an_isolated_one(leaves: Callable[[Scheduler, int], object]) -> None:
    """Also once its request has left: the step may still end the group."""
    runner = FakeRunner(64, 4)
    scheduler = make_scheduler(
        Limits(max_model_len=40, max_num_seqs=4, max_num_batched_tokens=16, max_waiting=8, plans_in_flight=2), runner.pool
    )
    for handle in range(2):
        assert scheduler.submit(handle, make_lone(handle, is_alone=handle == 0)) is None
    plan = scheduler.schedule()
    assert plan is not None and len(plan.rows) == 1
    leaves(scheduler, 0)
    assert scheduler.schedule() is None
    scheduler.commit(runner.run(plan))
    following = scheduler.schedule()
    assert following is not None and scheduler.started_handles() == [1]
