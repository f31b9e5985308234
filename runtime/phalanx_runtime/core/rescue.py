"""Whom a leader offers to other groups before it preempts them.

    imminent   time until no page is free  <  2 x time to copy the first victim + 0.1 s
    asked      victims in the order in which they would be preempted, until they free what a second needs; each once a second

When no page will be free says `outlive`: requests that end give theirs back. Whoever is expected to have ended by then loses no
pages, so it is no victim. Who stays last is never offered: alone it always fits. Pure: times and sizes are arguments.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MARGIN_S = 0.1
COPY_FACTOR = 2.0
ASK_EVERY_S = 1.0
MAX_ASKED = 8


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
    """Remembers who was asked for."""

    def __init__(self) -> None:
        self._asked: dict[int, float] = {}

    def victims(self, pressure: Pressure, now: float) -> list[int]:
        """Handles to be asked for now; empty when pages last, or all were asked for just now."""
        victims = [victim for victim in pressure.victims[:-1] if victim.rest > pressure.steps_to_full]
        if not victims:
            return []
        within_s = pressure.steps_to_full * pressure.step_s
        if within_s >= COPY_FACTOR * victims[0].pages / pressure.pages_per_s + MARGIN_S:
            return []
        self._asked = {handle: at for handle, at in self._asked.items() if now - at < ASK_EVERY_S}
        wanted = pressure.free_pages / within_s if within_s > 0 else float(victims[0].pages)
        chosen: list[int] = []
        freed = 0
        for victim in victims[:MAX_ASKED]:
            if freed >= wanted and chosen:
                break
            chosen.append(victim.handle)
            freed += victim.pages
        fresh = [handle for handle in chosen if handle not in self._asked]
        self._asked |= dict.fromkeys(fresh, now)
        return fresh
