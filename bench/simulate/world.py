"""The simulated fleet: requests arrive, groups step, reports arrive late, requests move. One heap of events in virtual time."""

import heapq
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import count

from bench.router.replay import BLOCK_TOKENS, Arrival
from bench.simulate.engine import Engine, Shape
from bench.simulate.jobs import Job
from bench.simulate.load_reports import Reporter
from bench.simulate.moves import MoveCounts, Moves
from bench.simulate.policy import TICK_S, GroupState, Policy, RouterState, Send
from bench.simulate.scaling import ScalablePolicy, Scaling, SimulatedOperator

LINK_S = 0.001


@dataclass(frozen=True, slots=True)
class Setting:
    groups: int  # at the start
    shape: Shape
    report_every_s: float = 0.05
    link_s: float = LINK_S  # one way between router and groups
    slow: tuple[int, float, float] | None = None
    """Group, factor of its step times, and second from which it applies."""
    seed: int = 0
    scaling: Scaling | None = None  # if set, an operator changes the number of groups
    block_tokens: int = BLOCK_TOKENS


class World:
    """One run of one policy on one load. Raises TypeError for a scaled fleet with a policy that does not support it."""

    def __init__(self, setting: Setting, policy: Policy, arrivals: Sequence[Arrival]) -> None:
        self.jobs = [Job(i, a.at_s, max(1, a.input_tokens), max(1, a.output_tokens), a.blocks) for i, a in enumerate(arrivals)]
        self.engines: list[Engine] = []
        self.counts = MoveCounts()
        self.now = 0.0
        self.policy = policy
        self._setting = setting
        self._rng = random.Random(setting.seed)
        self._reporters: list[Reporter] = []
        self._reported_at: list[float] = []
        self._states: list[GroupState] = []
        self._cached_blocks: list[set[int]] = []
        """Blocks that each group reported as cached."""
        self._open: list[bool] = []
        self._moves = Moves(self)
        self._heap: list[tuple[float, int, Callable[[float], None]]] = []
        self._order = count()
        self._num_open = len(self.jobs)
        for _ in range(setting.groups):
            self.make_group(is_open=True)
        self.operator: SimulatedOperator | None = None
        if setting.scaling is not None:
            if not isinstance(policy, ScalablePolicy):
                raise TypeError(f"{type(policy).__name__} does not support a changing number of groups")
            self.operator = SimulatedOperator(setting.scaling, setting.groups, self, policy)

    def run(self) -> None:
        for job in self.jobs:
            self.schedule(job.at_s, partial(self._arrive, job))
        for group in range(len(self.engines)):
            self.schedule(0.0, partial(self._report, group))
        self.schedule(TICK_S, self._tick)
        if self._setting.slow is not None:
            group, factor, from_s = self._setting.slow
            self.schedule(from_s, lambda now: setattr(self.engines[group], "slow", factor))
        while self._num_open and self._heap:
            self.now, _, callback = heapq.heappop(self._heap)
            callback(self.now)

    def schedule(self, at_s: float, callback: Callable[[float], None]) -> None:
        heapq.heappush(self._heap, (at_s, next(self._order), callback))

    def make_group(self, is_open: bool = False) -> int:
        group = len(self.engines)
        engine = Engine(f"g{group}", self._setting.shape, self._setting.block_tokens)
        self.engines.append(engine)
        self._reporters.append(Reporter(engine))
        self._reported_at.append(-1.0)
        self._states.append(GroupState())
        self._cached_blocks.append(set())
        self._open.append(is_open)
        return group

    def open_group(self, group: int, now: float) -> None:
        self._open[group] = True
        self._report(group, now)

    def close_group(self, group: int, now: float) -> None:
        self._open[group] = False
        self._moves.between_steps(group, partial(self._abandon, group), now)

    def is_open(self, group: int) -> bool:
        return self._open[group]

    def num_streams(self, group: int) -> int:
        return self._states[group].sent.requests + self._moves.frozen(group)

    def replay(self, job: Job, now: float) -> None:
        self.counts.replays += 1
        self._arrive(job, now)

    def _abandon(self, group: int, now: float) -> None:
        engine = self.engines[group]
        for job in [*engine.decodes.values(), *engine.prefills, *engine.waiting]:
            engine.remove(job)
            self.remove_job(job, group, now)
            self.replay(job, now)

    def _router_state(self, now: float) -> RouterState:
        return RouterState(
            now, self._states, lambda job: [self._hit_tokens(job, blocks) for blocks in self._cached_blocks], self._rng
        )

    def _arrive(self, job: Job, now: float) -> None:
        for send in self.policy.job_arrived(job, self._router_state(now)):
            self._send(send, now)

    def _send(self, send: Send, now: float) -> None:
        job, group = send.job, send.group
        job.handle = job.handle or job.number + 1
        missing = max(1, job.prompt_tokens - self._hit_tokens(job, self._cached_blocks[group]))
        state = self._states[group]
        state.unreported[job.handle] = (missing, job.prompt_tokens)
        if job.first_s is None:
            state.sent.prompt_tokens += missing
            job.missed = missing
        self.add_job(job, group)
        self.schedule(now + self._setting.link_s, partial(self._submit, job, group))

    def _hit_tokens(self, job: Job, cached: set[int]) -> int:
        tokens, size = 0, self._setting.block_tokens
        for block in job.blocks[: job.prompt_tokens // size]:
            if block not in cached:
                break
            tokens += size
        return tokens

    def _submit(self, job: Job, group: int, now: float) -> None:
        if not self._open[group]:
            self.remove_job(job, group, now)
            self.replay(job, now)
            return
        self._reporters[group].last_handle = max(self._reporters[group].last_handle, job.handle)
        self.engines[group].submit(job)
        self.start_step(group, now)

    def start_step(self, group: int, now: float) -> None:
        engine = self.engines[group]
        if engine.is_stepping or not engine.has_work:
            return
        missed_before = {job.number: job.missed for job in engine.waiting}
        step_s = engine.start_step()
        for job in engine.prefills:
            if job.number in missed_before and job.missed != missed_before[job.number] and job.first_s is None:
                self._states[group].sent.prompt_tokens += job.missed - missed_before[job.number]
        self.schedule(now + step_s, partial(self._finish_step, group))

    def _finish_step(self, group: int, now: float) -> None:
        engine = self.engines[group]
        result = engine.finish_step(now)
        sent = self._states[group].sent
        for job in result.started:
            sent.prompt_tokens -= job.missed
            self.policy.first_token(job, group, now)
        for job in result.ended:
            self._num_open -= 1
            self.remove_job(job, group, now)
        self._reporters[group].step_finished(result.ended)
        self._moves.step_finished(group, self._reporters[group].output, now)
        if self._open[group] and now - self._reported_at[group] >= self._setting.report_every_s:
            self._report(group, now)
        self.start_step(group, now)

    def add_job(self, job: Job, group: int) -> None:
        sent = self._states[group].sent
        sent.requests += 1
        sent.context_tokens += job.prompt_tokens

    def remove_job(self, job: Job, group: int, now: float) -> None:
        sent = self._states[group].sent
        sent.requests -= 1
        sent.context_tokens -= job.prompt_tokens
        if job.first_s is None:
            sent.prompt_tokens -= job.missed
        self.policy.job_left(job, group, now)

    def _report(self, group: int, now: float) -> None:
        """Sends a report with the changes of the prefix cache; the router has it after the link's latency."""
        self._reported_at[group] = now
        load, changes = self._reporters[group].load(), self.engines[group].pages.changes
        self.engines[group].pages.changes = []

        def deliver(at_s: float) -> None:
            if not self._open[group]:
                return
            self._states[group].record(load, at_s)
            cached = self._cached_blocks[group]
            for is_added, block in changes:
                (cached.add if is_added else cached.discard)(block)
            self.policy.load_reported(group, load, at_s)
            self._dispatch(at_s)

        self.schedule(now + self._setting.link_s, deliver)

    def _dispatch(self, now: float) -> None:
        for send in self.policy.dispatch(self._router_state(now)):
            self._send(send, now)

    def _tick(self, now: float) -> None:
        for order in self.policy.tick(now, self.engines):
            self._moves.move(order, now)
        for job, group in self.policy.requeues(self._router_state(now)):
            self._requeue(job, group, now)
        for group, engine in enumerate(self.engines):
            if self._open[group] and not engine.has_work and now - self._reported_at[group] >= 1.0:
                self._report(group, now)
        if self.operator is not None:
            self.operator.tick(now)
        if self._num_open:
            self.schedule(now + TICK_S, self._tick)

    def _requeue(self, job: Job, group: int, now: float) -> None:
        if job not in self.engines[group].waiting:
            return
        self.engines[group].waiting.remove(job)
        self._states[group].unreported.pop(job.handle, None)
        self.counts.requeues += 1
        self.remove_job(job, group, now)
        self._arrive(job, now)
