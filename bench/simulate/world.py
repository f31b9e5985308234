"""The world in virtual time: requests come, groups step, reports arrive late, requests move. One heap of events, no clock."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from bench.router.replay import BLOCK_TOKENS, Arrival
from bench.simulate.engine import Engine, Shape
from bench.simulate.jobs import Job
from bench.simulate.moving import Counts, Moves
from bench.simulate.report import Reporter
from bench.simulate.scaling import Scaled, Scaling, SimulatedOperator
from bench.simulate.scene import TICK_S, Policy, Scene, Seen, Send

LINK_S = 0.001


@dataclass(frozen=True, slots=True)
class Setting:
    """A fleet: how many groups of which shape, how old reports are, who is slow from when on.

    scaling: with it an operator changes the number of groups, which begins as `groups`.
    """

    groups: int
    shape: Shape
    report_every_s: float = 0.05
    slow: tuple[int, float, float] | None = None
    """Group, factor, from second."""
    seed: int = 0
    scaling: Scaling | None = None


class World:
    """One run of one policy over one load. Raises TypeError when the groups are to change and the policy cannot follow that."""

    def __init__(self, setting: Setting, policy: Policy, arrivals: Sequence[Arrival]) -> None:
        self.jobs = [Job(i, a.at_s, max(1, a.input_tokens), max(1, a.output_tokens), a.blocks) for i, a in enumerate(arrivals)]
        self.engines: list[Engine] = []
        self.counts = Counts()
        self.now = 0.0
        self.policy = policy
        self._setting = setting
        self._chance = random.Random(setting.seed)
        self._reporters: list[Reporter] = []
        self._reported_at: list[float] = []
        self._seen: list[Seen] = []
        self._held: list[set[int]] = []
        """Blocks that each group was told to find."""
        self._open: list[bool] = []
        self._moves = Moves(self)
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._left = len(self.jobs)
        for _ in range(setting.groups):
            self.make_group(is_open=True)
        self.operator: SimulatedOperator | None = None
        if setting.scaling is not None:
            if not isinstance(policy, Scaled):
                raise TypeError(f"{type(policy).__name__} cannot follow groups that come and go")
            self.operator = SimulatedOperator(setting.scaling, setting.groups, self, policy)

    def run(self) -> None:
        """To the end of the last request."""
        for job in self.jobs:
            self.at_time(job.at_s, partial(self._arrive, job))
        for group in range(len(self.engines)):
            self.at_time(0.0, partial(self._report, group))
        self.at_time(TICK_S, self._tick)
        if self._setting.slow is not None:
            group, factor, from_s = self._setting.slow
            self.at_time(from_s, lambda now: setattr(self.engines[group], "slow", factor))
        while self._left and self._heap:
            self.now, _, do = heapq.heappop(self._heap)
            do(self.now)

    def at_time(self, at_s: float, do: Callable[[float], None]) -> None:
        """Has this done then."""
        heapq.heappush(self._heap, (at_s, next(self._order), do))

    def make_group(self, is_open: bool = False) -> int:
        """One more group, by its number. It serves once it is open."""
        group = len(self.engines)
        engine = Engine(f"g{group}", self._setting.shape, BLOCK_TOKENS)
        self.engines.append(engine)
        self._reporters.append(Reporter(engine))
        self._reported_at.append(-1.0)
        self._seen.append(Seen())
        self._held.append(set())
        self._open.append(is_open)
        return group

    def open_group(self, group: int, now: float) -> None:
        """A group serves from now on."""
        self._open[group] = True
        self._report(group, now)

    def close_group(self, group: int, now: float) -> None:
        """A group goes; what it has is begun anew elsewhere, from its tokens so far."""
        self._open[group] = False
        self._moves.between_steps(group, partial(self._abandon, group), now)

    def is_open(self, group: int) -> bool:
        """Whether the group is there."""
        return self._open[group]

    def streams(self, group: int) -> int:
        """Requests that the router has there."""
        return self._seen[group].sent.requests + self._moves.frozen(group)

    def replay(self, job: Job, now: float) -> None:
        """Begins a request anew elsewhere, from its tokens so far."""
        self.counts.replays += 1
        self._arrive(job, now)

    def _abandon(self, group: int, now: float) -> None:
        engine = self.engines[group]
        for job in [*engine.decodes.values(), *engine.prefills, *engine.waiting]:
            engine.take(job)
            self.gone(job, group, now)
            self.replay(job, now)

    def _scene(self, now: float) -> Scene:
        return Scene(now, self._seen, lambda job: [self._hit_tokens(job, held) for held in self._held], self._chance)

    def _arrive(self, job: Job, now: float) -> None:
        for send in self.policy.arrived(job, self._scene(now)):
            self._send(send, now)

    def _send(self, send: Send, now: float) -> None:
        job, group = send.job, send.group
        job.handle = job.handle or job.number + 1
        missing = max(1, job.prompt_tokens - self._hit_tokens(job, self._held[group]))
        seen = self._seen[group]
        seen.unseen[job.handle] = (missing, job.prompt_tokens)
        if job.first_s is None:
            seen.sent.prompt_tokens += missing
            job.missed = missing
        self.came(job, group)
        self.at_time(now + LINK_S, partial(self._submit, job, group))

    def _hit_tokens(self, job: Job, held: set[int]) -> int:
        tokens = 0
        for block in job.blocks[: job.prompt_tokens // BLOCK_TOKENS]:
            if block not in held:
                break
            tokens += BLOCK_TOKENS
        return tokens

    def _submit(self, job: Job, group: int, now: float) -> None:
        if not self._open[group]:
            self.gone(job, group, now)
            self.replay(job, now)
            return
        self._reporters[group].last_handle = max(self._reporters[group].last_handle, job.handle)
        self.engines[group].submit(job)
        self.go(group, now)

    def go(self, group: int, now: float) -> None:
        """Starts the group's next step, if there is anything to do."""
        engine = self.engines[group]
        if engine.is_stepping or not engine.has_work:
            return
        before = {job.number: job.missed for job in engine.waiting}
        taken_s = engine.begin()
        for job in engine.prefills:
            if job.number in before and job.missed != before[job.number] and job.first_s is None:
                self._seen[group].sent.prompt_tokens += job.missed - before[job.number]
        self.at_time(now + taken_s, partial(self._stepped, group))

    def _stepped(self, group: int, now: float) -> None:
        engine = self.engines[group]
        done = engine.end(now)
        sent = self._seen[group].sent
        for job in done.started:
            sent.prompt_tokens -= job.missed
            self.policy.started(job, group, now)
        for job in done.ended:
            self._left -= 1
            self.gone(job, group, now)
        self._reporters[group].stepped(done.ended)
        self._moves.stepped(group, self._reporters[group].output, now)
        if self._open[group] and now - self._reported_at[group] >= self._setting.report_every_s:
            self._report(group, now)
        self.go(group, now)

    def came(self, job: Job, group: int) -> None:
        """Notes that a request goes on there."""
        sent = self._seen[group].sent
        sent.requests += 1
        sent.context_tokens += job.prompt_tokens

    def gone(self, job: Job, group: int, now: float) -> None:
        """Notes that a request is no longer there."""
        sent = self._seen[group].sent
        sent.requests -= 1
        sent.context_tokens -= job.prompt_tokens
        if job.first_s is None:
            sent.prompt_tokens -= job.missed
        self.policy.ended(job, group, now)

    def _report(self, group: int, now: float) -> None:
        """Sends a report, which the router has a little later, with what became findable and what did no longer."""
        self._reported_at[group] = now
        load, changes = self._reporters[group].load(), self.engines[group].pages.changes
        self.engines[group].pages.changes = []

        def arrive(at: float) -> None:
            if not self._open[group]:
                return
            self._seen[group].reported(load, at)
            held = self._held[group]
            for is_added, block in changes:
                (held.add if is_added else held.discard)(block)
            self.policy.reported(group, load, at)
            self._wake(at)

        self.at_time(now + LINK_S, arrive)

    def _wake(self, now: float) -> None:
        for send in self.policy.woken(self._scene(now)):
            self._send(send, now)

    def _tick(self, now: float) -> None:
        for wish in self.policy.tick(now, self.engines):
            self._moves.move(wish, now)
        for job, group in self.policy.taken_back(self._scene(now)):
            self._take_back(job, group, now)
        for group, engine in enumerate(self.engines):
            if self._open[group] and not engine.has_work and now - self._reported_at[group] >= 1.0:
                self._report(group, now)
        if self.operator is not None:
            self.operator.tick(now)
        if self._left:
            self.at_time(now + TICK_S, self._tick)

    def _take_back(self, job: Job, group: int, now: float) -> None:
        """A request that still waits at its group comes back to the router."""
        if job not in self.engines[group].waiting:
            return
        self.engines[group].waiting.remove(job)
        self._seen[group].unseen.pop(job.handle, None)
        self.counts.taken_back += 1
        self.gone(job, group, now)
        self._arrive(job, now)
