"""The world in virtual time: requests come, groups step, reports arrive late, requests move. One heap of events, no clock."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count

from bench.replay import BLOCK_TOKENS, Arrival
from bench.simulate.cache import PAGE
from bench.simulate.engine import Engine, Shape
from bench.simulate.jobs import Job
from bench.simulate.report import Reporter
from bench.simulate.scene import TICK_S, Policy, Scene, Seen, Send, Wish

LINK_S = 0.001
FREEZE_S = 0.005
"""What a move stops a stream for beside its last copy: two round trips, the answer of the target."""
RESCUE_SLACK_S = 0.1
BETWEEN_RESCUES_S = 1.0


@dataclass(frozen=True, slots=True)
class Setting:
    """A fleet: how many groups of which shape, how old reports are, who is slow from when on."""

    groups: int
    shape: Shape
    report_every_s: float = 0.05
    slow: tuple[int, float, float] | None = None
    """Group, factor, from second."""
    seed: int = 0


@dataclass(slots=True)
class Counts:
    """What happened beside the requests' own figures."""

    moves: int = 0
    failed_moves: int = 0
    rescues: int = 0
    pingpong: int = 0
    moved_tokens: int = 0
    taken_back: int = 0
    stalls_s: list[float] = field(default_factory=list)


class World:
    """One run of one policy over one load."""

    def __init__(self, setting: Setting, policy: Policy, arrivals: Sequence[Arrival]) -> None:
        self.jobs = [Job(i, a.at_s, max(1, a.input_tokens), max(1, a.output_tokens), a.blocks) for i, a in enumerate(arrivals)]
        self.engines = [Engine(f"g{i}", setting.shape, BLOCK_TOKENS) for i in range(setting.groups)]
        self.counts = Counts()
        self.now = 0.0
        self._setting = setting
        self._policy = policy
        self._chance = random.Random(setting.seed)
        self._reporters = [Reporter(engine) for engine in self.engines]
        self._reported_at = [-1.0] * setting.groups
        self._seen = [Seen() for _ in self.engines]
        self._held: list[set[int]] = [set() for _ in self.engines]
        """Blocks that each group was told to find."""
        self._at: dict[int, int] = {}
        """The group of each request."""
        self._moving: dict[int, Wish] = {}
        self._freezing: dict[int, list[Callable[[float], None]]] = {}
        self._asked: dict[int, float] = {}
        self._left: dict[int, list[tuple[int, float]]] = {}
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._open = len(self.jobs)

    def run(self) -> None:
        """To the end of the last request."""
        for job in self.jobs:
            self._at_time(job.at_s, partial(self._arrive, job))
        for group in range(len(self.engines)):
            self._at_time(0.0, partial(self._report, group))
        self._at_time(TICK_S, self._tick)
        if self._setting.slow is not None:
            group, factor, from_s = self._setting.slow
            self._at_time(from_s, lambda now: setattr(self.engines[group], "slow", factor))
        while self._open and self._heap:
            self.now, _, do = heapq.heappop(self._heap)
            do(self.now)

    def _at_time(self, at_s: float, do: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (at_s, next(self._order), do))

    def _scene(self, now: float) -> Scene:
        return Scene(now, self._seen, lambda job: [self._hit_tokens(job, held) for held in self._held], self._chance)

    def _arrive(self, job: Job, now: float) -> None:
        for send in self._policy.arrived(job, self._scene(now)):
            self._send(send, now)

    def _send(self, send: Send, now: float) -> None:
        job, group = send.job, send.group
        job.handle = job.handle or job.number + 1
        missing = max(1, job.prompt_tokens - self._hit_tokens(job, self._held[group]))
        seen = self._seen[group]
        seen.unseen[job.handle] = (missing, job.prompt_tokens)
        seen.sent.requests += 1
        seen.sent.prompt_tokens += missing
        seen.sent.context_tokens += job.prompt_tokens
        job.missed = missing
        self._at[job.number] = group
        self._at_time(now + LINK_S, partial(self._submit, job, group))

    def _hit_tokens(self, job: Job, held: set[int]) -> int:
        tokens = 0
        for block in job.blocks[: job.prompt_tokens // BLOCK_TOKENS]:
            if block not in held:
                break
            tokens += BLOCK_TOKENS
        return tokens

    def _submit(self, job: Job, group: int, now: float) -> None:
        self._reporters[group].last_handle = max(self._reporters[group].last_handle, job.handle)
        self.engines[group].submit(job)
        self._go(group, now)

    def _go(self, group: int, now: float) -> None:
        """Starts the group's next step, if there is anything to do."""
        engine = self.engines[group]
        if engine.is_stepping or not engine.has_work:
            return
        before = {job.number: job.missed for job in engine.waiting}
        taken_s = engine.begin()
        for job in engine.prefills:
            if job.number in before and job.missed != before[job.number] and job.first_s is None:
                self._seen[group].sent.prompt_tokens += job.missed - before[job.number]
        self._at_time(now + taken_s, partial(self._stepped, group))

    def _stepped(self, group: int, now: float) -> None:
        engine = self.engines[group]
        done = engine.end(now)
        sent = self._seen[group].sent
        for job in done.started:
            sent.prompt_tokens -= job.missed
            self._policy.started(job, group)
        for job in done.ended:
            self._open -= 1
            self._gone(job, group)
        self._reporters[group].stepped(done.ended)
        for freeze in self._freezing.pop(group, []):
            freeze(now)
        self._ask_rescue(group, now)
        if now - self._reported_at[group] >= self._setting.report_every_s:
            self._report(group, now)
        self._go(group, now)

    def _gone(self, job: Job, group: int) -> None:
        sent = self._seen[group].sent
        sent.requests -= 1
        sent.context_tokens -= job.prompt_tokens
        self._at.pop(job.number, None)
        self._policy.ended(job, group)

    def _report(self, group: int, now: float) -> None:
        """Sends a report, which the router has a little later, with what became findable and what did no longer."""
        self._reported_at[group] = now
        load, changes = self._reporters[group].load(), self.engines[group].pages.changes
        self.engines[group].pages.changes = []

        def arrive(at: float) -> None:
            self._seen[group].reported(load, at)
            held = self._held[group]
            for is_added, block in changes:
                (held.add if is_added else held.discard)(block)
            self._policy.reported(group, load, at)
            for send in self._policy.woken(self._scene(at)):
                self._send(send, at)

        self._at_time(now + LINK_S, arrive)

    def _tick(self, now: float) -> None:
        for wish in self._policy.tick(now, self.engines):
            self._move(wish, now)
        for job, group in self._policy.taken_back(self._scene(now)):
            self._take_back(job, group, now)
        for group, engine in enumerate(self.engines):
            if not engine.has_work and now - self._reported_at[group] >= 1.0:
                self._report(group, now)
        if self._open:
            self._at_time(now + TICK_S, self._tick)

    def _take_back(self, job: Job, group: int, now: float) -> None:
        """A request that still waits at its group comes back to the router."""
        if job not in self.engines[group].waiting:
            return
        self.engines[group].waiting.remove(job)
        self._seen[group].sent.prompt_tokens -= job.missed
        self._seen[group].unseen.pop(job.handle, None)
        self.counts.taken_back += 1
        self._gone(job, group)
        self._arrive(job, now)

    def _ask_rescue(self, group: int, now: float) -> None:
        """An engine whose pages run out soon asks for the request that would be preempted first, once a second."""
        engine = self.engines[group]
        victim = self._victim(engine, self._reporters[group].output)
        if victim is None or victim.number in self._moving:
            return
        if now - self._asked.get(victim.number, -BETWEEN_RESCUES_S) < BETWEEN_RESCUES_S:
            return
        self._asked[victim.number] = now
        wish = self._policy.rescue(victim, group, now, self.engines)
        if wish is not None:
            self.counts.rescues += 1
            self._move(wish, now)

    @staticmethod
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

    def _move(self, wish: Wish, now: float) -> None:
        """Reserves pages at the target, copies, freezes at the end of a step, and goes on there."""
        job, source, target = wish.job, self.engines[wish.source], self.engines[wish.target]
        pages = -(-(job.base + 64 + source._step - job.since_step) // PAGE) + 4
        if job.number in self._moving or job.number not in source.decodes or target.pages.free < pages:
            self.counts.failed_moves += 1
            self._policy.moved(wish, False, now)
            return
        self._moving[job.number] = wish
        target.pages.reserved += pages
        rate = min(wish.bytes_per_s or source.shape.copy_bytes_per_s, source.shape.copy_bytes_per_s)
        copy_s = 0.0 if wish.way == "recompute" else source.context_of(job) * source.shape.token_bytes / rate
        begun = partial(self._freeze_at_step, wish, pages, copy_s if wish.way == "stop" else 0.0)
        self._at_time(now + (copy_s if wish.way == "precopy" else 0.0), begun)

    def _freeze_at_step(self, wish: Wish, pages: int, stall_s: float, now: float) -> None:
        freeze = partial(self._freeze, wish, pages, stall_s)
        if self.engines[wish.source].is_stepping:
            self._freezing.setdefault(wish.source, []).append(freeze)
        else:
            freeze(now)
            self._go(wish.source, now)

    def _fail(self, wish: Wish, pages: int, now: float) -> None:
        if self._moving.pop(wish.job.number, None) is not None:
            self.engines[wish.target].pages.reserved -= pages
            self.counts.failed_moves += 1
            self._policy.moved(wish, False, now)

    def _freeze(self, wish: Wish, pages: int, stall_s: float, now: float) -> None:
        job, source = wish.job, self.engines[wish.source]
        if job.number not in source.decodes:
            self._fail(wish, pages, now)
            return
        source.take(job)
        self._gone(job, wish.source)
        self._at_time(now + stall_s + FREEZE_S, partial(self._arrived, wish, pages))

    def _arrived(self, wish: Wish, pages: int, now: float) -> None:
        job, target = wish.job, self.engines[wish.target]
        target.pages.reserved -= pages
        del self._moving[job.number]
        self._at[job.number] = wish.target
        sent = self._seen[wish.target].sent
        sent.requests += 1
        sent.context_tokens += job.prompt_tokens
        self._count(wish, now)
        if wish.way == "recompute":
            target.submit(job)
        else:
            target.receive(job)
        self._policy.moved(wish, True, now)
        self._go(wish.target, now)

    def _count(self, wish: Wish, now: float) -> None:
        job = wish.job
        self.counts.moves += 1
        self.counts.moved_tokens += job.tokens
        self.counts.stalls_s.append(now - job.last_s)
        left = self._left.setdefault(job.number, [])
        self.counts.pingpong += any(group == wish.target and now - at <= 10.0 for group, at in left)
        left.append((wish.source, now))
        job.moves += 1
        job.moved_s, job.left = now, self.engines[wish.source].name
