"""The engine loop of rank 0: inbox, schedule, start, finish, commit, one frame of tokens, and load reports.

Every step drains the inbox first, so that an abort takes effect within one step. As many plans are in flight as the runner works
on at once; then the oldest is finished. With nothing to compute the loop blocks on its channel: an idle engine uses no CPU. What
a step computes is decided in `core.scheduler`; who runs it stands behind `ports`.
A request with a grammar is in no step before that was compiled, in a thread (`compiling`); the others go on meanwhile.
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
from phalanx_runtime.core.scheduling.config import Rules, make_scheduler
from phalanx_runtime.core.speculation.config import Fitting
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.engine.channel import ZmqChannel
from phalanx_runtime.engine.compiling import Compiling
from phalanx_runtime.engine.moving import Moving
from phalanx_runtime.engine.ports import Carrier, Channel, Grammars, StepRunner, Watch

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.05
"""How often a busy engine reports its load. Routers choose by it; more often costs frames, less often makes choices stale."""
URGENT_INTERVAL_S = 0.01
"""How soon after a report the next one may follow when there is cause: a request was refused or preempted, or may be soon."""
CHECK_INTERVAL_S = 1.0
"""How often at most all pages are looked at: an engine may fall idle after every short request."""
DEFAULT_RULES = Rules()
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Bounds of the Retry-After that a full queue answers: its backlog over the measured rate may be far off on either side."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A plan in flight: when it was made, and how long those waited whom it starts."""

    plan: StepPlan
    started: float
    queue_times_s: list[float]


class EngineLoop:
    """A scheduler fed from a channel, its plans run by a runner. `clock` gives seconds that never go back."""

    def __init__(
        self,
        runner: StepRunner,
        limits: Limits,
        channel: Channel,
        clock: Callable[[], float] = time.monotonic,
        rules: Rules = DEFAULT_RULES,
        watch: Watch | None = None,
        grammars: Grammars | None = None,
        carrier: Carrier | None = None,
        fitting: Fitting | None = None,
    ) -> None:
        self._scheduler = make_scheduler(replace(limits, plans_in_flight=runner.depth), runner.pool, rules, fitting)
        self._runner = runner
        self._channel = channel
        self._clock = clock
        self._watch = watch
        self._compiling = None if grammars is None else Compiling(grammars, channel.wake)
        self._moving: Moving | None = None
        if carrier is not None:
            carrier.start(channel.wake)
            self._moving = Moving(self._scheduler, carrier, lambda frame: channel.send(wire.encode(frame)), self._forget)
        self._is_stuck = False
        self._load_due = 0.0
        self._urgent_due = 0.0
        self._is_urgent = False
        self._was_full_soon = False
        self._is_settled = False
        self._check_due = -math.inf
        self._tokens_per_s = 0.0
        self._queued: dict[int, float] = {}
        """When each request came that no step has had yet."""
        self._leaks = 0
        self._flights: deque[_Flight] = deque()
        self._finished = 0.0
        """When the last plan was finished."""

    @property
    def speculation(self) -> SpeculationCounts:
        """What became of proposals since the start."""
        return self._scheduler.speculator.counts()

    def run(self) -> None:
        """Serves until the channel is closed. Raises PeerLost when a rank is gone."""
        try:
            while self.turn():
                pass
        finally:
            if self._compiling is not None:
                self._compiling.close()

    def turn(self) -> bool:
        """Takes what came in and finishes at most one step; waits when there is none. False once the channel closed."""
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
            self._is_settled &= self._moving.num_refused == refused  # who rests would keep it to itself
        while len(self._flights) < self._runner.depth and self._start():
            pass
        self._report_urgent()
        self._is_stuck = not self._flights
        if self._flights:
            self._finish(self._flights.popleft())
        elif not must_wait and self._clock() >= self._load_due:
            self._report(self._clock())  # what waits can't start yet: routers must not take silence for death
        return True

    def _receive(self, must_wait: bool) -> list[bytes] | None:
        """What came in. Waits when nothing can be computed: for ever, or as long as a move allows. Pages that are frozen or
        reserved may keep even the first of the queue waiting: then what is reported must not grow old."""
        if self._flights or not (must_wait or self._is_stuck):
            return self._channel.receive(block=False)
        deadline = None if self._moving is None else self._moving.deadline
        if deadline is None and must_wait:
            return self._channel.receive(block=True)
        longest_s = math.inf if deadline is None else max(0.0, deadline - self._clock())
        return self._channel.receive(block=True, timeout_s=longest_s if must_wait else min(longest_s, LOAD_INTERVAL_S))

    def _start(self) -> bool:
        """Begins with the next plan, if there is one."""
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
        """Ends the oldest plan in flight and tells what came of it. A plan that waited for one before it took the time since."""
        result = self._runner.finish()
        now = self._clock()
        wall_s = now - max(flight.started, self._finished)
        self._finished = now
        if self._watch is not None:
            self._watch.ended(flight.plan, wall_s)
        if result.lost and not self.speculation.lost:
            log.warning("the ranks draft no more, and requests go on without: %s", result.lost)
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
        """Hands one frame to the scheduler and sends the answer, if there is one at once."""
        try:
            frame = wire.decode_to_engine(message)
        except msgspec.DecodeError as error:
            # Both ends are this program in one pod, so this is a bug; the requests of other frames need not suffer for it.
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
            case wire.Prepare(move) | moves.MoveOut(move):
                why = "this engine moves nothing"
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
            self._channel.send(wire.encode(wire.Tokens([], [], [], [], [answer])))
        else:
            self._queued[handle] = now
            if self._compiling is not None and grammar is not None and self._compiling.begin(handle, grammar):
                self._scheduler.release(handle, now)

    def _take_compiled(self, compiling: Compiling) -> None:
        """Lets requests be served whose grammar is compiled now, and refuses those whose grammar cannot be."""
        for handle, refuse in compiling.ended():
            if refuse is None:
                self._scheduler.release(handle, self._clock())
            else:
                epoch = self._scheduler.epoch_of(handle)
                self._forget(handle)
                self._channel.send(wire.encode(self._refused(handle, epoch, refuse)))

    def _forget(self, handle: int) -> None:
        if self._moving is not None:
            self._moving.unwanted(handle, self._clock())
        self._scheduler.abort(handle)
        self._queued.pop(handle, None)
        if self._compiling is not None:
            self._compiling.forget(handle)

    def _left_queue(self, now: float) -> list[float]:
        """How long the requests waited that this step has for the first time. One that was preempted came out long ago."""
        since = [self._queued.pop(handle, None) for handle in self._scheduler.admitted()]
        return [now - came for came in since if came is not None]

    def _refused(self, handle: int, epoch: int, refuse: Refuse) -> wire.Refused:
        retry_after_s = None
        if refuse.backlog_tokens is not None:
            wanted_s = refuse.backlog_tokens / self._tokens_per_s if self._tokens_per_s else MIN_RETRY_S
            retry_after_s = min(max(wanted_s, MIN_RETRY_S), MAX_RETRY_S)
        return wire.Refused(handle, epoch, refuse.status, refuse.code, refuse.message, retry_after_s)

    def _measure(self, num_tokens: int, wall_s: float) -> None:
        """Follows the rate of computed tokens over about the last twenty steps."""
        rate = num_tokens / max(wall_s, 1e-6)
        self._tokens_per_s = rate if not self._tokens_per_s else 0.95 * self._tokens_per_s + 0.05 * rate

    def _report_urgent(self) -> None:
        """Reports at once what cannot wait, unless that was done just now: then after this step."""
        if self._is_urgent:
            now = self._clock()
            if now >= self._urgent_due:
                self._report(now)

    def _report(self, now: float) -> None:
        """Tells which pages are found now and were not before, and the reverse, and the load."""
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
        """Before the loop blocks: reports the load. When idleness starts, checks that every page came back; with a leak we serve
        on, and say it. All pages are looked at, so this is done only so often."""
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
    """The end of a request whose frame cannot be read. Raises DecodeError when not even its handle can: then nobody knows who
    waits, and the incarnation ends, which tells all."""
    try:
        _, handle, asked = msgspec.msgpack.decode(message, type=tuple[str, int, list[object]])
    except msgspec.MsgspecError as error:
        raise msgspec.DecodeError(f"frame for the engine names no request: {error}") from error
    epoch = asked[1] if len(asked) > 1 and isinstance(asked[1], int) else 0
    return wire.Refused(handle, epoch, 500, "unreadable_request", "the engine cannot read this request")


def run_engine(
    runner: StepRunner,
    limits: Limits,
    endpoint: str,
    rules: Rules = DEFAULT_RULES,
    watch: Watch | None = None,
    grammars: Grammars | None = None,
    carrier: Carrier | None = None,
    fitting: Fitting | None = None,
) -> None:
    """Serves the HTTP process at this zmq endpoint until told to leave. Raises PeerLost when a rank is gone."""
    channel = ZmqChannel(endpoint)
    try:
        EngineLoop(runner, limits, channel, rules=rules, watch=watch, grammars=grammars, carrier=carrier, fitting=fitting).run()
    finally:
        channel.close()
