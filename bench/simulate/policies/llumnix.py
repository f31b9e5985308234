"""Llumnix: freeness, the steps that a group can go on for, decides where requests go and which pairs of groups balance.

    freeness = (free pages - pages that wait) * page / requests

Every half second the groups with the least freeness give their shortest running request to those with the most, one at a time
each, if the receiver stays freer than the giver was. Source: Sun et al., OSDI 2024; balancing.md 1.1.
"""

from collections.abc import Sequence

from bench.simulate.cache import PAGE
from bench.simulate.engine import Engine
from bench.simulate.jobs import Job
from bench.simulate.scene import Plain, Scene, Seen, Wish, least
from phalanx_api import wire

EVERY_S = 0.5
BUSY_STEPS = 60.0
"""A group with fewer steps left gives, one with more takes."""


def freeness(load: wire.Load, unseen_tokens: int = 0, unseen: int = 0) -> float:
    """Steps that the group can go on for; less than nothing when more waits than fits."""
    free = (load.free_pages - load.waiting_pages) * PAGE - unseen_tokens
    return free / max(1, load.running + load.waiting + unseen)


class Freeness(Plain):
    """Dispatch by freeness; with `migrates`, pairs of groups too."""

    def __init__(self, migrates: bool = True) -> None:
        self._migrates = migrates
        self._loads: dict[int, wire.Load] = {}
        self._busy: set[int] = set()
        self._due = 0.0

    def choose(self, job: Job, scene: Scene) -> int:
        """The freest group."""
        return least([-self._of(seen) for seen in scene.groups], scene.chance)

    def _of(self, seen: Seen) -> float:
        return freeness(seen.load, sum(tokens for _, tokens in seen.unseen.values()), len(seen.unseen))

    def reported(self, group: int, load: wire.Load, now: float) -> None:
        """Notes the report."""
        self._loads[group] = load

    def tick(self, now: float, engines: Sequence[Engine]) -> list[Wish]:
        """Pairs the fullest with the freest."""
        if not self._migrates or now < self._due or len(self._loads) < len(engines):
            return []
        self._due = now + EVERY_S
        order = sorted(self._loads, key=lambda group: freeness(self._loads[group]))
        wishes = []
        for source, target in zip(order, reversed(order), strict=True):
            if source == target or freeness(self._loads[source]) >= freeness(self._loads[target]):
                break
            wish = self._pair(source, target, engines)
            if wish is not None:
                wishes.append(wish)
        return wishes

    def _pair(self, source: int, target: int, engines: Sequence[Engine]) -> Wish | None:
        if freeness(self._loads[source]) >= BUSY_STEPS or freeness(self._loads[target]) < BUSY_STEPS:
            return None
        if {source, target} & self._busy or not engines[source].decodes:
            return None
        job = min(engines[source].decodes.values(), key=engines[source].context_of)
        taken = self._loads[target]
        after = ((taken.free_pages - taken.waiting_pages) * PAGE - engines[source].context_of(job)) / (taken.running + 1)
        if after <= freeness(self._loads[source]):
            return None
        self._busy |= {source, target}
        return Wish(job, source, target, "precopy")

    def moved(self, wish: Wish, is_moved: bool, now: float) -> None:
        """The pair is free again."""
        self._busy -= {wish.source, wish.target}
