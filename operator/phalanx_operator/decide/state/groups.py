"""Desired groups, and the order in which surplus groups are deleted."""

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx_operator.decide.state.snapshot import ObservedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class Desired:
    """The desired state of a service's groups."""

    revision: str
    replicas: int
    routers: int
    names: tuple[str, ...]
    """Names for groups of this revision, as many as may ever exist, always the same: a retry after a lost response reuses the
    name and so creates no second group."""
    max_unavailable: int = 1
    max_surge: int = 0
    partition: int = 0
    """Groups that keep their old revision."""
    paused: bool = False
    """No group is replaced for its revision."""
    held: str = ""
    """Why no serving group is given up for another one now."""
    late: str = ""
    """`held`, because a group of the newest revision missed its deadline."""
    stuck: str = ""
    """Why even groups that do not serve are kept: a successor may never start."""
    no_room: str = ""
    """Why there is no surge although the spec asks for one."""
    spent: str = ""
    """Which groups were given up for their restarts, if twice or more."""
    holds: bool = False
    """Routers hold requests while there is no group."""


def live(groups: Iterable[ObservedGroup]) -> list[ObservedGroup]:
    """Returns the groups that are not being deleted."""
    return [group for group in groups if not group.terminating]


def staying(groups: Iterable[ObservedGroup]) -> list[ObservedGroup]:
    """Returns the groups that are neither being deleted, nor draining, nor lost with a node."""
    return [group for group in live(groups) if group.draining is None and not group.lost]


def outdated(groups: Iterable[ObservedGroup], desired: Desired) -> list[ObservedGroup]:
    """Returns the remaining groups of an old revision to replace, in order of deletion: all but `partition` of them."""
    old = [group for group in in_order_of_deletion(staying(groups), desired.revision) if group.revision != desired.revision]
    return old[: max(len(old) - desired.partition, 0)]


def in_order_of_deletion(groups: Iterable[ObservedGroup], revision: str) -> list[ObservedGroup]:
    """Returns the groups in order of deletion: failing, without nodes, not ready; then those of an old revision, those on a
    cordoned node, those with the fewest tokens in their pages, the youngest."""
    youngest_first = sorted(groups, key=lambda group: (group.created, group.name), reverse=True)
    return sorted(
        youngest_first, key=lambda group: (_health(group), group.revision == revision, not group.cordoned, group.tokens)
    )


def _health(group: ObservedGroup) -> int:
    """Returns 0 while a pod fails, 1 while one has no node, 2 while one is not ready, 3 when it serves."""
    if group.ready:
        return 3
    if any(pod.reason and pod.node for pod in group.pods):
        return 0
    return 2 if group.pods and all(pod.node for pod in group.pods) else 1


def free_names(desired: Desired, groups: Iterable[ObservedGroup], count: int) -> list[str]:
    """Returns the first names that no group has, not even one that is being deleted."""
    taken = {group.name for group in groups}
    return [name for name in desired.names if name not in taken][:count]
