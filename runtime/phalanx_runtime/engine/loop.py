"""The engine loop of rank 0: receive, schedule, start, finish, commit, send tokens, report load.

Up to `Limits.max_flights` plans are in flight. An idle loop blocks on its channel.
"""

import logging
import math
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace

import msgspec

from phalanx_api import wire
from phalanx_api.flight.entries import PageTransfer, Preemption, shown_id
from phalanx_api.moves import Arrived, Frozen, MoveFailed, Prepared, TransferFrame
from phalanx_api.roofline import Roofline
from phalanx_api.speculation import SpeculationCounts
from phalanx_frontend.flight import NO_FLIGHT_RECORDER, FlightRecorder
from phalanx_runtime.core.admission import STATE_LOST, Limits, Refusal, refused_frame, unreadable
from phalanx_runtime.core.flight_entries import engine_step
from phalanx_runtime.core.migration.records import MoveLimits
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.scheduling.scheduler import Scheduler
from phalanx_runtime.core.speculation.config import Fitting, accept_all
from phalanx_runtime.core.step_plan import StepPlan, StepResult
from phalanx_runtime.core.utilization import UtilizationMeter
from phalanx_runtime.engine.adapters.loading import EngineAdapters
from phalanx_runtime.engine.disk_fetches import DiskFetches
from phalanx_runtime.engine.engine_moves import EngineMoves
from phalanx_runtime.engine.grammar_queue import GrammarQueue
from phalanx_runtime.engine.load_reports import LOAD_INTERVAL_S, LoadReports
from phalanx_runtime.engine.ports import (
    NO_ADAPTERS,
    NO_GRAMMARS,
    NO_TRANSPORT,
    NO_WATCHER,
    AdapterLoader,
    EngineChannel,
    GrammarCompiler,
    PageTransport,
    StepRunner,
    StepWatcher,
)
from phalanx_runtime.engine.request_times import RequestTimes
from phalanx_runtime.errors import RowStateLost, StepOutOfMemory

log = logging.getLogger(__name__)

DEFAULT_CONFIG = SchedulerConfig()
RATE_SMOOTHING = 0.05
"""Weight of the latest step in the rate of computed tokens."""


@dataclass(frozen=True, slots=True)
class _Flight:
    """A plan that the ranks compute."""

    plan: StepPlan
    started: float
    queue_times_s: list[float]
    """Of requests in their first step."""
    expected_s: float | None
    """By the cost model."""


@dataclass(frozen=True, slots=True)
class _FinishedStep:
    flight: _Flight
    result: StepResult
    ended: float
    wall_s: float
    """From the start, or the end of the previous step if that is later."""


class EngineLoop:
    """Connects channel, scheduler and runner. `clock`: monotonic seconds."""

    def __init__(
        self,
        runner: StepRunner,
        limits: Limits,
        channel: EngineChannel,
        clock: Callable[[], float] = time.monotonic,
        config: SchedulerConfig = DEFAULT_CONFIG,
        *,
        watcher: StepWatcher = NO_WATCHER,
        grammars: GrammarCompiler = NO_GRAMMARS,
        transport: PageTransport = NO_TRANSPORT,
        adapters: AdapterLoader = NO_ADAPTERS,
        fitting: Fitting = accept_all,
        roofline: Roofline | None = None,
        recorder: FlightRecorder = NO_FLIGHT_RECORDER,
    ) -> None:
        limits = replace(limits, plans_in_flight=runner.depth)
        self._scheduler = make_scheduler(limits, runner.pool, config, fitting)
        self._max_flights = limits.max_flights
        self._runner = runner
        self._channel = channel
        self._clock = clock
        self._watcher = watcher
        self._recorder = recorder
        self._grammars = GrammarQueue(grammars, channel.wake)
        self._adapters = EngineAdapters(self._scheduler, adapters, self._send)
        transport.start(channel.wake)
        self._fetches = DiskFetches(self._scheduler, transport)
        move_limits = MoveLimits(state_pages=runner.pool.state_pages)
        self._moves = EngineMoves(
            self._scheduler, transport, self._send_of_move, self._end_request, move_limits, fetches=self._fetches
        )
        self._moves.turn(clock())  # the first request finds the pages that rank 0 has on disk
        self._meter = UtilizationMeter(roofline)
        self._reports = LoadReports(self._scheduler, self._moves, clock, self._send, self._meter)
        self._flights: deque[_Flight] = deque()
        self._last_finish = 0.0
        self._is_stalled = False
        """The last turn had no plan in flight."""
        self._memory_failures = 0
        """Plans without memory in a row."""
        self._lacked_memory = False
        """A plan was taken back, and its newest request is not preempted yet."""
        self._kept_queue_times_s: list[float] = []
        """Of requests whose first plan was taken back."""
        self._tokens_per_s = 0.0
        self._times = RequestTimes()

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
        return self._times.num_unstarted

    @property
    def speculation(self) -> SpeculationCounts:
        """Speculation counters since the start."""
        return self._scheduler.speculator.counts()

    def run(self) -> None:
        """Serves until the channel closes. Raises PeerLost, or StepOutOfMemory for the second step in a row."""
        try:
            while self.turn():
                pass
        finally:
            self._grammars.close()

    def turn(self) -> bool:
        """Finishes at most one step; blocks without work. Returns false once the channel is closed."""
        must_wait = self._scheduler.is_blocked()
        if not self._receive(must_wait):
            return False
        while (flight := self._schedule()) is not None:
            if not self._start(flight) and self._flights:
                break  # their requests cannot be preempted yet
        self._is_stalled = not self._flights
        self._reports.report_before_step(self._is_stalled and not must_wait)
        if self._flights:
            step = self._finish()
            self._send_results(step, self._commit(step))
            self._reports.report_after_step(step.ended)
        if self._adapters.must_load and not self._flights:
            self._adapters.load()
        return True

    # Steps

    def _receive(self, must_wait: bool) -> bool:
        """Handles frames, compiled grammars and KV transfer reports. Returns false once the channel is closed."""
        if must_wait:
            self._reports.report_before_blocking()
        messages = self._receive_messages(must_wait)
        if messages is None:
            return False
        for message in messages:
            self._reports.message_received()
            self._handle_message(message)
        now = self._clock()
        self._enter_compiled(now)
        self._moves.turn(now)
        for handle in self._fetches.turn(now):
            if not self._grammars.is_waiting(handle):
                self._scheduler.release(handle, now)
        return True

    def _receive_messages(self, must_wait: bool) -> list[bytes] | None:
        """Blocks without work, at most until the deadline of a move, a fetch or a report.

        Frozen or reserved pages may block even the first request in the queue; then load reports continue.
        """
        if self._flights or not (must_wait or self._is_stalled):
            return self._channel.receive(block=False)
        deadlines = self._moves.deadline, self._fetches.deadline, self._reports.deadline if must_wait else None
        deadline = min((at for at in deadlines if at is not None), default=None)
        if deadline is None and must_wait:
            return self._channel.receive(block=True)
        timeout_s = math.inf if deadline is None else max(0.0, deadline - self._clock())
        return self._channel.receive(block=True, timeout_s=timeout_s if must_wait else min(timeout_s, LOAD_INTERVAL_S))

    def _schedule(self) -> _Flight | None:
        """Returns the next plan, if one can start."""
        if len(self._flights) == self._max_flights or self._adapters.must_load:
            return None
        now = self._clock()
        if self._lacked_memory and not self._preempt_newest(now):
            return None
        plan = self._scheduler.schedule(now)
        self._reports.plan_composed()
        if preempted := self._scheduler.take_preempted():
            self._times.preempted((handle for handle, _ in preempted), now)
            shown = [shown_id(id) for _, id in preempted]
            self._recorder.record(Preemption(at=now, requests=shown, free_pages=self._scheduler.pool.free_pages))
        if plan is None:
            return None
        queue_times_s, self._kept_queue_times_s = self._kept_queue_times_s, []
        if plan.admitted:
            queue_times_s += self._times.started(self._scheduler.started_handles(), now)
        return _Flight(plan, now, queue_times_s, self._scheduler.expected_s())

    def _start(self, flight: _Flight) -> bool:
        """Returns false if the plan is taken back: memory or a state is missing. Raises StepOutOfMemory the second time."""
        self._watcher.step_started(flight.plan, flight.expected_s)
        try:
            self._runner.start(flight.plan)
        except (StepOutOfMemory, RowStateLost) as error:
            self._watcher.step_failed(flight.plan)
            self._kept_queue_times_s = flight.queue_times_s
            if isinstance(error, RowStateLost):
                self._end_lost(error)
                return False
            if self._memory_failures:
                raise StepOutOfMemory(f"two steps in a row, the second with {len(flight.plan.rows)} requests: {error}") from error
            log.warning("no memory for a step", extra={"requests": len(flight.plan.rows), "why": str(error)})
            self._scheduler.take_back()
            self._memory_failures, self._lacked_memory = 1, True
            return False
        self._memory_failures = 0
        self._flights.append(flight)
        return True

    def _end_lost(self, error: RowStateLost) -> None:
        """Takes back the latest plan, and ends its requests that lack their state. Raises the error with several stages."""
        lost = [(handle, one.params.epoch) for handle, one in self._scheduler.requests.items() if one.row in error.rows]
        log.error("requests have lost their state", extra={"handles": [handle for handle, _ in lost], "why": str(error)})
        if not lost or self._runner.depth > 1:  # other stages have the plan
            raise error
        self._scheduler.take_back(error.rows)
        for handle, epoch in lost:
            self._end_request(handle)
            self._refuse(handle, epoch, STATE_LOST)

    def _preempt_newest(self, now: float) -> bool:
        """Preempts the newest request of the plan without memory. Returns false while other plans are in flight."""
        if self._flights:
            return False
        self._lacked_memory = False
        log.warning("request preempted for lack of memory", extra={"handle": self._scheduler.preempt_newest(now)})
        return True

    def _finish(self) -> _FinishedStep:
        """Waits for the result of the oldest plan."""
        flight = self._flights.popleft()
        result = self._runner.finish()
        now = self._clock()
        wall_s = now - max(flight.started, self._last_finish)
        self._last_finish = now
        self._watcher.step_ended(flight.plan, wall_s)
        self._meter.add(flight.plan, wall_s, result.busy_s, now)
        occupancy, expected_s = self._scheduler.occupancy(), flight.expected_s
        entry = engine_step(flight.plan, result, at=now, seconds=wall_s, expected_s=expected_s, occupancy=occupancy)
        self._recorder.record(entry)
        return _FinishedStep(flight, result, now, wall_s)

    def _commit(self, step: _FinishedStep) -> wire.Tokens:
        """Applies the result to the requests; returns their new tokens."""
        plan, result = step.flight.plan, step.result
        if result.draft_failure and not self.speculation.draft_failure:
            why = {"why": result.draft_failure}
            log.warning("the ranks can no longer draft; requests continue without speculation", extra=why)
        if self._times.has_traced:
            self._times.computed(self._scheduler.oldest_chunks(), step.ended - step.wall_s, step.ended)
        tokens = self._scheduler.commit(result, step.wall_s)
        if self._times.has_traced:
            self._times.add_to(tokens, step.ended)
        tokens.queue_times_s.extend(step.flight.queue_times_s)
        num_rejected = sum(plan.depths) - (sum(result.run_lengths) - len(result.run_lengths))
        self._measure_rate(len(plan.tokens) - num_rejected, step.wall_s)
        return tokens

    def _send_results(self, step: _FinishedStep, tokens: wire.Tokens) -> None:
        """Sends tokens and refusals of a step, then ends grammars and moves of the finished requests."""
        if tokens.handles or tokens.finished or tokens.prompt_details or tokens.queue_times_s:
            self._send(tokens)
        for refused in self._scheduler.refused:
            self._send(refused)
        ended = [end.handle for end in tokens.finished] + [end.handle for end in self._scheduler.refused]
        for handle in ended:
            self._times.forget(handle)
            self._grammars.release(handle)
        self._moves.step_committed(step.wall_s, ended, step.ended)

    def _measure_rate(self, num_tokens: int, wall_s: float) -> None:
        rate = num_tokens / max(wall_s, 1e-6)
        before = self._tokens_per_s or rate
        self._tokens_per_s = (1 - RATE_SMOOTHING) * before + RATE_SMOOTHING * rate

    # Frames

    def _send(self, frame: wire.FromEngine) -> None:
        self._channel.send(wire.encode(frame))

    def _send_of_move(self, frame: wire.FromEngine) -> None:
        if isinstance(frame, Prepared | Frozen | Arrived | MoveFailed):
            self._record_transfer(frame)
        self._send(frame)

    def _record_transfer(self, frame: wire.Prepare | TransferFrame) -> None:
        self._recorder.record(PageTransfer(at=self._clock(), move=frame.move, phase=type(frame).__name__))

    def _handle_message(self, message: bytes) -> None:
        try:
            frame = wire.decode_to_engine(message)
        except msgspec.DecodeError as error:
            # A defect: both ends have the same version. The other requests continue.
            log.error("frame for the engine cannot be read", extra={"why": str(error)})
            self._send(unreadable(message))
            return
        match frame:
            case wire.Abort(handles):
                for handle in handles:
                    self._end_request(handle)
            case wire.Submit(handle, request, move):
                self._submit(handle, request, move)
            case wire.LoadAdapter() | wire.UnloadAdapter():
                self._adapters.handle(frame, is_computing=bool(self._flights))
            case _:
                if isinstance(frame, wire.Prepare) and frame.request.sampling.grammar is not None:
                    self._grammars.prefetch(frame.request.sampling.grammar)
                self._record_transfer(frame)
                self._moves.handle(frame, self._clock())

    def _submit(self, handle: int, request: wire.Request, move: str) -> None:
        now, grammar = self._clock(), request.sampling.grammar
        has_pages = bool(move) and self._moves.submit(handle, request, move, now)
        is_held = grammar is not None or self._fetches.is_on
        answer = self._scheduler.submit(handle, request, now, is_held, move if has_pages else "")
        if has_pages:
            self._moves.submitted(move)
        if isinstance(answer, Refusal):
            if answer.backlog_tokens is not None:
                self._reports.request_refused()
            self._refuse(handle, request.epoch, answer)
        elif answer is not None:
            self._send(wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[answer]))
        else:
            self._times.submitted(handle, request, now)
            has_grammar = grammar is None or self._grammars.acquire(handle, grammar)
            awaits_pages = not has_pages and self._fetches.start(handle, now)
            if is_held and has_grammar and not awaits_pages:
                self._scheduler.release(handle, now)

    def _enter_compiled(self, now: float) -> None:
        for handle, refuse in self._grammars.take_ended():
            if refuse is None and self._fetches.is_waiting(handle):
                continue
            if refuse is None:
                self._scheduler.release(handle, now)
            else:
                epoch = self._scheduler.epoch_of(handle)
                self._end_request(handle)
                self._refuse(handle, epoch, refuse)

    def _end_request(self, handle: int) -> None:
        self._moves.request_left(handle, self._clock())
        self._fetches.request_left(handle)
        self._scheduler.abort(handle)
        self._times.forget(handle)
        self._grammars.release(handle)

    def _refuse(self, handle: int, epoch: int, refuse: Refusal) -> None:
        self._send(refused_frame(handle, epoch, refuse, self._tokens_per_s))
