"""Time of steps and of copies beside them."""

from random import Random

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.cost import StepModel
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.utilization import computing_s
from tests.runtime.fake_runner import FakeRunner, make_request

MODEL = StepModel(fixed_s=0.01, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0)


@pytest.mark.parametrize(
    ("wall_s", "wait_s", "busy_s", "expected"),
    [
        (0.5, 0.0, 0.0, 0.5),
        (0.5, 0.25, 0.0, 0.25),
        (0.5, 0.25, 0.25, 0.25),
        (0.5, 0.25, 0.375, 0.375),  # the device computed during the wait
        (0.5, 0.75, 0.625, 0.5),  # another clock, or the previous step's
    ],
)
def test_waits_for_copies_compute_nothing(wall_s: float, wait_s: float, busy_s: float, expected: float) -> None:
    assert computing_s(wall_s, wait_s, busy_s) == expected


def run(copy_wait_s: float) -> tuple[Scheduler, wire.Load]:
    """Runs requests that evict pages to host memory; each plan that has copies waits for them."""
    runner, rng = FakeRunner(24, 4, num_host_pages=40), Random(1)
    limits = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16)
    scheduler = make_scheduler(limits, runner.pool, SchedulerConfig(eviction_policy="lru"))
    num_waits = 0
    for handle in range(16):
        scheduler.submit(handle, make_request([rng.randrange(90) for _ in range(20)], 6, seed=handle))
        while (plan := scheduler.schedule()) is not None:
            waited_s = copy_wait_s if plan.host_copies else 0.0
            num_waits += waited_s > 0
            result = msgspec.structs.replace(runner.run(plan), copy_wait_s=waited_s)
            scheduler.commit(result, wall_s=MODEL.fixed_s + MODEL.token_s * len(plan.tokens) + waited_s)
    load = scheduler.load()
    assert load.host_wait_s == pytest.approx(num_waits * copy_wait_s)
    assert scheduler.pool.host.counters.stored > 0
    return scheduler, load


def test_slow_copies_leave_the_cost_model_unchanged() -> None:
    (slow, slow_load), (fast, fast_load) = run(0.7), run(0.0)
    assert slow_load.host_wait_s > 1.0 and fast_load.host_wait_s == 0.0
    assert slow_load.step_model == pytest.approx(fast_load.step_model, rel=1e-6, abs=1e-9) != []
    assert slow.fit.num_steps == fast.fit.num_steps
    assert slow_load.step_s > 2 * fast_load.step_s, "reported steps include waits"


def test_encoded_images_are_shared_as_pages_are() -> None:
    runner, scopes = FakeRunner(48, 4), list[bytes]()
    scheduler = make_scheduler(
        Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64), runner.pool, SchedulerConfig()
    )
    image = wire.Image(digest=bytes(16), num_tiles=1, height=1, width=1, pixels=bytes(3), spans=[(0, 4)])
    for handle, tenant in enumerate(("alice", "bob", "bob")):
        request = make_request([handle] * 8, 2)
        scheduler.submit(handle, msgspec.structs.replace(request, images=[image], tenant=tenant))
    while (plan := scheduler.schedule()) is not None:
        scopes += [new.image_scope for new in plan.admitted]
        scheduler.commit(runner.run(plan), wall_s=1.0)
    alice, *bob = scopes
    assert bob[0] == bob[1] != alice != b""


def test_steps_with_images_are_not_fitted() -> None:
    runner = FakeRunner(24, 4)
    scheduler = make_scheduler(Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=4), runner.pool, SchedulerConfig())
    image = wire.Image(digest=bytes(16), num_tiles=5, height=1, width=1, pixels=bytes(15), spans=[(3, 4)])
    scheduler.submit(1, msgspec.structs.replace(make_request(list(range(12)), 2), images=[image]))
    tiles = list[int]()
    while (plan := scheduler.schedule()) is not None:
        tiles.append(plan.image_tiles)
        scheduler.commit(runner.run(plan), wall_s=1.0)
    assert tiles == [5, 5, 0, 0], "the image's tokens are in two of three chunks of the prompt"
    assert scheduler.fit.num_steps == 2
