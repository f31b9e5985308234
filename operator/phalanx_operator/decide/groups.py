"""Which groups must exist, and which one goes first when there are too many."""

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx_operator.decide.snapshot import ObservedGroup


@dataclass(frozen=True, slots=True)
class Desired:
    """How many groups, of which revision, how many routers, and the names that new groups take.

    `names` are for groups of this revision only, at least `replicas` of them, always the same ones for the same service and
    revision: a retry after a lost answer takes the same name again, and so makes no second group.
    """

    revision: str
    replicas: int
    routers: int
    names: tuple[str, ...]


def live(groups: Iterable[ObservedGroup]) -> list[ObservedGroup]:
    """The groups that are not being deleted."""
    return [group for group in groups if not group.terminating]


def in_order_of_deletion(groups: Iterable[ObservedGroup], revision: str) -> list[ObservedGroup]:
    """Groups as they would be given up: those that are not ready, then those of an old revision, then the youngest."""
    youngest_first = sorted(groups, key=lambda group: (group.created, group.name), reverse=True)
    return sorted(youngest_first, key=lambda group: (group.ready, group.revision == revision))


def free_names(desired: Desired, groups: Iterable[ObservedGroup], count: int) -> list[str]:
    """The first names that no group has, not even one that is being deleted."""
    taken = {group.name for group in groups}
    return [name for name in desired.names if name not in taken][:count]
