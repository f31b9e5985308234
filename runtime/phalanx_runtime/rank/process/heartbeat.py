"""The heart of a rank: a thread that says once a second that the rank lives, and on rank 0 how long its step has taken.

It needs the interpreter for every beat. A call that holds it for ever silences the heart, which is wanted; loading weights and
torch's operators let it go. A step's time is counted in the heart's own turns: while the whole process does not run (a paused
machine, a stopped container) no step grows old.
"""

import os
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.core.step_timeout import StepTimes, form_of
from phalanx_runtime.rank_spec import BEAT_S, Beat, RankSays

_encode = msgspec.json.Encoder().encode


def write_line(frame: RankSays) -> None:
    """Writes one line to stdout, whole, from whichever thread. Raises OSError when nobody reads any more."""
    os.write(1, _encode(frame) + b"\n")


@dataclass(frozen=True, slots=True, eq=False)
class _Step:
    """A step that runs."""

    number: int
    bound_s: float


class Heartbeat:
    """Beats. `began` and `ended` are called by the thread that computes; they cost an assignment."""

    def __init__(self, tell: Callable[[Beat], None] = write_line) -> None:
        self._tell = tell
        self._steps: dict[int, _Step] = {}
        self._counted: _Step | None = None
        self._step_s = 0.0

    def start(self) -> None:
        """Beats from now on, until the process ends or nobody listens."""
        threading.Thread(target=self._run, name="heart", daemon=True).start()

    def began(self, number: int, bound_s: float) -> None:
        """A step began; longer than `bound_s` it counts as hung."""
        self._steps[number] = _Step(number, bound_s)

    def ended(self, number: int) -> None:
        """The step ended."""
        self._steps.pop(number, None)

    def beat(self, passed_s: float) -> Beat:
        """What is said now, so long after the last beat, of the oldest step. One that began since then is told with no time.

        While it runs rank 0 may compute its part of a later one, so the longest bound of any holds.
        """
        running = list(self._steps.values())
        if not running:
            return Beat()
        step = running[0]
        self._step_s = self._step_s + min(passed_s, 2 * BEAT_S) if step is self._counted else 0.0
        self._counted = step
        bound_s = max(one.bound_s for one in running)
        return Beat(step=step.number, step_s=round(self._step_s, 3), bound_s=bound_s)

    def _run(self) -> None:
        last = time.monotonic()
        while True:
            now = time.monotonic()
            try:
                self._tell(self.beat(now - last))
            except OSError:  # the supervisor is gone; the thread that watches stdin ends the process
                return
            last = now
            time.sleep(BEAT_S)


class StepWatch:
    """Tells the heart of every step, and how long it may take. Implements `engine.ports.Watch`."""

    def __init__(self, heart: Heartbeat) -> None:
        self._heart = heart
        self._times = StepTimes()

    def began(self, plan: StepPlan, expected_s: float | None) -> None:
        """A step begins."""
        self._heart.began(plan.step, self._times.bound_s(form_of(plan), expected_s))

    def ended(self, plan: StepPlan, wall_s: float) -> None:
        """The step ended."""
        self._times.took(form_of(plan), wall_s)
        self._heart.ended(plan.step)
