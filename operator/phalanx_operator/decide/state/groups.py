"""Desired groups, filters, and the order of deletion."""

from collections.abc import Iterable
from dataclasses import dataclass

from phalanx_operator.decide.state.snapshot import ObservedGroup


@dataclass(frozen=True, slots=True, kw_only=True)
class DesiredGroups:
    """Desired groups. Empty reasons do not apply."""

    revision: str
    replicas: int
    routers: int
    names: tuple[str, ...]
    """Deterministic, so that a retry after a lost response creates no second group."""
    max_unavailable: int = 1
    max_surge: int = 0
    partition: int = 0
    """Groups that keep their old revision."""
    paused: bool = False
    hold_reason: str = ""
    """Why no serving group is replaced."""
    late_reason: str = ""
    """Which group missed the progress deadline."""
    stuck_reason: str = ""
    """Why unready groups are kept too."""
    kept_reason: str = ""
    """Why only drained groups that a user asked to drain, and those above `num_kept`, are deleted: a partition."""
    num_kept: int = 0
    """In a partition, the least number of groups that stay."""
    no_surge_reason: str = ""
    spent_reason: str = ""
    """Which groups exceeded their restart budget."""
    holds_requests: bool = False
    wants_https: bool = False
    """Routers serve HTTPS."""
    path: str = ""
    """Of the API at the routers; empty: `/`."""


def are_together(count: int, total: int) -> bool:
    """Returns whether a common cause is likely: at least 2 of the groups are affected, and more than a third."""
    return count >= 2 and 3 * count > total


def live_groups(groups: Iterable[ObservedGroup]) -> list[ObservedGroup]:
    """Returns the groups that are not terminating."""
    return [group for group in groups if not group.terminating]


def staying_groups(groups: Iterable[ObservedGroup]) -> list[ObservedGroup]:
    """Returns the live groups that are neither draining nor lost."""
    return [group for group in live_groups(groups) if group.draining is None and not group.assessment.lost_reason]


def outdated_groups(groups: Iterable[ObservedGroup], desired: DesiredGroups) -> list[ObservedGroup]:
    """Returns staying groups of old revisions, without the `partition`, in order of deletion."""
    old = [group for group in deletion_order(staying_groups(groups), desired.revision) if group.revision != desired.revision]
    return old[: max(len(old) - desired.partition, 0)]


def deletion_order(groups: Iterable[ObservedGroup], revision: str) -> list[ObservedGroup]:
    """Sorts failing, unplaced, unready, kept, silent, old, cordoned groups first; then by KV tokens and age."""
    youngest_first = sorted(groups, key=lambda group: (group.created, group.name), reverse=True)
    return sorted(
        youngest_first,
        key=lambda group: (
            *(_health_rank(group), group.revision == revision),
            *(not group.assessment.has_cordoned_node, group.assessment.kv_tokens),
        ),
    )


def _health_rank(group: ObservedGroup) -> int:
    """Failing, unplaced, unready, kept in a partition, serving on a silent node, ready."""
    if group.is_spared:
        return 5 if group.ready else 4 if group.alive else 3
    if any(pod.reason and pod.node for pod in group.pods):
        return 0
    return 2 if group.pods and all(pod.node for pod in group.pods) else 1


def free_names(desired: DesiredGroups, groups: Iterable[ObservedGroup], count: int) -> list[str]:
    """Returns the first `count` names that no group has."""
    taken = {group.name for group in groups}
    return [name for name in desired.names if name not in taken][:count]
