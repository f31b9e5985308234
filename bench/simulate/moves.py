"""Moves in the simulated fleet: pages are copied, the request freezes at the end of a step and continues elsewhere."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from bench.simulate.cache import PAGE
from bench.simulate.engine import Engine
from bench.simulate.jobs import Job
from bench.simulate.policy import MoveOrder, Policy

FREEZE_S = 0.005
"""Stall of a move in addition to its last copy: two round trips and the target's answer."""
RESCUE_SLACK_S = 0.1
RESCUE_INTERVAL_S = 1.0
RETURN_S = 10.0
"""A request that moves back to a group within this time counts as returned."""


@dataclass(slots=True)
class MoveCounts:
    moves: int = 0
    failed_moves: int = 0
    rescues: int = 0
    returned: int = 0
    moved_tokens: int = 0
    requeues: int = 0
    replays: int = 0
    stalls_s: list[float] = field(default_factory=list)


class MoveHost(Protocol):
    """The simulated fleet as moves use it."""

    @property
    def engines(self) -> Sequence[Engine]: ...

    @property
    def policy(self) -> Policy: ...

    @property
    def counts(self) -> MoveCounts: ...

    def schedule(self, at_s: float, callback: Callable[[float], None]) -> None: ...

    def remove_job(self, job: Job, group: int, now: float) -> None: ...

    def add_job(self, job: Job, group: int) -> None:
        """Counts a request in its group."""
        ...

    def start_step(self, group: int, now: float) -> None: ...

    def is_open(self, group: int) -> bool: ...

    def replay(self, job: Job, now: float) -> None: ...


class Moves:
    def __init__(self, host: MoveHost) -> None:
        self._host = host
        self._orders: dict[int, MoveOrder] = {}
        self._at_step: dict[int, list[Callable[[float], None]]] = {}
        self._frozen: Counter[int] = Counter()
        self._rescue_requested_s: dict[int, float] = {}
        self._departures: dict[int, list[tuple[int, float]]] = {}

    def frozen(self, group: int) -> int:
        return self._frozen[group]

    def step_finished(self, group: int, mean_output: float, now: float) -> None:
        """Handles the end of a step: runs callbacks that wait for it, and requests a rescue if pages run out soon."""
        for callback in self._at_step.pop(group, []):
            callback(now)
        self._request_rescue(group, mean_output, now)

    def between_steps(self, group: int, callback: Callable[[float], None], now: float) -> None:
        if self._host.engines[group].is_stepping:
            self._at_step.setdefault(group, []).append(callback)
        else:
            callback(now)

    def move(self, order: MoveOrder, now: float) -> None:
        host, job = self._host, order.job
        source, target = host.engines[order.source], host.engines[order.target]
        pages = -(-(job.base + 64 + source.step - job.since_step) // PAGE) + 4
        is_possible = job.number not in self._orders and job.number in source.decodes and host.is_open(order.target)
        if not is_possible or target.pages.free < pages:
            host.counts.failed_moves += 1
            host.policy.move_ended(order, False, now)
            return
        self._orders[job.number] = order
        target.pages.reserved += pages
        rate = min(order.bytes_per_s or source.shape.copy_bytes_per_s, source.shape.copy_bytes_per_s)
        copy_s = 0.0 if order.mode == "recompute" else source.context_of(job) * source.shape.token_bytes / rate
        stall_s = copy_s if order.mode == "stop" else 0.0
        host.schedule(now + copy_s - stall_s, partial(self._freeze_at_step, order, pages, stall_s))

    def _freeze_at_step(self, order: MoveOrder, pages: int, stall_s: float, now: float) -> None:
        self.between_steps(order.source, partial(self._freeze, order, pages, stall_s), now)
        self._host.start_step(order.source, now)

    def _freeze(self, order: MoveOrder, pages: int, stall_s: float, now: float) -> None:
        job, host = order.job, self._host
        if job.number not in host.engines[order.source].decodes or not host.is_open(order.target):
            del self._orders[job.number]
            host.engines[order.target].pages.reserved -= pages
            host.counts.failed_moves += 1
            host.policy.move_ended(order, False, now)
            return
        host.engines[order.source].remove(job)
        host.remove_job(job, order.source, now)
        self._frozen[order.source] += 1
        host.schedule(now + stall_s + FREEZE_S, partial(self._arrived, order, pages))

    def _arrived(self, order: MoveOrder, pages: int, now: float) -> None:
        job, host = order.job, self._host
        target = host.engines[order.target]
        target.pages.reserved -= pages
        del self._orders[job.number]
        self._frozen[order.source] -= 1
        if not host.is_open(order.target):
            host.policy.move_ended(order, False, now)
            host.replay(job, now)
            return
        host.add_job(job, order.target)
        self._count(order, now)
        if order.mode == "recompute":
            target.submit(job)
        else:
            target.receive(job)
        host.policy.move_ended(order, True, now)
        host.start_step(order.target, now)

    def _count(self, order: MoveOrder, now: float) -> None:
        job, counts = order.job, self._host.counts
        counts.moves += 1
        counts.moved_tokens += job.tokens
        counts.stalls_s.append(now - job.last_s)
        departures = self._departures.setdefault(job.number, [])
        counts.returned += any(group == order.target and now - at_s <= RETURN_S for group, at_s in departures)
        departures.append((order.source, now))
        job.moves += 1
        job.moved_s, job.last_source = now, self._host.engines[order.source].name

    def _request_rescue(self, group: int, mean_output: float, now: float) -> None:
        """Requests a rescue of the next preemption candidate, at most once per second."""
        host = self._host
        victim = _rescue_candidate(host.engines[group], mean_output)
        if victim is None or victim.number in self._orders:
            return
        if now - self._rescue_requested_s.get(victim.number, -RESCUE_INTERVAL_S) < RESCUE_INTERVAL_S:
            return
        self._rescue_requested_s[victim.number] = now
        order = host.policy.rescue(victim, group, now, host.engines)
        if order is not None:
            host.counts.rescues += 1
            self.move(order, now)


def _rescue_candidate(engine: Engine, mean_output: float) -> Job | None:
    def is_soon(steps: float, job: Job) -> bool:
        copy_s = engine.context_of(job) * engine.shape.token_bytes / engine.shape.copy_bytes_per_s
        return steps * engine.last_step_s < 2 * copy_s + RESCUE_SLACK_S

    bound, latest = engine.steps_to_full(), engine.latest()
    if bound is None or latest is None or not is_soon(bound, latest):
        return None
    steps = engine.expected_to_full(mean_output)
    victims = [] if steps is None else engine.preemption_candidates(mean_output, steps)
    return victims[0] if steps is not None and victims and is_soon(steps, victims[0]) else None
