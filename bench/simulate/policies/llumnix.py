"""Llumnix: requests go to the group with the highest freeness, and pairs of groups balance by it.

    freeness = (free pages - pages that waiting requests need) * page size / requests

Every half second the groups with the lowest freeness move their shortest running request to those with the highest, one move per
group at a time, if the target remains freer than the source was. Source: Sun et al., OSDI 2024.
"""

from collections.abc import Sequence

from bench.simulate.cache import PAGE
from bench.simulate.engine import Engine
from bench.simulate.jobs import Job
from bench.simulate.policy import DispatchOnly, GroupState, MoveOrder, RouterState, random_argmin
from phalanx_api import wire

INTERVAL_S = 0.5
BUSY_STEPS = 60.0
"""Groups below this freeness are sources, others targets."""


def freeness(load: wire.Load, unreported_tokens: int = 0, unreported: int = 0) -> float:
    """Returns the steps that the group can continue; negative if more waits than fits."""
    free = (load.free_pages - load.waiting_pages) * PAGE - unreported_tokens
    return free / max(1, load.running + load.waiting + unreported)


class Freeness(DispatchOnly):
    """Dispatch by freeness, with `migrates` moves too."""

    def __init__(self, migrates: bool = True) -> None:
        self._migrates = migrates
        self._loads: dict[int, wire.Load] = {}
        self._busy: set[int] = set()
        self._due = 0.0

    def choose(self, job: Job, state: RouterState) -> int:
        return random_argmin([-self._freeness(group) for group in state.groups], state.rng)

    def _freeness(self, group: GroupState) -> float:
        return freeness(group.load, sum(tokens for _, tokens in group.unreported.values()), len(group.unreported))

    def load_reported(self, group: int, load: wire.Load, now: float) -> None:
        self._loads[group] = load

    def tick(self, now: float, engines: Sequence[Engine]) -> list[MoveOrder]:
        if not self._migrates or now < self._due or len(self._loads) < len(engines):
            return []
        self._due = now + INTERVAL_S
        by_freeness = sorted(self._loads, key=lambda group: freeness(self._loads[group]))
        orders = []
        for source, target in zip(by_freeness, reversed(by_freeness), strict=True):
            if source == target or freeness(self._loads[source]) >= freeness(self._loads[target]):
                break
            order = self._pair(source, target, engines)
            if order is not None:
                orders.append(order)
        return orders

    def _pair(self, source: int, target: int, engines: Sequence[Engine]) -> MoveOrder | None:
        if freeness(self._loads[source]) >= BUSY_STEPS or freeness(self._loads[target]) < BUSY_STEPS:
            return None
        if {source, target} & self._busy or not engines[source].decodes:
            return None
        job = min(engines[source].decodes.values(), key=engines[source].context_of)
        target_load = self._loads[target]
        after = ((target_load.free_pages - target_load.waiting_pages) * PAGE - engines[source].context_of(job)) / (
            target_load.running + 1
        )
        if after <= freeness(self._loads[source]):
            return None
        self._busy |= {source, target}
        return MoveOrder(job, source, target, "precopy")

    def move_ended(self, order: MoveOrder, is_moved: bool, now: float) -> None:
        self._busy -= {order.source, order.target}
