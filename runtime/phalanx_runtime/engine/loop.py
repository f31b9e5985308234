"""The engine loop of rank 0: receive, schedule, start, finish, commit, send tokens, report load.

Up to `StepRunner.depth` plans are in flight. An idle loop blocks on its channel.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from phalanx_api import wire
from phalanx_api.speculation import SpeculationCounts
from phalanx_runtime.core.admission import Limits, Refusal
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import Fitting, accept_all
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.engine.channel import open_channel
from phalanx_runtime.engine.engine_moves import EngineMoves
from phalanx_runtime.engine.grammar_queue import GrammarQueue
from phalanx_runtime.engine.ports import (
    NO_GRAMMARS,
    NO_TRANSPORT,
    NO_WATCHER,
    EngineChannel,
    GrammarCompiler,
    PageTransport,
    StepRunner,
    StepWatcher,
)

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.05
"""Load report interval of a busy engine. Routers choose groups by these reports."""
URGENT_INTERVAL_S = 0.01
"""Shortest load report interval, after a refusal or before and after preemptions."""
CHECK_INTERVAL_S = 1.0
"""Shortest interval of page pool checks."""
DEFAULT_CONFIG = SchedulerConfig()
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Bounds of Retry-After when the queue is full; the estimate may be far off."""
RATE_SMOOTHING = 0.05
"""Weight of the latest step in the rate of computed tokens."""


@dataclass(frozen=True, slots=True)
class _Flight:
    plan: StepPlan
    started: float
    queue_times_s: list[float]
    """Of requests in their first step."""


class EngineLoop:
    """Connects channel, scheduler and runner. `clock`: monotonic seconds."""

    def __init__(
        self,
        runner: StepRunner,
        limits: Limits,
        channel: EngineChannel,
        clock: Callable[[], float] = time.monotonic,
        config: SchedulerConfig = DEFAULT_CONFIG,
        watcher: StepWatcher = NO_WATCHER,
        grammars: GrammarCompiler = NO_GRAMMARS,
        transport: PageTransport = NO_TRANSPORT,
        fitting: Fitting = accept_all,
    ) -> None:
        self._scheduler = make_scheduler(replace(limits, plans_in_flight=runner.depth), runner.pool, config, fitting)
        self._runner = runner
        self._channel = channel
        self._clock = clock
        self._watcher = watcher
        self._grammars = GrammarQueue(grammars, channel.wake)
        transport.start(channel.wake)
        self._moves = EngineMoves(self._scheduler, transport, self._send, self._end_request)
        self._flights: deque[_Flight] = deque()
        self._last_finish = 0.0
        self._is_blocked = False
        """Requests wait, but no plan can start."""
        self._load_due = 0.0
        self._urgent_due = 0.0
        self._is_urgent = False
        self._was_full_soon = False
        self._is_idle_reported = False
        self._check_due = -math.inf
        self._leaks = 0
        self._tokens_per_s = 0.0
        self._arrived: dict[int, float] = {}
        """Arrival times of requests without a step."""

    @property
    def scheduler(self) -> Scheduler:
        """The scheduler, for inspection."""
        return self._scheduler

    @property
    def moves(self) -> EngineMoves:
        """The moves, for inspection."""
        return self._moves

    @property
    def num_unstarted(self) -> int:
        """Requests without a step."""
        return len(self._arrived)

    @property
    def speculation(self) -> SpeculationCounts:
        """Speculation counters since the start."""
        return self._scheduler.speculator.counts()

    def run(self) -> None:
        """Serves until the channel closes. Raises PeerLost."""
        try:
            while self.turn():
                pass
        finally:
            self._grammars.close()

    def turn(self) -> bool:
        """Finishes at most one step; blocks without work. Returns false once the channel is closed."""
        must_wait = self._scheduler.is_blocked()
        if must_wait:
            self._report_before_blocking()
        messages = self._receive(must_wait)
        if messages is None:
            return False
        for message in messages:
            self._handle_message(message)
            self._is_idle_reported = False
        now = self._clock()
        self._enter_compiled(now)
        num_refused = self._moves.num_refused
        self._moves.turn(now)
        self._is_idle_reported &= self._moves.num_refused == num_refused  # report a new count
        while len(self._flights) < self._runner.depth and self._start():
            pass
        self._report_urgent()
        self._is_blocked = not self._flights
        if self._flights:
            self._finish(self._flights.popleft())
        elif not must_wait and self._clock() >= self._load_due:
            self._report(self._clock())  # silence would count as a failure
        return True

    def _receive(self, must_wait: bool) -> list[bytes] | None:
        """Blocks without work, at most until a move's deadline.

        Frozen or reserved pages may block even the first request in the queue; then load reports continue.
        """
        if self._flights or not (must_wait or self._is_blocked):
            return self._channel.receive(block=False)
        deadline = self._moves.deadline
        if deadline is None and must_wait:
            return self._channel.receive(block=True)
        timeout_s = math.inf if deadline is None else max(0.0, deadline - self._clock())
        return self._channel.receive(block=True, timeout_s=timeout_s if must_wait else min(timeout_s, LOAD_INTERVAL_S))

    # Steps

    def _start(self) -> bool:
        now, preemptions = self._clock(), self._scheduler.num_preemptions
        plan = self._scheduler.schedule(now)
        is_full_soon = self._scheduler.is_preemption_near()
        self._is_urgent |= self._scheduler.num_preemptions > preemptions or (is_full_soon and not self._was_full_soon)
        self._was_full_soon = is_full_soon
        if plan is None:
            return False
        self._flights.append(_Flight(plan, now, self._take_queue_times(now) if plan.admitted else []))
        self._watcher.step_started(plan, self._scheduler.expected_s())
        self._runner.start(plan)
        return True

    def _finish(self, flight: _Flight) -> None:
        """Finishes the oldest plan. Its time counts from the end of the previous plan."""
        result = self._runner.finish()
        now = self._clock()
        wall_s = now - max(flight.started, self._last_finish)
        self._last_finish = now
        self._watcher.step_ended(flight.plan, wall_s)
        if result.draft_failure and not self.speculation.draft_failure:
            why = {"why": result.draft_failure}
            log.warning("the ranks can no longer draft; requests continue without speculation", extra=why)
        tokens = self._scheduler.commit(result, wall_s)
        tokens.queue_times_s.extend(flight.queue_times_s)
        num_rejected = sum(flight.plan.depths) - (sum(result.run_lengths) - len(result.run_lengths))
        self._measure_rate(len(flight.plan.tokens) - num_rejected, wall_s)
        if tokens.handles or tokens.finished or tokens.prompt_details or flight.queue_times_s:
            self._send(tokens)
        for refused in self._scheduler.refused:
            self._send(refused)
        ended = [end.handle for end in tokens.finished] + [end.handle for end in self._scheduler.refused]
        for handle in ended:
            self._grammars.release(handle)
        self._moves.step_committed(flight.plan.step, wall_s, ended, now)
        if now >= (self._urgent_due if self._is_urgent else self._load_due):
            self._report(now)

    def _take_queue_times(self, now: float) -> list[float]:
        """Queue times of requests in their first step."""
        arrivals = [self._arrived.pop(handle, None) for handle in self._scheduler.started_handles()]
        return [now - arrived for arrived in arrivals if arrived is not None]

    def _measure_rate(self, num_tokens: int, wall_s: float) -> None:
        rate = num_tokens / max(wall_s, 1e-6)
        before = self._tokens_per_s or rate
        self._tokens_per_s = (1 - RATE_SMOOTHING) * before + RATE_SMOOTHING * rate

    # Frames

    def _send(self, frame: wire.FromEngine) -> None:
        self._channel.send(wire.encode(frame))

    def _handle_message(self, message: bytes) -> None:
        try:
            frame = wire.decode_to_engine(message)
        except msgspec.DecodeError as error:
            # A defect: both ends have the same version. The other requests continue.
            log.error("frame for the engine cannot be read", extra={"why": str(error)})
            self._send(_unreadable(message))
            return
        match frame:
            case wire.Abort(handles):
                for handle in handles:
                    self._end_request(handle)
            case wire.Submit(handle, request, move):
                self._submit(handle, request, move)
            case _:
                if isinstance(frame, wire.Prepare) and frame.request.sampling.grammar is not None:
                    self._grammars.prefetch(frame.request.sampling.grammar)
                self._moves.handle(frame, self._clock())

    def _submit(self, handle: int, request: wire.Request, move: str) -> None:
        now, grammar = self._clock(), request.sampling.grammar
        has_pages = bool(move) and self._moves.submit(handle, request, move, now)
        answer = self._scheduler.submit(handle, request, now, grammar is not None, move if has_pages else "")
        if has_pages:
            self._moves.submitted(move)
        if isinstance(answer, Refusal):
            self._is_urgent |= answer.backlog_tokens is not None
            self._send(self._refusal(handle, request.epoch, answer))
        elif answer is not None:
            self._send(wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[answer]))
        else:
            self._arrived[handle] = now
            if grammar is not None and self._grammars.acquire(handle, grammar):
                self._scheduler.release(handle, now)

    def _enter_compiled(self, now: float) -> None:
        for handle, refuse in self._grammars.take_ended():
            if refuse is None:
                self._scheduler.release(handle, now)
            else:
                epoch = self._scheduler.epoch_of(handle)
                self._end_request(handle)
                self._send(self._refusal(handle, epoch, refuse))

    def _end_request(self, handle: int) -> None:
        self._moves.request_left(handle, self._clock())
        self._scheduler.abort(handle)
        self._arrived.pop(handle, None)
        self._grammars.release(handle)

    def _refusal(self, handle: int, epoch: int, refuse: Refusal) -> wire.Refused:
        retry_after_s = None
        if refuse.backlog_tokens is not None:
            backlog_s = refuse.backlog_tokens / self._tokens_per_s if self._tokens_per_s else MIN_RETRY_S
            retry_after_s = min(max(backlog_s, MIN_RETRY_S), MAX_RETRY_S)
        return wire.Refused(
            handle=handle,
            epoch=epoch,
            status=refuse.status,
            code=refuse.code,
            message=refuse.message,
            retry_after_s=retry_after_s,
        )

    # Load reports

    def _report_urgent(self) -> None:
        """Reports now, or after this step if the last report is too recent."""
        if self._is_urgent:
            now = self._clock()
            if now >= self._urgent_due:
                self._report(now)

    def _report(self, now: float) -> None:
        changes = self._scheduler.pool.take_changes()
        if changes.changes or changes.is_snapshot:
            self._send(changes)
        load = self._scheduler.load(now)
        self._send(msgspec.structs.replace(load, leaks=self._leaks, refused_transfers=self._moves.num_refused))
        self._load_due, self._urgent_due = now + LOAD_INTERVAL_S, now + URGENT_INTERVAL_S
        self._is_urgent = False

    def _report_before_blocking(self) -> None:
        """Reports the load; checks the page pool on becoming idle."""
        if not self._scheduler.is_idle():
            self._report(self._clock())
            return
        if self._is_idle_reported:
            return
        self._is_idle_reported = True
        now = self._clock()
        if now < self._check_due:
            self._report(now)
            return
        self._check_due = now + CHECK_INTERVAL_S
        defects = self._scheduler.check()
        self._leaks += len(defects)
        self._report(now)
        for defect in defects:
            log.error("page pool is wrong", extra={"why": defect})


def _unreadable(message: bytes) -> wire.Refused:
    """Refusal of an undecodable request.

    Raises DecodeError, which ends the incarnation, if the handle cannot be decoded either.
    """
    try:
        _, handle, request = msgspec.msgpack.decode(message, type=tuple[str, int, list[object]])
    except msgspec.MsgspecError as error:
        raise msgspec.DecodeError(f"frame for the engine names no request: {error}") from error
    epoch = request[1] if len(request) > 1 and isinstance(request[1], int) else 0
    return wire.Refused(
        handle=handle, epoch=epoch, status=500, code="unreadable_request", message="the engine cannot read this request"
    )


def run_engine(
    runner: StepRunner,
    limits: Limits,
    endpoint: str,
    config: SchedulerConfig = DEFAULT_CONFIG,
    watcher: StepWatcher = NO_WATCHER,
    grammars: GrammarCompiler = NO_GRAMMARS,
    transport: PageTransport = NO_TRANSPORT,
    fitting: Fitting = accept_all,
) -> None:
    """Serves the HTTP process at a zmq endpoint until it closes. Raises PeerLost."""
    with open_channel(endpoint) as channel:
        EngineLoop(
            runner,
            limits,
            channel,
            config=config,
            watcher=watcher,
            grammars=grammars,
            transport=transport,
            fitting=fitting,
        ).run()
