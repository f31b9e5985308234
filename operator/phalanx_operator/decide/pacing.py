"""Decides which reconciles and status writes may wait, so that a start does not cost one per pod."""

from dataclasses import replace

from phalanx_api.status import GroupStatus, Status
from phalanx_operator.decide.state.snapshot import ObservedDeployment, ObservedPod

DEFER_S = 1.0
"""Delay of a reconcile that may wait."""
WRITE_INTERVAL_S = 1.0
"""Least time between status writes that may wait."""
_COUNTERS = frozenset(
    ("replicas", "ready_replicas", "available_replicas", "updated_replicas", "draining_replicas", "groups", "conditions")
)
_NEW_GROUP = (False, "", 0, 0)


def is_deferrable(former: object, now: object) -> bool:
    """Returns whether the change is a new object, a pod that became ready, or risen counts of a Deployment."""
    if former is None or now is None:
        return now is not None
    if isinstance(former, ObservedDeployment) and isinstance(now, ObservedDeployment):
        before, after = former.router, now.router
        counted = replace(before, updated=after.updated, ready=after.ready, is_current=after.is_current)
        rises = after.ready >= before.ready and after.updated >= before.updated and after.is_current >= before.is_current
        return rises and now == replace(former, router=counted)
    if not (isinstance(former, ObservedPod) and isinstance(now, ObservedPod)):
        return False
    return now.ready and not former.ready and (now.node, now.uid) == (former.node, former.uid)


def can_defer_write(before: Status, after: Status) -> bool:
    """Returns whether the status differs only in counters, condition messages and starting groups."""
    lasting = [field for field in Status.model_fields if field not in _COUNTERS]
    if any(getattr(before, field) != getattr(after, field) for field in lasting):
        return False
    if [(c.type, c.status, c.reason, c.observed_generation) for c in before.conditions] != [
        (c.type, c.status, c.reason, c.observed_generation) for c in after.conditions
    ]:
        return False
    former = {group.name: _lasting_fields(group) for group in before.groups}
    return all(former.get(group.name, _NEW_GROUP) == _lasting_fields(group) for group in after.groups)


def _lasting_fields(group: GroupStatus) -> tuple[bool, str, int, int]:
    return group.phase in ("Draining", "Terminating"), group.reason, group.restarts, group.incarnation
