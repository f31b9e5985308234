"""The prefix cache in load reports: its miss-ratio curve, residency of evicted pages, unused slots."""

from dataclasses import replace

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.cache_curve import CacheCurve
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request

LIMITS = Limits(max_model_len=64, max_num_seqs=8, max_num_batched_tokens=64)
LRU = SchedulerConfig(eviction_policy="lru")


def prompt(seed: int, length: int = 17) -> list[int]:
    return [(seed + 7 * i * i + seed * i) % 50 for i in range(length)]


def curve_of(load: wire.Load) -> tuple[int, list[float]]:
    return load.cache_curve.lookups, load.cache_curve.hit_rates


class Engine:
    """A scheduler with pages of 4 tokens and fake ranks; a step takes a second."""

    def __init__(self, num_pages: int = 32, limits: Limits = LIMITS, config: SchedulerConfig = LRU) -> None:
        self.runner = FakeRunner(num_pages, 4)
        self.scheduler = make_scheduler(limits, self.runner.pool, config)
        self.now = 0.0
        self.num_submitted = 0

    def step(self) -> wire.Load:
        plan = self.scheduler.schedule(self.now)
        assert plan is not None
        self.now += 1.0
        self.scheduler.commit(self.runner.run(plan), 1.0)
        return self.scheduler.load(self.now)

    def serve(self, *requests: wire.Request) -> wire.Load:
        """Returns the report after these requests, submitted together."""
        for request in requests:
            self.num_submitted += 1
            assert self.scheduler.submit(self.num_submitted, request, self.now) is None
        while not self.scheduler.is_idle():
            self.step()
        return self.scheduler.load(self.now)


def test_curve_counts_full_pages_of_prompts() -> None:
    engine = Engine()
    assert engine.scheduler.load(0.0).cache_curve == CacheCurve()
    engine.serve(make_request(prompt(1), 2))
    load = engine.serve(make_request(prompt(1), 2))
    assert curve_of(load) == (8, [0.5, 0.5, 0.5, 0.5])


def test_half_the_pages_lose_what_was_used_before() -> None:
    engine = Engine(num_pages=16)
    for seed in (1, 2, 3, 1, 2, 3):
        load = engine.serve(make_request(prompt(seed), 2))
    assert load.cache_curve.lookups == 24
    assert load.cache_curve.hit_rates[0] == 0, "8 pages hold two prompts of four pages"
    assert load.cache_curve.hit_rates[1:] == [0.5, 0.5, 0.5]
    assert load.pages_evicted == 0 and load.pages_reused == 12, "the pool found what the curve says"


def test_twice_the_pages_would_keep_what_was_evicted() -> None:
    engine = Engine(num_pages=8)
    for seed in (1, 2, 3, 1, 2, 3):
        load = engine.serve(make_request(prompt(seed), 2))
    assert load.cache_curve.hit_rates == [0, 0, 0.5, 0.5]
    assert load.pages_evicted > 0 and load.pages_reused == 0


def test_pages_of_answers_are_hits_of_the_next_turn() -> None:
    engine = Engine()
    first = make_request(prompt(1), 12)
    engine.serve(first)
    load = engine.serve(make_request([*first.prompt, *expected_output(first), 1, 2, 3], 2))
    assert curve_of(load) == (4 + 7, [7 / 11] * 4)


def test_requests_of_a_burst_hit_the_first_ones_pages() -> None:
    load = Engine().serve(*(make_request(prompt(1), 2, seed=seed) for seed in range(4)))
    assert curve_of(load) == (16, [0.75] * 4)


def test_preempted_requests_are_looked_up_once() -> None:
    engine = Engine(num_pages=12)
    load = engine.serve(*(make_request(prompt(seed, 9), 16, seed=seed) for seed in range(4)))
    assert load.preemptions > 0
    assert load.cache_curve.lookups == 8


def test_prompts_that_may_not_share_are_not_counted() -> None:
    engine = Engine()
    request = make_request(prompt(1), 2)
    details = msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, prompt_logprobs=1))
    assert engine.serve(details).cache_curve.lookups == 0
    off = Engine(config=replace(LRU, prefix_caching=False))
    assert off.serve(make_request(prompt(1), 2)).cache_curve == CacheCurve()


def test_residency_is_the_time_from_publication_to_eviction() -> None:
    engine = Engine(num_pages=8)
    engine.serve(make_request(prompt(1), 2))
    engine.now += 100.0
    engine.scheduler.load(engine.now)
    for seed in (2, 3):
        load = engine.serve(make_request(prompt(seed), 2))
    assert load.pages_evicted > 0
    residency_s = load.evicted_page_s / load.pages_evicted
    assert 40 < residency_s <= engine.now, "pages of the first request stayed for 100 s"


def test_unused_slots_are_those_after_the_last_token() -> None:
    engine = Engine()
    assert engine.scheduler.submit(1, make_request(prompt(1, 9), 3), 0.0) is None
    assert [engine.step().unused_slots for _ in range(2)] == pytest.approx([2, 1])
    assert engine.step().unused_slots == 0


def test_host_tier_reports_residency_and_size() -> None:
    engine = Engine(num_pages=8)
    engine.runner = FakeRunner(8, 4, num_host_pages=8, min_host_pages=4)
    engine.scheduler = make_scheduler(LIMITS, engine.runner.pool, LRU)
    for seed in (1, 2, 3):
        engine.serve(make_request(prompt(seed), 2))
    engine.now += 100.0
    load = engine.scheduler.load(engine.now)
    assert load.host_total_pages == 4 and load.host_resizes == 0, "it starts at its floor"
    former = load.host_evicted_page_s, load.host_evicted_pages
    engine.scheduler.pool.host.want(7, "a test")
    for seed in (4, 5, 6, 7):
        load = engine.serve(make_request(prompt(seed), 2))
    assert load.host_total_pages == 7 and load.host_resizes == 1
    assert load.host_evicted_pages - former[1] > 4
    assert load.host_evicted_page_s - former[0] > 200, "pages stored before the pause stayed for 100 s"
    engine.scheduler.pool.host.want(4, "a test")
    load = engine.serve(make_request(prompt(8), 2))
    assert load.host_total_pages == 4 and load.host_moved_pages > 0
    assert load.cache_curve.tiers.pages == 8, "the limit"
    assert load.cache_use.host_residency_s == load.host_evicted_page_s / load.host_evicted_pages
    assert load.cache_use.residency_s == load.evicted_page_s / load.pages_evicted


def test_reuse_and_partly_filled_pages_are_reported() -> None:
    engine = Engine()
    for seed in (1, 2, 3, 1, 2, 3):
        load = engine.serve(make_request(prompt(seed), 2))
    assert load.cache_use.reuse_pages == pytest.approx(8, abs=4), "two prompts of four pages are used in between"
    assert load.cache_use.unused_share == 0, "no request runs"
    assert engine.scheduler.submit(99, make_request(prompt(9, 9), 3), engine.now) is None
    assert engine.step().cache_use.unused_share == pytest.approx(2 / 12)
