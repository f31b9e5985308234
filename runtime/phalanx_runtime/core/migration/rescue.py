"""Selects requests that a leader offers to other groups before it preempts them.

    notice     2 x time to leave + 0.1 s           to leave: to copy the first victim, or the time of recent rescues, if longer
    imminent   time until the page pool is exhausted  <  notice
    offered    victims in preemption order until they free what one second needs; each at most once a second

`kv.exhaustion` predicts when the pool is exhausted. A request expected to finish before that is no victim. A request offered one
notice ago (at most half a second) that is still here is taken to have found no group: the next ones are offered instead. The last
request is never offered: alone it always fits. Pure: times and sizes are arguments.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from phalanx_runtime.core.pace import MovingAverage

MARGIN_S = 0.1
LEAVE_FACTOR = 2.0
ASK_EVERY_S, PATIENCE_S = 1.0, 0.5
MAX_ASKED = 8
"""Requests offered at once."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A running request with output, its pages, and its expected remaining tokens."""

    handle: int
    pages: int
    rest: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Pressure:
    """State of the page pool. `victims` are in preemption order. Steps have one token per request; with speculation a real step
    counts as several."""

    steps_to_full: float
    step_s: float
    free_pages: int
    victims: Sequence[Victim]
    pages_per_s: float
    """Rate of KV transfer to another group."""


class Rescue:
    """Remembers which requests were offered, and how long rescues took."""

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}
        self._leave_s = MovingAverage()

    def left(self, handle: int, now: float) -> None:
        """Records that this request has left; its time counts if it was offered within the last second."""
        asked = self._asked.pop(handle, None)
        if asked is not None and now - asked < ASK_EVERY_S:
            self._leave_s.add(now - asked)

    def victims(self, pressure: Pressure, moving: Collection[int], now: float) -> list[int]:
        """Returns the handles to offer now.

        `moving`: requests that leave already; they are not offered.
        """
        victims = [victim for victim in pressure.victims[:-1] if victim.rest > pressure.steps_to_full]
        if not victims:
            return []
        within_s = pressure.steps_to_full * pressure.step_s
        notice_s = LEAVE_FACTOR * max(victims[0].pages / pressure.pages_per_s, self._leave_s.mean) + MARGIN_S
        if within_s >= notice_s:
            return []
        self._asked = {handle: at for handle, at in self._asked.items() if now - at < ASK_EVERY_S}
        wanted = pressure.free_pages / within_s if within_s > 0 else float(victims[0].pages)
        patience_s = min(notice_s, PATIENCE_S)
        may_leave = [victim for victim in victims if now - self._asked.get(victim.handle, now) < patience_s]
        chosen: list[int] = []
        freed = 0
        for victim in may_leave[:MAX_ASKED]:
            if freed >= wanted and chosen:
                break
            chosen.append(victim.handle)
            freed += victim.pages
        fresh = [handle for handle in chosen if handle not in self._asked and handle not in moving]
        self._asked |= dict.fromkeys(fresh, now)
        return fresh
