"""Which groups must exist, and which one goes first when there are too many."""

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx_operator.decide.state.snapshot import ObservedGroup


@dataclass(frozen=True, slots=True)
class Desired:
    """How many groups, of which revision, how many routers, and the names that new groups take.

    `names` are for groups of this revision only, at least as many as there may ever be, always the same ones for the same service
    and revision: a retry after a lost answer takes the same name again, and so makes no second group.
    max_unavailable, max_surge: of a rollout, in groups. partition: groups that stay on their old revision. paused: no group is
    replaced for its revision. held: why no group that serves is given up for another one now, if so; late: because a group of the
    newest revision should be ready by now; stuck: because nobody knows that a successor will come, so that even one that does not
    serve is kept. no_room: why there is no surge although the spec asks for one, if so.
    spent: of which groups were given up for their restarts, if that was twice or more. holds: routers hold requests while
    there is no group.
    """

    revision: str
    replicas: int
    routers: int
    names: tuple[str, ...]
    max_unavailable: int = 1
    max_surge: int = 0
    partition: int = 0
    paused: bool = False
    held: str = ""
    late: str = ""
    stuck: str = ""
    no_room: str = ""
    spent: str = ""
    holds: bool = False


def live(groups: Iterable[ObservedGroup]) -> list[ObservedGroup]:
    """The groups that are not being deleted."""
    return [group for group in groups if not group.terminating]


def staying(groups: Iterable[ObservedGroup]) -> list[ObservedGroup]:
    """The groups that are neither being deleted nor being emptied, nor lost with a node."""
    return [group for group in live(groups) if group.draining is None and not group.lost]


def outdated(groups: Iterable[ObservedGroup], desired: Desired) -> list[ObservedGroup]:
    """The groups of an old revision that stay and are to be replaced, in order of deletion: all but `partition` of them."""
    old = [group for group in in_order_of_deletion(staying(groups), desired.revision) if group.revision != desired.revision]
    return old[: max(len(old) - desired.partition, 0)]


def in_order_of_deletion(groups: Iterable[ObservedGroup], revision: str) -> list[ObservedGroup]:
    """Groups as they would be given up: those that fail, that have no node, that are not ready; then those of an old revision,
    those on a node that is being given up; then those with the fewest tokens in their pages; then the youngest."""
    youngest_first = sorted(groups, key=lambda group: (group.created, group.name), reverse=True)
    return sorted(
        youngest_first, key=lambda group: (_health(group), group.revision == revision, not group.cordoned, group.tokens)
    )


def _health(group: ObservedGroup) -> int:
    """0 while a pod fails, 1 while one has no node, 2 while one is not ready, 3 when it serves."""
    if group.ready:
        return 3
    if any(pod.reason and pod.node for pod in group.pods):
        return 0
    return 2 if group.pods and all(pod.node for pod in group.pods) else 1


def free_names(desired: Desired, groups: Iterable[ObservedGroup], count: int) -> list[str]:
    """The first names that no group has, not even one that is being deleted."""
    taken = {group.name for group in groups}
    return [name for name in desired.names if name not in taken][:count]
