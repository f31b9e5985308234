"""Schedules that disturb requests, and the comparison with plain runs."""

import random
from dataclasses import dataclass, replace

from phalanx_api import wire
from phalanx_api.engine_config import SchedulingPolicy
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.step_plan import LAST_SAMPLED
from phalanx_runtime.engine.ports import StepRunner
from phalanx_runtime.rank.runner import ModelRunner
from tests.runtime.lag import lagged
from tests.runtime.tiny import VOCAB_SIZE

LIMITS = Limits(max_model_len=128, max_num_seqs=6, max_num_batched_tokens=64)
PLAIN = SchedulerConfig(prefix_caching=False)


def make_requests() -> dict[int, wire.Request]:
    """Returns greedy and sampled requests: siblings of n = 4, two with their prefix, and unrelated ones."""
    rng = random.Random(3)
    common = [rng.randrange(VOCAB_SIZE) for _ in range(29)]
    prompts = [common] * 4 + [[*common[:18], 1, 2, 3], [*common, 7, 8]] + [[rng.randrange(VOCAB_SIZE)] * n for n in (1, 12, 33)]
    return {
        i: wire.Request(
            id=f"r{i}",
            epoch=0,
            prompt=prompt,
            delivered=[],
            sampling=wire.Sampling(max_tokens=14, seed=i, temperature=0.0 if i % 2 else 1.0),
        )
        for i, prompt in enumerate(prompts)
    }


@dataclass(frozen=True)
class Disturbance:
    """Conditions of a run."""

    budget: int = 64
    """Tokens per step."""
    lag: int = 0
    """Steps between arrivals."""
    thief: int | None = None
    """Seed of steps in which all free pages are taken."""
    policy: SchedulingPolicy = "fcfs"
    host_sizes: tuple[int, ...] = ()
    """Sizes of the host tier, in turn, each for two steps."""


def serve(
    runner: StepRunner, scheduler: Scheduler, requests: dict[int, wire.Request], disturbance: Disturbance
) -> dict[int, list[int]]:
    """Returns the output tokens of all requests. Plans finish late: with `max_flights` in flight."""
    outputs: dict[int, list[int]] = {handle: [] for handle in requests}
    pending = list(requests.items())
    rng = random.Random(disturbance.thief)
    stolen: list[int] = []
    in_flight = num_pending = 0
    for step in range(2000):
        while pending and step >= disturbance.lag * (len(requests) - len(pending)):
            handle, request = pending.pop(0)
            assert scheduler.submit(handle, request, float(step)) is None
        if disturbance.thief is not None:
            _give_back(scheduler, stolen)
            stolen = _steal(scheduler, rng) if rng.random() < 0.3 else []
        if disturbance.host_sizes:
            scheduler.pool.host.want(disturbance.host_sizes[step // 2 % len(disturbance.host_sizes)], "test")
        plan = scheduler.schedule(float(step))
        if plan is not None:
            assert sum(plan.counts) <= disturbance.budget
            num_pending += plan.tokens.count(LAST_SAMPLED)
            runner.start(plan)
            in_flight += 1
        if in_flight == scheduler.limits.max_flights or (plan is None and in_flight):
            in_flight -= 1
            frame = scheduler.commit(runner.finish())
            for handle, token in zip(frame.handles, frame.tokens, strict=True):
                outputs[handle].append(token)
        if not pending and scheduler.is_idle():
            _give_back(scheduler, stolen)
            assert scheduler.check() == []
            assert (num_pending > 0) == scheduler.limits.runs_ahead
            return outputs
    raise AssertionError("a request did not end")


def _steal(scheduler: Scheduler, rng: random.Random) -> list[int]:
    """Takes all free pages, or, if pages have parts, sometimes all free parts with their pages."""
    pool, parts = scheduler.pool, scheduler.pool.parts
    if parts is None or rng.random() < 0.5:
        return pool.allocate(pool.free_pages) or []
    pages = pool.allocate(min(pool.free_pages, parts.free_parts)) or []
    assert parts.hold(pages)
    return pages


def _give_back(scheduler: Scheduler, pages: list[int]) -> None:
    parts = scheduler.pool.parts
    if parts is not None:
        parts.unhold(page for page in pages if parts.part_of(page) >= 0)
    scheduler.pool.release(pages)


def compare_runs(disturbance: Disturbance, runner: ModelRunner, num_rounds: int = 1) -> Scheduler:
    """Compares a disturbed run with plain ones and returns its scheduler. num_rounds: how often each request arrives."""
    once = make_requests()
    requests = {handle + turn * len(once): request for turn in range(num_rounds) for handle, request in once.items()}
    plain: dict[int, list[int]] = {}
    for handle, request in requests.items():
        alone = make_scheduler(replace(LIMITS, plans_in_flight=runner.depth), runner.pool, PLAIN)
        plain |= serve(runner, alone, {handle: request}, Disturbance())
    limits = Limits(max_model_len=128, max_num_seqs=6, max_num_batched_tokens=disturbance.budget, plans_in_flight=runner.depth)
    disturbed = make_scheduler(lagged(limits), runner.pool, SchedulerConfig(scheduling_policy=disturbance.policy))
    assert serve(runner, disturbed, requests, disturbance) == plain
    return disturbed
