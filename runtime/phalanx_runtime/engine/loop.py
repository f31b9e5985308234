"""The engine loop of rank 0: inbox, schedule, run, commit, one frame of tokens, and load reports.

Every step drains the inbox first, so that an abort takes effect within one step. With nothing to compute the loop blocks on
its channel: an idle engine uses no CPU. What a step computes is decided in `core.scheduler`; who runs it stands behind `ports`.
"""

import logging
import time
from collections.abc import Callable

import msgspec

from phalanx_api import wire
from phalanx_runtime.core.admission import Limits, Refuse
from phalanx_runtime.core.rules import Rules, make_scheduler
from phalanx_runtime.engine.channel import ZmqChannel
from phalanx_runtime.engine.ports import Channel, StepRunner, Watch

log = logging.getLogger(__name__)

LOAD_INTERVAL_S = 0.05
"""How often a busy engine reports its load. Routers choose by it; more often costs frames, less often makes choices stale."""
DEFAULT_RULES = Rules()
MIN_RETRY_S, MAX_RETRY_S = 1.0, 60.0
"""Bounds of the Retry-After that a full queue answers: its backlog over the measured rate may be far off on either side."""


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
    ) -> None:
        self._scheduler = make_scheduler(limits, runner.pool, rules)
        self._runner = runner
        self._channel = channel
        self._clock = clock
        self._watch = watch
        self._load_due = 0.0
        self._is_settled = False
        self._tokens_per_s = 0.0
        self._queued: dict[int, float] = {}
        """When each request came that no step has had yet."""
        self._leaks = 0

    def run(self) -> None:
        """Serves until the channel is closed. Raises PeerLost when a rank is gone."""
        while self.turn():
            pass

    def turn(self) -> bool:
        """Takes what came in and runs at most one step; waits when there is nothing to compute. False once the channel closed."""
        idle = self._scheduler.is_idle()
        if idle:
            self._settle()
        messages = self._channel.receive(block=idle)
        if messages is None:
            return False
        for message in messages:
            self._take(message)
            self._is_settled = False
        started = self._clock()
        plan = self._scheduler.schedule(started)
        if plan is None:
            return True
        queue_times_s = self._left_queue(started) if plan.admitted else []
        if self._watch is not None:
            self._watch.began(plan, self._scheduler.expected_s())
        result = self._runner.run(plan)
        now = self._clock()
        if self._watch is not None:
            self._watch.ended(plan, now - started)
        tokens = self._scheduler.commit(result, now - started)
        tokens.queue_times_s.extend(queue_times_s)
        self._measure(len(plan.tokens), now - started)
        if tokens.handles or tokens.finished or tokens.prompt_details or queue_times_s:
            self._channel.send(wire.encode(tokens))
        for refused in self._scheduler.refused:
            self._channel.send(wire.encode(refused))
        if now >= self._load_due:
            self._report(now)
        return True

    def _take(self, message: bytes) -> None:
        """Hands one frame to the scheduler and sends the answer, if there is one at once."""
        try:
            frame = wire.decode_to_engine(message)
        except msgspec.DecodeError as error:
            # Both ends are this program in one pod, so this is a bug; the requests of other frames need not suffer for it.
            log.error("frame for the engine cannot be read: %s", error)
            return
        match frame:
            case wire.Abort(handles):
                for handle in handles:
                    self._scheduler.abort(handle)
                    self._queued.pop(handle, None)
            case wire.Submit(handle, request):
                answer = self._scheduler.submit(handle, request, self._clock())
                if isinstance(answer, Refuse):
                    self._channel.send(wire.encode(self._refused(handle, request.epoch, answer)))
                elif answer is not None:
                    self._channel.send(wire.encode(wire.Tokens([], [], [], [], [answer])))
                else:
                    self._queued[handle] = self._clock()

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

    def _report(self, now: float) -> None:
        self._channel.send(wire.encode(msgspec.structs.replace(self._scheduler.load(), leaks=self._leaks)))
        self._load_due = now + LOAD_INTERVAL_S

    def _settle(self) -> None:
        """When idleness starts: checks that every page came back and reports the load. With a leak we serve on, and say it."""
        if self._is_settled:
            return
        self._is_settled = True
        wrong = self._scheduler.check()
        self._leaks += len(wrong)
        self._report(self._clock())
        for what in wrong:
            log.error("page pool is wrong: %s", what)


def run_engine(
    runner: StepRunner, limits: Limits, endpoint: str, rules: Rules = DEFAULT_RULES, watch: Watch | None = None
) -> None:
    """Serves the HTTP process at this zmq endpoint until told to leave. Raises PeerLost when a rank is gone."""
    channel = ZmqChannel(endpoint)
    try:
        EngineLoop(runner, limits, channel, rules=rules, watch=watch).run()
    finally:
        channel.close()
