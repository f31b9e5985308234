"""Selects requests that a leader offers to other groups before it preempts them, and predicts when the page pool is exhausted.

    E[remaining] = max(mean output - generated, generated / 2), bounded by max_tokens
    notice     2 x time to leave + 0.1 s        time to leave: copy time of the first victim, or mean of recent rescues if longer
    imminent   time to exhaustion  <  notice
    offered    victims in preemption order that free what one second needs; each once a second

A running request fills one slot per step and frees all at its end. A request expected to finish before exhaustion is no victim.
One still here after a notice (at most half a second) found no group: the next is offered. The last request is never offered.
"""

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from phalanx_runtime.core.pace import MovingAverage


@dataclass(frozen=True, slots=True)
class RunningEstimate:
    """A running request."""

    remaining_steps: float
    """Expected decode steps until the request ends."""
    slots: int
    """Freed at its end."""


def expected_remaining_steps(generated: int, max_remaining: int, mean_output: float) -> float:
    """Returns the expected remaining output tokens. `mean_output` 0: unknown."""
    if not mean_output:
        return float(max_remaining)
    return min(float(max_remaining), max(mean_output - generated, generated / 2))


def steps_to_full(free_slots: float, running: Iterable[RunningEstimate], new_slots_per_step: float = 0.0) -> float | None:
    """Returns the steps until no slot is free, unless all requests finish before. O(n log n)."""
    by_end = sorted(running, key=lambda request: request.remaining_steps)
    step = 0.0
    for num_finished, request in enumerate(by_end):
        rate, duration = len(by_end) - num_finished + new_slots_per_step, request.remaining_steps - step
        if free_slots < rate * duration:
            return step + free_slots / rate
        free_slots += request.slots + request.remaining_steps - rate * duration  # with the slots filled until then
        step = request.remaining_steps
    return None


MARGIN_S = 0.1
LEAVE_FACTOR = 2.0
OFFER_INTERVAL_S, PATIENCE_S = 1.0, 0.5
MAX_OFFERED = 8


@dataclass(frozen=True, slots=True)
class Victim:
    """A running request with output."""

    handle: int
    pages: int
    remaining_tokens: float
    """Expected output tokens left."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """State of the page pool."""

    steps_to_full: float
    """In steps of one token per request."""
    step_s: float
    """Time of such a step: a part of a real one with speculation."""
    free_pages: int
    victims: Sequence[Victim]
    """Requests in preemption order."""
    pages_per_s: float


class Rescue:
    """Tracks offered requests and the time that rescues take."""

    def __init__(self) -> None:
        self._offered_s: dict[int, float] = {}
        self._leave_s = MovingAverage()

    def request_left(self, handle: int, now: float) -> None:
        """Records that a request has left, and the time since its offer."""
        offered_s = self._offered_s.pop(handle, None)
        if offered_s is not None and now - offered_s < OFFER_INTERVAL_S:
            self._leave_s.add(now - offered_s)

    def select(self, pressure: Pressure, leaving: Collection[int], now: float) -> list[int]:
        """Returns the handles to offer now, without those that are leaving."""
        victims = [victim for victim in pressure.victims[:-1] if victim.remaining_tokens > pressure.steps_to_full]
        if not victims:
            return []
        within_s = pressure.steps_to_full * pressure.step_s
        notice_s = LEAVE_FACTOR * max(victims[0].pages / pressure.pages_per_s, self._leave_s.mean) + MARGIN_S
        if within_s >= notice_s:
            return []
        self._offered_s = {handle: time_s for handle, time_s in self._offered_s.items() if now - time_s < OFFER_INTERVAL_S}
        needed = pressure.free_pages / within_s if within_s > 0 else float(victims[0].pages)
        patience_s = min(notice_s, PATIENCE_S)
        candidates = [victim for victim in victims if now - self._offered_s.get(victim.handle, now) < patience_s]
        chosen: list[int] = []
        num_freed = 0
        for victim in candidates[:MAX_OFFERED]:
            if num_freed >= needed and chosen:
                break
            chosen.append(victim.handle)
            num_freed += victim.pages
        new = [handle for handle in chosen if handle not in self._offered_s and handle not in leaving]
        self._offered_s |= dict.fromkeys(new, now)
        return new
