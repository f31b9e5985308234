"""Properties of the policies in simulated time: no starvation, fair shares, deadlines, and ITL."""

import random
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_api.cost import StepModel
from phalanx_api.engine_config import SCHEDULING_POLICIES, SchedulingPolicy
from phalanx_api.prefix import PrefixKeys
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.sharing import PrefixSharing
from phalanx_runtime.core.request import Request, make_request
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.policies import (
    AGING_S,
    MAX_TENANTS,
    OUTPUT_WEIGHT,
    Deadline,
    Fair,
    Fcfs,
)
from phalanx_runtime.core.scheduling.queue import Queue
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from tests.properties.simulation import LIMITS, Job, Simulation
from tests.runtime.fake_runner import FakeRunner
from tests.runtime.fake_runner import make_request as make_wire_request
from tests.slow_cases import some


def test_lowest_priority_number_is_first() -> None:
    jobs = [Job(0, 2000, 8)] + [Job(0.001, 100, 4, priority=priority) for priority in (3, -1, 0)]
    run = Simulation("priority", replace(LIMITS, max_num_seqs=1)).run(jobs)
    assert sorted(run.end_s, key=lambda number: run.end_s[number]) == [0, 2, 3, 1]


@pytest.mark.slow
def test_long_waiting_request_precedes_a_better_new_one() -> None:
    old, late = Job(0.001, 100, 4, priority=1), AGING_S * 1.1
    jobs = [Job(0, 10, 2000), *[Job(0.001, 10, 2000) for _ in range(12)], old, Job(late, 100, 4, priority=0)]
    run = Simulation("priority", replace(LIMITS, max_num_seqs=1)).run(jobs)
    assert run.first_s[12] > late, "the engine is busy until the request has aged"
    assert run.first_s[13] < run.first_s[14]


SLOW_TOKENS, QUICK_TOKENS = {"ttft_target_ms": 500.0, "tpot_target_ms": 9e3}, {"ttft_target_ms": 500.0, "tpot_target_ms": 10.0}
LAST: dict[str, tuple[SchedulingPolicy, dict[str, Any], dict[str, Any], int]] = {
    "fcfs": ("fcfs", {}, {}, 3),
    "priority": ("priority", {"priority": 1}, {"priority": 0}, 2),
    "deadline of the first token": ("deadline", {"ttft_target_ms": 60_000.0}, {"ttft_target_ms": 500.0}, 2),
    "deadline of the next token": ("deadline", SLOW_TOKENS, QUICK_TOKENS, 1),
    "fair": ("fair", {"tenant": "has two"}, {"tenant": "has one"}, 2),
}


@pytest.mark.parametrize(("policy", "hints", "hints_of_the_third", "victim"), LAST.values(), ids=LAST.keys())
def test_last_request_of_the_policy_is_preempted(
    policy: SchedulingPolicy, hints: dict[str, Any], hints_of_the_third: dict[str, Any], victim: int
) -> None:
    """Two requests and a later one that precedes them, except under fcfs; the pages are for two. With a long TPOT the first
    request, one token ahead, has the most slack."""
    runner = FakeRunner(16, 4)
    scheduler = make_scheduler(replace(LIMITS, max_model_len=64), runner.pool, SchedulerConfig(scheduling_policy=policy))
    for handle in (1, 2, 3):
        request = msgspec.structs.replace(make_wire_request(8, 24, seed=handle), **(hints if handle < 3 else hints_of_the_third))
        assert scheduler.submit(handle, request, float(handle)) is None
        plan = scheduler.schedule(float(handle))
        assert plan is not None
        scheduler.commit(runner.run(plan))
    while (plan := scheduler.schedule(4.0)) is not None and not scheduler.num_preemptions:
        scheduler.commit(runner.run(plan))
    assert scheduler.num_preemptions == 1
    assert [handle for handle in (1, 2, 3) if scheduler.running_request(handle) is None] == [victim]


HOSTILE = [
    ("short requests", lambda at: Job(at, 60, 4)),
    ("better priority, tight target, other tenant", lambda at: Job(at, 60, 4, priority=-3, tenant="loud", ttft_s=1.0)),
    ("many tenants", lambda at: Job(at, 60, 4, tenant=str(at), ttft_s=3.0)),
]


@pytest.mark.parametrize("policy", some(SCHEDULING_POLICIES, "priority"))
@pytest.mark.parametrize(("claim", "other"), HOSTILE, ids=[claim for claim, _ in HOSTILE])
def test_no_request_starves_under_endless_load(policy: SchedulingPolicy, claim: str, other: object) -> None:
    """Others overload the engine for ten minutes. The victim is a long prompt without hints."""
    assert callable(other)
    limits = replace(LIMITS, max_num_seqs=2)
    jobs = [Job(0.5, 1500, 50), *[other(i * 0.03) for i in range(20_000)]]
    run = Simulation(policy, replace(limits, max_waiting=30_000)).run(jobs, until=0)
    assert run.end_s[0] < 400, claim
    assert run.scheduler.load(run.now).waiting > 10, "the engine is overloaded throughout"


class FairWatch(Simulation):
    """Records the largest difference between the counters of two waiting tenants."""

    max_difference = 0.0

    def watch(self) -> None:
        waiting = [request for request in self.scheduler.requests.values() if request.row is None]
        ranks = [self.policy.rank(tenant) for tenant in {self.policy.lane(request) for request in waiting}]
        if len(ranks) > 1:
            self.max_difference = max(self.max_difference, max(ranks) - min(ranks))


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**32))
def test_waiting_tenants_differ_by_one_prompt_at_most(seed: int) -> None:
    chance = random.Random(seed)
    jobs = []
    for tenant, rate in (("a", 0.01), ("b", 0.05), ("c", 0.3)):
        at = chance.random()
        while at < 2:
            jobs.append(Job(at, chance.randrange(1, 400), chance.randrange(1, 40), tenant=tenant))
            at += chance.expovariate(1 / rate)
    run = FairWatch("fair").run(jobs)
    assert 0 < run.max_difference <= 400 + LIMITS.max_num_seqs * 40 * OUTPUT_WEIGHT


def test_a_greedy_tenant_does_not_delay_a_modest_one() -> None:
    flood = [Job(0, 200, 20, tenant="greedy") for _ in range(300)]
    modest = [Job(1 + i, 50, 5, tenant="modest") for i in range(5)]
    waits = {}
    policies: list[SchedulingPolicy] = ["fcfs", "fair"]
    for policy in policies:
        run = Simulation(policy).run(flood + modest)
        waits[policy] = max(run.first_s[300 + i] - job.at_s for i, job in enumerate(modest))
    assert waits["fair"] < 2 < 20 < waits["fcfs"]


def of_tenant(tenant: str, order: int) -> Request:
    submitted = msgspec.structs.replace(make_wire_request(4), tenant=tenant)
    return make_request(order, order, submitted, 100, keys=PrefixKeys(b"", 16))


def test_idle_time_earns_nothing_and_being_alone_costs_nothing() -> None:
    fair = Fair()
    alone = of_tenant("alone", 0)
    fair.arrive(alone, [])
    fair.charge(alone, 1000, 500)
    fair.arrive(of_tenant("new", 1), ["alone"])
    assert fair.rank("new") == fair.rank("alone") == 2000
    fair.charge(of_tenant("new", 1), 10, 0)
    fair.arrive(alone, ["new"])
    assert fair.rank("alone") == 2010, "a returning tenant starts at the others' counter"


def test_new_tenant_starts_at_the_last_tenants_position() -> None:
    fair = Fair()
    alone = of_tenant("alone", 0)
    fair.arrive(alone, [])
    fair.charge(alone, 1000, 500)
    fair.arrive(of_tenant("new", 1), [])
    assert fair.rank("new") == 2000


def test_counters_of_idle_tenants_are_dropped() -> None:
    fair = Fair()
    for number in range(3 * MAX_TENANTS):
        request = of_tenant(f"t{number}", number)
        fair.arrive(request, [])
        fair.charge(request, number % 7, 1)
    assert fair.num_counters <= MAX_TENANTS + 1


@pytest.mark.slow
@pytest.mark.parametrize("load", [0.9, 1.5], ids=["nearly full", "overloaded"])
def test_deadline_policy_meets_more_deadlines_than_fcfs(load: float) -> None:
    chance = random.Random(5)
    jobs, at = [], 0.0
    for _ in range(400):
        at += chance.expovariate(load / 0.125)
        prompt = chance.choice([20, 50, 100, 800])
        jobs.append(Job(at, prompt, 10, ttft_s=0.25 if prompt < 100 else chance.choice([1.0, 8.0])))
    met = {}
    policies: list[SchedulingPolicy] = ["fcfs", "deadline"]
    for policy in policies:
        run = Simulation(policy).run(jobs)
        met[policy] = sum(run.first_s[i] - job.at_s <= (job.ttft_s or 0) for i, job in enumerate(jobs))
    assert met["deadline"] > 1.1 * met["fcfs"], met


def test_deadline_queue_is_sorted_again_when_keys_shrink() -> None:
    policy = Deadline()
    queue = Queue(policy, 16)
    sizes = [(100, 30.0), (10, 20.0), (900, 21.0), (500, 22.0), (2000, 23.0)]
    for order, (size, ttft_s) in enumerate(sizes):
        submitted = wire.Request(
            id=str(order),
            epoch=0,
            prompt=[1] * size,
            delivered=[],
            sampling=wire.Sampling(max_tokens=4, seed=0),
            ttft_target_ms=1e3 * ttft_s,
        )
        queue.push(make_request(order, order, submitted, 4096, keys=PrefixKeys(b"", 16)), 0.0)
    first = queue.first(0.0)
    assert first is not None and first.params.order == 1
    assert policy.learn(StepModel(fixed_s=0.0, token_s=0.01, knee_tokens=0, context_s=0.0, attention_s=0.0), 1.0)
    assert not policy.learn(StepModel(fixed_s=0.0, token_s=0.0105, knee_tokens=0, context_s=0.0, attention_s=0.0), 1.0), (
        "the change is too small to sort the queue"
    )
    queue.sort(0.0)
    served = []
    while (request := queue.first(0.0)) is not None:
        served.append(request.params.order)
        queue.pop(request)
    due = {number: ttft_s - 0.01 * size for number, (size, ttft_s) in enumerate(sizes)}
    assert served == sorted(due, key=lambda number: due[number]) != [1, 2, 3, 4, 0]


def test_request_with_a_deadline_precedes_one_without() -> None:
    jobs = [Job(0, 1000, 4), *[Job(0.001, 200, 10) for _ in range(20)], Job(0.002, 200, 10, deadline_s=1.0)]
    run = Simulation("deadline", replace(LIMITS, max_num_seqs=2)).run(jobs)
    assert run.end_s[21] < 1.1
    assert Simulation("fcfs", replace(LIMITS, max_num_seqs=2)).run(jobs).end_s[21] > 1.5


def streams_and_prompts(count: int = 40) -> list[Job]:
    """Returns a few long streams, and a sequence of prompts of 600 tokens."""
    return [Job(0, 20, 600) for _ in range(4)] + [Job(0.5 + 0.4 * i, 600, 4) for i in range(count)]


def long_steps(run: Simulation, limit_s: float) -> float:
    """Returns the share of steps with decodes, after the fit, that took longer."""
    steps = [wall_s for wall_s, _, decodes in run.steps[100:] if decodes]
    return sum(wall_s > limit_s for wall_s in steps) / len(steps)


def test_step_budget_follows_measurements_to_meet_itl() -> None:
    target_s = 0.04
    run = Simulation(limits=replace(LIMITS, itl_target_s=target_s), noise=0.03).run(streams_and_prompts())
    assert long_steps(run, 1.1 * target_s) < 0.02
    assert long_steps(Simulation(noise=0.03).run(streams_and_prompts()), 1.1 * target_s) > 0.2, (
        "without a target steps are longer"
    )
    assert len(run.end_s) == 44


def test_batches_grow_where_there_is_slack() -> None:
    def largest(target_s: float) -> int:
        run = Simulation(limits=replace(LIMITS, itl_target_s=target_s)).run(streams_and_prompts())
        return max(prefill for _, prefill, decodes in run.steps[100:] if decodes)

    assert largest(0.03) < largest(0.06) < largest(10.0) == LIMITS.max_num_batched_tokens - 4


def test_prompts_progress_under_a_target_that_cannot_hold() -> None:
    run = Simulation(limits=replace(LIMITS, itl_target_s=0.001)).run(streams_and_prompts(5))
    assert len(run.end_s) == 9
    assert all(wall_s < 1.4 * 0.012 for wall_s, prefill, decodes in run.steps[100:] if decodes == 4)


@pytest.mark.parametrize("threshold", [0, 50], ids=["half a step", "threshold"])
def test_a_long_prompt_leaves_room_for_a_short_one(threshold: int) -> None:
    jobs = [Job(0, 1800, 4), Job(0.001, 60, 4)]
    run = Simulation(limits=replace(LIMITS, long_prefill_tokens=threshold)).run(jobs)
    assert run.first_s[1] < 0.4 < run.first_s[0]
    alone = Simulation(limits=replace(LIMITS, long_prefill_tokens=threshold)).run(jobs[:1])
    assert max(prefill for _, prefill, _ in alone.steps) == (threshold or 256), (
        "alone it gets whole steps, unless there is a threshold"
    )


class CountingFcfs(Fcfs):
    """Counts calls of `key`."""

    num_calls = 0

    def key(self, request: Request, now: float) -> float:
        self.num_calls += 1
        return super().key(request, now)


def test_step_examines_few_of_a_thousand_waiting_requests() -> None:
    runner, policy = FakeRunner(100, 4), CountingFcfs()
    scheduler = Scheduler(replace(LIMITS, max_num_seqs=4), PrefixSharing(PagePool(100, 4), ""), policy)
    for handle in range(1000):
        scheduler.submit(handle, make_wire_request(5, 9, seed=handle))
    for _ in range(20):
        before = policy.num_calls
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(runner.run(plan))
        assert policy.num_calls - before < 40
