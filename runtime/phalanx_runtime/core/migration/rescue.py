"""Whom a leader offers to other groups before it preempts them.

    notice     2 x time to leave + 0.1 s           to leave: to copy the first victim, or what it took others lately, if longer
    imminent   time until no page is free  <  notice
    asked      victims in the order in which they would be preempted, until they free what a second needs; each once a second

When no page will be free says `outlive`: requests that end give theirs back. Whoever is expected to have ended by then loses no
pages, so it is no victim. Who was asked for a notice ago (half a second at most) and is still here is taken to have found no
group: the next ones are asked for in its place. Who stays last is never offered: alone it always fits.
Pure: times and sizes are arguments.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from phalanx_runtime.core.pace import MovingAverage

MARGIN_S = 0.1
LEAVE_FACTOR = 2.0
ASK_EVERY_S, PATIENCE_S = 1.0, 0.5
MAX_ASKED = 8
"""Requests that are asked for at once."""


@dataclass(frozen=True, slots=True)
class Victim:
    """A running request that has drawn a token, its pages, and the tokens that it is expected to go on for."""

    handle: int
    pages: int
    rest: float


@dataclass(frozen=True, slots=True)
class Pressure:
    """How near the pool is to its end. `victims` are in the order of preemption. Steps are those of a token for each request, and
    `step_s` is how long one takes: where tokens are proposed a real one counts as several."""

    steps_to_full: float
    step_s: float
    free_pages: int
    victims: Sequence[Victim]
    pages_per_s: float
    """How fast pages go to another group."""


class Rescue:
    """Remembers who was asked for, and how long those took who left."""

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}
        self._leave_s = MovingAverage()

    def left(self, handle: int, now: float) -> None:
        """Another group has this request, or nobody wants it any more; counts when it was asked for within the last second."""
        asked = self._asked.pop(handle, None)
        if asked is not None and now - asked < ASK_EVERY_S:
            self._leave_s.add(now - asked)

    def victims(self, pressure: Pressure, moving: Collection[int], now: float) -> list[int]:
        """Handles to be asked for now; empty when pages last, or all were asked for just now.

        moving: who is on its way out already; nobody need ask for those.
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
