"""Heartbeat: a thread sends a Beat every `BEAT_S`, on rank 0 with the time of the step in progress.

A call that never releases the GIL stops the heartbeat, as intended. Step times add the thread's intervals, so a stopped process
ages no step.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.core.step_timeout import StepTimes, form_of
from phalanx_runtime.progress import WeightProgress
from phalanx_runtime.rank_spec import BEAT_S, Beat, RankSays

_encode = msgspec.json.Encoder().encode


def write_line(frame: RankSays) -> None:
    """Writes one line to stdout; thread-safe. Raises OSError once the reader closed it."""
    os.write(1, _encode(frame) + b"\n")


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    number: int
    bound_s: float


class Heartbeat:
    """Sends beats; `step_started` and `step_ended` come from the computing thread."""

    def __init__(self, send: Callable[[Beat], None] = write_line) -> None:
        self._send = send
        self.loading: WeightProgress | None = None
        """Progress to report with beats outside of steps."""
        self._steps: dict[int, _Step] = {}
        self._timed: _Step | None = None
        self._step_s = 0.0

    def start(self) -> None:
        """Sends beats until `send` fails."""
        threading.Thread(target=self._run, name="heartbeat", daemon=True).start()

    def step_started(self, number: int, bound_s: float) -> None:
        """The step counts as hung after `bound_s`."""
        self._steps[number] = _Step(number, bound_s)

    def step_ended(self, number: int) -> None:
        """The step is complete."""
        self._steps.pop(number, None)

    def beat(self, elapsed_s: float) -> Beat:
        """Returns the beat `elapsed_s` after the last one: oldest step, largest bound of all in progress.

        The first beat of a step has time 0. Rank 0 may be computing its part of a later step.
        """
        running = list(self._steps.values())
        if not running:
            loading = self.loading
            return Beat() if loading is None else Beat(loaded_bytes=loading.done_bytes, weight_bytes=loading.total_bytes)
        step = running[0]
        self._step_s = self._step_s + min(elapsed_s, 2 * BEAT_S) if step is self._timed else 0.0
        self._timed = step
        bound_s = max(step.bound_s for step in running)
        return Beat(step=step.number, step_s=round(self._step_s, 3), bound_s=bound_s)

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            now = time.monotonic()
            try:
                self._send(self.beat(now - last))
            except OSError:  # the supervisor ended; the thread that reads stdin ends the process
                return
            last = now
            time.sleep(BEAT_S)


class StepWatch:
    """Reports steps to the heartbeat. Implements `engine.ports.StepWatcher`."""

    def __init__(self, heartbeat: Heartbeat) -> None:
        self._heartbeat = heartbeat
        self._times = StepTimes()

    def step_started(self, plan: StepPlan, expected_s: float | None) -> None:
        """Reports the start."""
        self._heartbeat.step_started(plan.step, self._times.bound_s(form_of(plan), expected_s))

    def step_ended(self, plan: StepPlan, wall_s: float) -> None:
        """Reports the end."""
        self._times.record(form_of(plan), wall_s)
        self._heartbeat.step_ended(plan.step)

    def step_failed(self, plan: StepPlan) -> None:
        """Reports the end, without a time."""
        self._heartbeat.step_ended(plan.step)
