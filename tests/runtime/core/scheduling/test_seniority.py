"""A moved request keeps its order: by arrival at its router, not at this engine."""

import msgspec
import pytest

from phalanx_api.engine_config import SCHEDULING_POLICIES, SchedulingPolicy
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from tests.runtime.fake_runner import FakeRunner, make_request

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64)


@pytest.mark.parametrize("policy", SCHEDULING_POLICIES)
@pytest.mark.parametrize(("waited_s", "preempted"), [(0.0, "moved"), (5.0, "own")], ids=["younger", "older"])
def test_the_youngest_is_preempted_wherever_it_arrived_first(policy: SchedulingPolicy, waited_s: float, preempted: str) -> None:
    runner = FakeRunner(12, 4)
    scheduler = make_scheduler(LIMITS, runner.pool, SchedulerConfig(scheduling_policy=policy))
    moved = make_request(12, 26, seed=2)
    moved = msgspec.structs.replace(moved, epoch=1, delivered=[1], waited_ms=waited_s * 1e3, ttft_target_ms=1e3)
    own = msgspec.structs.replace(make_request(12, 26, seed=1), ttft_target_ms=1e3)
    scheduler.submit(1, own, now=10.0)
    now = 11.0
    while not scheduler.num_preemptions:
        if now == 12.0:
            scheduler.submit(2, moved, now=12.0)
        plan = scheduler.schedule(now)
        assert plan is not None
        if not scheduler.num_preemptions:
            scheduler.commit(runner.run(plan))
        now += 1.0
    own_running, moved_running = scheduler.running_request(1), scheduler.running_request(2)
    assert (own_running is None, moved_running is None) == ((False, True) if preempted == "moved" else (True, False))


def test_a_request_that_waited_elsewhere_has_aged() -> None:
    runner = FakeRunner(40, 4)
    scheduler = make_scheduler(
        Limits(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=64),
        runner.pool,
        SchedulerConfig(scheduling_policy="priority"),
    )
    requests = {1: make_request(4, 2), 2: make_request(4, 2, seed=2), 3: make_request(4, 2, seed=3)}
    requests[3] = msgspec.structs.replace(requests[3], priority=1, waited_ms=31e3)
    order = []
    for handle, request in requests.items():
        scheduler.submit(handle, request, now=100.0)
        if handle == 1:
            plan = scheduler.schedule(100.0)
            assert plan is not None
            scheduler.commit(runner.run(plan))
    while not scheduler.is_idle():
        plan = scheduler.schedule(101.0)
        assert plan is not None
        order += [end.handle for end in scheduler.commit(runner.run(plan)).finished]
    assert order == [1, 3, 2], "waiting 31 s outweighs one priority"
