"""Moves in the simulated fleet: pages are reserved and copied, the request is frozen at the end of a step, and goes on there."""

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Protocol

from bench.simulate.cache import PAGE
from bench.simulate.engine import Engine
from bench.simulate.jobs import Job
from bench.simulate.scene import Policy, Wish

FREEZE_S = 0.005
"""What a move stops a stream for beside its last copy: two round trips, the answer of the target."""
RESCUE_SLACK_S = 0.1
BETWEEN_RESCUES_S = 1.0
RETURN_S = 10.0
"""A request that comes back to a group within this time went back and forth."""


@dataclass(slots=True)
class Counts:
    """What happened beside the requests' own figures."""

    moves: int = 0
    failed_moves: int = 0
    rescues: int = 0
    pingpong: int = 0
    moved_tokens: int = 0
    taken_back: int = 0
    replays: int = 0
    stalls_s: list[float] = field(default_factory=list)


class Floor(Protocol):
    """The world, as moves need it."""

    @property
    def engines(self) -> Sequence[Engine]:
        """The groups' engines, by number."""
        ...

    @property
    def policy(self) -> Policy:
        """Who decides."""
        ...

    @property
    def counts(self) -> Counts:
        """What happened."""
        ...

    def at_time(self, at_s: float, do: Callable[[float], None]) -> None:
        """Has this done then."""
        ...

    def gone(self, job: Job, group: int, now: float) -> None:
        """Notes that a request is no longer there."""
        ...

    def came(self, job: Job, group: int) -> None:
        """Notes that a request goes on there."""
        ...

    def go(self, group: int, now: float) -> None:
        """Starts the group's next step, if there is anything to do."""
        ...

    def is_open(self, group: int) -> bool:
        """Whether the group is there."""
        ...

    def replay(self, job: Job, now: float) -> None:
        """Begins a request anew elsewhere, from its tokens so far."""
        ...


class Moves:
    """All moves of one world."""

    def __init__(self, floor: Floor) -> None:
        self._floor = floor
        self._moving: dict[int, Wish] = {}
        self._at_step: dict[int, list[Callable[[float], None]]] = {}
        self._frozen: Counter[int] = Counter()
        self._asked: dict[int, float] = {}
        self._left: dict[int, list[tuple[int, float]]] = {}

    def frozen(self, group: int) -> int:
        """Requests that have left this group and do not run yet where they go."""
        return self._frozen[group]

    def stepped(self, group: int, mean_output: float, now: float) -> None:
        """A step of this group has ended: freezes what waited for that, and asks for rescue where pages run out soon."""
        for do in self._at_step.pop(group, []):
            do(now)
        self._ask_rescue(group, mean_output, now)

    def between_steps(self, group: int, do: Callable[[float], None], now: float) -> None:
        """Does this at the end of the group's step, or now if it has none."""
        if self._floor.engines[group].is_stepping:
            self._at_step.setdefault(group, []).append(do)
        else:
            do(now)

    def move(self, wish: Wish, now: float) -> None:
        """Begins a move, if it can be."""
        floor, job = self._floor, wish.job
        source, target = floor.engines[wish.source], floor.engines[wish.target]
        pages = -(-(job.base + 64 + source.step - job.since_step) // PAGE) + 4
        is_there = job.number not in self._moving and job.number in source.decodes and floor.is_open(wish.target)
        if not is_there or target.pages.free < pages:
            floor.counts.failed_moves += 1
            floor.policy.moved(wish, False, now)
            return
        self._moving[job.number] = wish
        target.pages.reserved += pages
        rate = min(wish.bytes_per_s or source.shape.copy_bytes_per_s, source.shape.copy_bytes_per_s)
        copy_s = 0.0 if wish.way == "recompute" else source.context_of(job) * source.shape.token_bytes / rate
        stall_s = copy_s if wish.way == "stop" else 0.0
        floor.at_time(now + copy_s - stall_s, partial(self._freeze_at_step, wish, pages, stall_s))

    def _freeze_at_step(self, wish: Wish, pages: int, stall_s: float, now: float) -> None:
        self.between_steps(wish.source, partial(self._freeze, wish, pages, stall_s), now)
        self._floor.go(wish.source, now)

    def _freeze(self, wish: Wish, pages: int, stall_s: float, now: float) -> None:
        job, floor = wish.job, self._floor
        if job.number not in floor.engines[wish.source].decodes or not floor.is_open(wish.target):
            del self._moving[job.number]
            floor.engines[wish.target].pages.reserved -= pages
            floor.counts.failed_moves += 1
            floor.policy.moved(wish, False, now)
            return
        floor.engines[wish.source].take(job)
        floor.gone(job, wish.source, now)
        self._frozen[wish.source] += 1
        floor.at_time(now + stall_s + FREEZE_S, partial(self._arrived, wish, pages))

    def _arrived(self, wish: Wish, pages: int, now: float) -> None:
        job, floor = wish.job, self._floor
        target = floor.engines[wish.target]
        target.pages.reserved -= pages
        del self._moving[job.number]
        self._frozen[wish.source] -= 1
        if not floor.is_open(wish.target):
            floor.policy.moved(wish, False, now)
            floor.replay(job, now)
            return
        floor.came(job, wish.target)
        self._count(wish, now)
        if wish.way == "recompute":
            target.submit(job)
        else:
            target.receive(job)
        floor.policy.moved(wish, True, now)
        floor.go(wish.target, now)

    def _count(self, wish: Wish, now: float) -> None:
        job, counts = wish.job, self._floor.counts
        counts.moves += 1
        counts.moved_tokens += job.tokens
        counts.stalls_s.append(now - job.last_s)
        left = self._left.setdefault(job.number, [])
        counts.pingpong += any(group == wish.target and now - at <= RETURN_S for group, at in left)
        left.append((wish.source, now))
        job.moves += 1
        job.moved_s, job.left = now, self._floor.engines[wish.source].name

    def _ask_rescue(self, group: int, mean_output: float, now: float) -> None:
        """An engine whose pages run out soon asks for the request that would be preempted first, once a second."""
        floor = self._floor
        victim = _victim(floor.engines[group], mean_output)
        if victim is None or victim.number in self._moving:
            return
        if now - self._asked.get(victim.number, -BETWEEN_RESCUES_S) < BETWEEN_RESCUES_S:
            return
        self._asked[victim.number] = now
        wish = floor.policy.rescue(victim, group, now, floor.engines)
        if wish is not None:
            floor.counts.rescues += 1
            self.move(wish, now)


def _victim(engine: Engine, mean_output: float) -> Job | None:
    """Who loses its pages soon, if requests end as expected."""

    def is_soon(steps: float, job: Job) -> bool:
        copy_s = engine.context_of(job) * engine.shape.token_bytes / engine.shape.copy_bytes_per_s
        return steps * engine.last_step_s < 2 * copy_s + RESCUE_SLACK_S

    least, latest = engine.steps_to_full(), engine.latest()
    if least is None or latest is None or not is_soon(least, latest):
        return None
    steps = engine.expected_to_full(mean_output)
    victims = [] if steps is None else engine.who_outlives(mean_output, steps)
    return victims[0] if steps is not None and victims and is_soon(steps, victims[0]) else None
