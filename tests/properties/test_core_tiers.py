"""Workloads whose pages and parts leave the device and come back from host memory and disk (`workload`)."""

from dataclasses import replace

import pytest

from phalanx_api.engine_config import EVICTION_POLICIES, EvictionPolicy
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from tests.properties.workload import NO_SPECULATION, SPECULATIONS, Arrival, Shape, Workload
from tests.runtime.fake_runner import FakeRunner, make_request


def test_parts_are_dropped_and_evicted_and_computed_again() -> None:
    """Of pages that some layers read whole: fewer parts than pages, so that hits end where parts are lost."""
    for num_parts, is_async in ((26, False), (30, False), (36, True)):
        arrivals = [Arrival(3 * i, 30 + 5 * (i % 3), 12, common=30, family=i % 2) for i in range(16)]
        shape = Shape(60, 2, 4, 16, is_async=is_async, window=8, num_parts=num_parts)
        scheduler = Workload(arrivals, shape).run().scheduler
        parts = scheduler.sharing.parts
        assert parts is not None and parts.num_dropped > 100 and parts.num_evicted > 20
        assert 100 < scheduler.sharing.hit_tokens < 16 * 30
        assert scheduler.pool.counters.hits > 16 * 12, "pages are found whose parts are lost"


def test_parts_come_back_from_host_memory() -> None:
    """Without host memory the same requests compute their windows again."""
    for is_async in (False, True):
        arrivals = [Arrival(4 * i, 34, 6, common=30, family=i % 5) for i in range(40)]
        shape = Shape(50, 2, 4, 16, is_async=is_async, window=8, num_parts=24)
        without = Workload(arrivals, shape).run()
        run = Workload(arrivals, replace(shape, num_host_pages=80, num_host_parts=40)).run()
        load = run.scheduler.load()
        assert load.host_total_parts == 40 and load.host_loaded_parts == run.runner.num_loaded_parts > 40
        assert load.host_stored_parts >= run.runner.num_stored_parts > 40 and run.runner.num_loaded > 20
        assert run.scheduler.sharing.hit_tokens > 1.3 * without.scheduler.sharing.hit_tokens


@pytest.mark.parametrize("num_parts", [0, 24])
def test_pages_and_parts_come_back_from_disk(num_parts: int) -> None:
    """Host memory holds the prefixes of two families of seven; without a disk the others compute them again."""
    for is_async in (False, True):
        arrivals = [Arrival(6 * i, 34, 6, common=30, family=i % 7) for i in range(56)]
        shape = Shape(50, 2, 4, 16, is_async=is_async, window=8 if num_parts else 0, num_parts=num_parts)
        shape = replace(shape, num_host_pages=40, num_host_parts=20)
        without = Workload(arrivals, shape).run()
        run = Workload(arrivals, replace(shape, has_disk=True)).run()
        counters, load = run.scheduler.sharing.disk.counters, run.scheduler.load()
        assert run.disk.num_waits > 10 and counters.fetched > 40 and counters.failed > 0
        assert load.disk_fetched_parts == counters.fetched_parts and (counters.fetched_parts > 15) == (num_parts > 0)
        assert (load.disk_cached_parts > 15) == (num_parts > 0)
        assert run.scheduler.sharing.hit_tokens > 1.2 * without.scheduler.sharing.hit_tokens


def test_part_of_a_copied_page_is_not_evicted() -> None:
    """Five parts: the page with the equal start has the oldest one, which the request that copies it gets."""
    prompts = (0, 17, 6), (1, 30, 9), (0, 10, 1)
    arrivals = [Arrival(*prompt, family=1, common=33) for prompt in prompts]
    shape = Shape(25, 4, 1, 7, window=13, num_parts=5, num_host_parts=40)
    assert Workload(arrivals, shape).run().scheduler.sharing.hit_tokens > 0


def test_loading_request_has_a_part_to_compute_in() -> None:
    """Another request has all other parts when it starts, and its plan is in flight."""
    prompts = (0, 11, 1, 11), (11, 32, 6, 31), (52, 35, 13, 35), (49, 21, 3, 21), (0, 29, 3, 29)
    arrivals = [
        Arrival(at, prompt, output, common=common, family=2 + (at + prompt == 11)) for at, prompt, output, common in prompts
    ]
    shape = Shape(19, 4, 5, 11, speculation=SPECULATIONS[6], is_async=True, window=8, num_parts=7, num_host_parts=40)
    run = Workload(arrivals, shape).run().runner
    assert run.num_loaded_parts > 0


def test_host_tier_brings_pages_back_and_keeps_the_tokens() -> None:
    """Copies are executed as late as the plans allow."""
    for speculation in (NO_SPECULATION, SPECULATIONS[1], SPECULATIONS[4]):
        for is_async in (False, True):
            arrivals = [Arrival(3 * i, 17, 5, common=17, family=i % 4) for i in range(32)]
            shape = Shape(32, 2, 4, 16, speculation=speculation, is_async=is_async, num_host_pages=30)
            run = Workload(arrivals, shape).run()
            host = run.scheduler.pool.host
            assert run.runner.num_loaded == host.counters.loaded > 20
            assert run.runner.num_stored >= host.counters.loaded / 2
            assert 0 < run.runner.num_awaited < sum(bool(plan.host_copies) for plan in run.runner.plans)
            assert run.scheduler.load().host_loaded_pages == host.counters.loaded


def test_host_tier_of_changing_size_keeps_the_tokens() -> None:
    for is_async in (False, True):
        arrivals = [Arrival(3 * i, 17, 5, common=17, family=i % 4) for i in range(32)]
        run = Workload(arrivals, Shape(32, 2, 4, 16, is_async=is_async, num_host_pages=40, resizes=True)).run()
        assert run.runner.num_resized > 20 and run.runner.num_moved > 20
        assert run.runner.num_loaded == run.scheduler.pool.host.counters.loaded > 20


def test_slots_for_parts_follow_those_for_pages() -> None:
    for is_async in (False, True):
        arrivals = [Arrival(4 * i, 34, 6, common=30, family=i % 5) for i in range(40)]
        shape = Shape(
            50, 2, 4, 16, is_async=is_async, window=8, num_parts=24, num_host_pages=120, num_host_parts=60, resizes=True
        )
        run = Workload(arrivals, shape).run()
        host, parts = run.scheduler.pool.host, run.scheduler.pool.host_parts
        assert run.runner.num_resized_parts > 20 and parts.counters.moved > 5
        assert run.runner.num_loaded_parts == parts.counters.loaded > 5 and host.counters.loaded > 20
        assert abs(parts.num_slots - max(10, host.num_slots // 2)) <= 1, (
            "those of two windows, else as many per page as the limits"
        )


def test_slow_loads_are_declined() -> None:
    arrivals = [Arrival(6 * i, 17, 5, common=17, family=i % 3) for i in range(40)]
    run = Workload(arrivals, Shape(18, 2, 4, 16, num_host_pages=24, load_s=10.0)).run()
    assert run.scheduler.pool.host.counters.declined > run.scheduler.pool.host.counters.loaded > 0


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_request_evicts_no_page_that_it_loads(policy: EvictionPolicy) -> None:
    """The first prompt returns after another one took the device; host memory has one slot more than it needs."""
    runner = FakeRunner(8, 4, num_host_pages=8)
    limits = Limits(max_model_len=40, max_num_seqs=1, max_num_batched_tokens=40)
    scheduler = make_scheduler(limits, runner.pool, SchedulerConfig(eviction_policy=policy))
    for number in range(3):
        before = scheduler.sharing.hit_tokens
        assert scheduler.submit(number, make_request([10 * (number % 2) + i % 7 for i in range(29)], 2)) is None
        while (plan := scheduler.schedule()) is not None:
            scheduler.commit(runner.run(plan), wall_s=0.01)
        assert scheduler.sharing.hit_tokens - before == (28 if number == 2 else 0)
    assert runner.num_loaded == 7 and scheduler.check() == []
