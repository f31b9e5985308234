"""The engine loop of rank 0: receive, schedule, start, finish, commit, send tokens, report load.

Every step reads the inbox first, so that an abort takes effect within one step. Up to `StepRunner.depth` plans are in flight;
then the oldest is finished. Without work the loop blocks on its channel: an idle engine uses no CPU. `core.scheduling.scheduler`
decides what a step computes; `ports` defines the interfaces to ranks and HTTP process.
A request with a grammar enters no step before the grammar is compiled in a thread (`compiling`); other requests continue.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from phalanx_api import moves, wire
from phalanx_api.speculation import SpeculationCounts
from phalanx_runtime.core.admission import Limits, Refuse
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.speculation.config import Fitting
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.engine.channel import ZmqChannel
from phalanx_runtime.engine.compiling import GrammarQueue
from phalanx_runtime.engine.moving import EngineMoves
from phalanx_runtime.engine.ports import EngineChannel, GrammarCompiler, PageTransport, StepRunner, StepWatcher

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.05
"""Load report interval of a busy engine. Routers choose groups by it: shorter costs frames, longer makes choices stale."""
URGENT_INTERVAL_S = 0.01
"""Shortest interval of load reports after an urgent event: a refusal, a preemption, or an imminent one."""
CHECK_INTERVAL_S = 1.0
"""Shortest interval of page pool checks: an engine may become idle after every short request."""
DEFAULT_RULES = SchedulerConfig()
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Bounds of Retry-After when the queue is full; the estimate from backlog and measured rate may be far off."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A plan in flight: its start time, and the queue times of the requests it starts."""

    plan: StepPlan
    started: float
    queue_times_s: list[float]


class EngineLoop:
    """Connects channel, scheduler and runner. `clock`: monotonic seconds."""

    def __init__(
        self,
        runner: StepRunner,
        limits: Limits,
        channel: EngineChannel,
        clock: Callable[[], float] = time.monotonic,
        rules: SchedulerConfig = DEFAULT_RULES,
        watch: StepWatcher | None = None,
        grammars: GrammarCompiler | None = None,
        carrier: PageTransport | None = None,
        fitting: Fitting | None = None,
    ) -> None:
        self._scheduler = make_scheduler(replace(limits, plans_in_flight=runner.depth), runner.pool, rules, fitting)
        self._runner = runner
        self._channel = channel
        self._clock = clock
        self._watch = watch
        self._compiling = None if grammars is None else GrammarQueue(grammars, channel.wake)
        self._moving: EngineMoves | None = None
        if carrier is not None:
            carrier.start(channel.wake)
            self._moving = EngineMoves(self._scheduler, carrier, lambda frame: channel.send(wire.encode(frame)), self._forget)
        self._is_stuck = False
        self._load_due = 0.0
        self._urgent_due = 0.0
        self._is_urgent = False
        self._was_full_soon = False
        self._is_settled = False
        self._check_due = -math.inf
        self._tokens_per_s = 0.0
        self._queued: dict[int, float] = {}
        """Arrival time of each request that has not been in a step."""
        self._leaks = 0
        self._flights: deque[_Flight] = deque()
        self._finished = 0.0
        """Time when the last plan was finished."""

    @property
    def speculation(self) -> SpeculationCounts:
        """Speculation counters since the start."""
        return self._scheduler.speculator.counts()

    def run(self) -> None:
        """Serves until the channel is closed. Raises PeerLost when a rank is lost."""
        try:
            while self.turn():
                pass
        finally:
            if self._compiling is not None:
                self._compiling.close()

    def turn(self) -> bool:
        """Handles received frames and finishes at most one step; blocks without work. Returns false once the channel is
        closed."""
        must_wait = self._scheduler.must_wait()
        if must_wait:
            self._rest()
        messages = self._receive(must_wait)
        if messages is None:
            return False
        for message in messages:
            self._take(message)
            self._is_settled = False
        if self._compiling is not None:
            self._take_compiled(self._compiling)
        if self._moving is not None:
            refused = self._moving.num_refused
            self._moving.turn(self._clock())
            self._is_settled &= self._moving.num_refused == refused  # a settled loop would not report the count
        while len(self._flights) < self._runner.depth and self._start():
            pass
        self._report_urgent()
        self._is_stuck = not self._flights
        if self._flights:
            self._finish(self._flights.popleft())
        elif not must_wait and self._clock() >= self._load_due:
            self._report(self._clock())  # no request can start: routers must not take silence for a failure
        return True

    def _receive(self, must_wait: bool) -> list[bytes] | None:
        """Received messages; None once the channel is closed. Blocks without work, until a move's deadline at most.

        Frozen or reserved pages may keep even the first request in the queue waiting; then load reports continue."""
        if self._flights or not (must_wait or self._is_stuck):
            return self._channel.receive(block=False)
        deadline = None if self._moving is None else self._moving.deadline
        if deadline is None and must_wait:
            return self._channel.receive(block=True)
        longest_s = math.inf if deadline is None else max(0.0, deadline - self._clock())
        return self._channel.receive(block=True, timeout_s=longest_s if must_wait else min(longest_s, LOAD_INTERVAL_S))

    def _start(self) -> bool:
        """Schedules and starts the next plan, if any."""
        now, preemptions = self._clock(), self._scheduler.num_preemptions
        plan = self._scheduler.schedule(now)
        is_full_soon = self._scheduler.is_full_soon()
        self._is_urgent |= self._scheduler.num_preemptions > preemptions or (is_full_soon and not self._was_full_soon)
        self._was_full_soon = is_full_soon
        if plan is None:
            return False
        self._flights.append(_Flight(plan, now, self._left_queue(now) if plan.admitted else []))
        if self._watch is not None:
            self._watch.began(plan, self._scheduler.expected_s())
        self._runner.start(plan)
        return True

    def _finish(self, flight: _Flight) -> None:
        """Finishes the oldest plan in flight and sends its tokens. Its time counts from the end of the previous plan."""
        result = self._runner.finish()
        now = self._clock()
        wall_s = now - max(flight.started, self._finished)
        self._finished = now
        if self._watch is not None:
            self._watch.ended(flight.plan, wall_s)
        if result.lost and not self.speculation.lost:
            log.warning("the ranks can no longer draft; requests continue without speculation: %s", result.lost)
        tokens = self._scheduler.commit(result, wall_s)
        tokens.queue_times_s.extend(flight.queue_times_s)
        rejected = sum(flight.plan.depths) - (sum(result.runs) - len(result.runs))
        self._measure(len(flight.plan.tokens) - rejected, wall_s)
        if tokens.handles or tokens.finished or tokens.prompt_details or flight.queue_times_s:
            self._channel.send(wire.encode(tokens))
        for refused in self._scheduler.refused:
            self._channel.send(wire.encode(refused))
        if self._compiling is not None:
            for handle in [end.handle for end in tokens.finished] + [end.handle for end in self._scheduler.refused]:
                self._compiling.forget(handle)
        if self._moving is not None:
            ended = [end.handle for end in tokens.finished] + [end.handle for end in self._scheduler.refused]
            self._moving.stepped(flight.plan.step, wall_s, ended, now)
        if now >= (self._urgent_due if self._is_urgent else self._load_due):
            self._report(now)

    def _take(self, message: bytes) -> None:
        """Passes one frame to the scheduler and sends an immediate answer, if any."""
        try:
            frame = wire.decode_to_engine(message)
        except msgspec.DecodeError as error:
            # A defect, since both ends are the same version in one pod; the other requests continue.
            log.error("frame for the engine cannot be read: %s", error)
            self._channel.send(wire.encode(_unreadable(message)))
            return
        match frame:
            case wire.Abort(handles):
                for handle in handles:
                    self._forget(handle)
            case wire.Submit(handle, request, move):
                self._submit(handle, request, move)
            case _ if self._moving is not None:
                if self._compiling is not None and isinstance(frame, wire.Prepare) and frame.request.sampling.grammar is not None:
                    self._compiling.warm(frame.request.sampling.grammar)
                self._moving.obey(frame, self._clock())
            case wire.Prepare(move) | moves.MoveOut(move=move):
                why = "this engine does not support moves"
                self._channel.send(wire.encode(moves.MoveFailed(move, "incompatible", why)))

    def _submit(self, handle: int, request: wire.Request, move: str) -> None:
        now, grammar = self._clock(), request.sampling.grammar
        if self._moving is None or not move or not self._moving.submit(handle, request, move, now):
            move = ""
        is_held = self._compiling is not None and grammar is not None
        answer = self._scheduler.submit(handle, request, now, is_held, move)
        if self._moving is not None and move:
            self._moving.began(move)
        if isinstance(answer, Refuse):
            self._is_urgent |= answer.backlog_tokens is not None
            self._channel.send(wire.encode(self._refused(handle, request.epoch, answer)))
        elif answer is not None:
            self._channel.send(wire.encode(wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[answer])))
        else:
            self._queued[handle] = now
            if self._compiling is not None and grammar is not None and self._compiling.begin(handle, grammar):
                self._scheduler.release(handle, now)

    def _take_compiled(self, compiling: GrammarQueue) -> None:
        """Releases requests whose grammar is compiled, and refuses those whose grammar failed."""
        for handle, refuse in compiling.ended():
            if refuse is None:
                self._scheduler.release(handle, self._clock())
            else:
                epoch = self._scheduler.epoch_of(handle)
                self._forget(handle)
                self._channel.send(wire.encode(self._refused(handle, epoch, refuse)))

    def _forget(self, handle: int) -> None:
        if self._moving is not None:
            self._moving.request_left(handle, self._clock())
        self._scheduler.abort(handle)
        self._queued.pop(handle, None)
        if self._compiling is not None:
            self._compiling.forget(handle)

    def _left_queue(self, now: float) -> list[float]:
        """Queue times of the requests that this step contains for the first time; not those that return from preemption."""
        since = [self._queued.pop(handle, None) for handle in self._scheduler.admitted()]
        return [now - came for came in since if came is not None]

    def _refused(self, handle: int, epoch: int, refuse: Refuse) -> wire.Refused:
        retry_after_s = None
        if refuse.backlog_tokens is not None:
            wanted_s = refuse.backlog_tokens / self._tokens_per_s if self._tokens_per_s else MIN_RETRY_S
            retry_after_s = min(max(wanted_s, MIN_RETRY_S), MAX_RETRY_S)
        return wire.Refused(
            handle=handle,
            epoch=epoch,
            status=refuse.status,
            code=refuse.code,
            message=refuse.message,
            retry_after_s=retry_after_s,
        )

    def _measure(self, num_tokens: int, wall_s: float) -> None:
        """Updates the rate of computed tokens, an average over about 20 steps."""
        rate = num_tokens / max(wall_s, 1e-6)
        self._tokens_per_s = rate if not self._tokens_per_s else 0.95 * self._tokens_per_s + 0.05 * rate

    def _report_urgent(self) -> None:
        """Sends an urgent report, unless one was sent less than `URGENT_INTERVAL_S` ago; then it follows after this step."""
        if self._is_urgent:
            now = self._clock()
            if now >= self._urgent_due:
                self._report(now)

    def _report(self, now: float) -> None:
        """Sends the page changes and a load report."""
        changes = self._scheduler.pool.take_changes()
        if changes.changes or changes.is_snapshot:
            self._channel.send(wire.encode(changes))
        self._channel.send(wire.encode(self._load(now)))
        self._load_due, self._urgent_due = now + LOAD_INTERVAL_S, now + URGENT_INTERVAL_S
        self._is_urgent = False

    def _load(self, now: float) -> wire.Load:
        refused = 0 if self._moving is None else self._moving.num_refused
        return msgspec.structs.replace(self._scheduler.load(now), leaks=self._leaks, refused_copies=refused)

    def _rest(self) -> None:
        """Reports the load before the loop blocks. On becoming idle, checks the page pool, at most every `CHECK_INTERVAL_S`.

        A leak is logged and counted; the engine continues."""
        if not self._scheduler.is_idle():
            self._report(self._clock())
            return
        if self._is_settled:
            return
        self._is_settled = True
        now = self._clock()
        if now < self._check_due:
            self._report(now)
            return
        self._check_due = now + CHECK_INTERVAL_S
        wrong = self._scheduler.check()
        self._leaks += len(wrong)
        self._report(now)
        for what in wrong:
            log.error("page pool is wrong: %s", what)


def _unreadable(message: bytes) -> wire.Refused:
    """Refusal of a request whose frame cannot be decoded.

    Raises DecodeError if its handle cannot be decoded either, which ends the incarnation and thereby every waiting request."""
    try:
        _, handle, asked = msgspec.msgpack.decode(message, type=tuple[str, int, list[object]])
    except msgspec.MsgspecError as error:
        raise msgspec.DecodeError(f"frame for the engine names no request: {error}") from error
    epoch = asked[1] if len(asked) > 1 and isinstance(asked[1], int) else 0
    return wire.Refused(
        handle=handle, epoch=epoch, status=500, code="unreadable_request", message="the engine cannot read this request"
    )


def run_engine(
    runner: StepRunner,
    limits: Limits,
    endpoint: str,
    rules: SchedulerConfig = DEFAULT_RULES,
    watch: StepWatcher | None = None,
    grammars: GrammarCompiler | None = None,
    carrier: PageTransport | None = None,
    fitting: Fitting | None = None,
) -> None:
    """Serves the HTTP process at this zmq endpoint until the channel is closed. Raises PeerLost when a rank is lost."""
    channel = ZmqChannel(endpoint)
    try:
        EngineLoop(runner, limits, channel, rules=rules, watch=watch, grammars=grammars, carrier=carrier, fitting=fitting).run()
    finally:
        channel.close()
