"""Decides which reconciles and status writes may wait, so that a starting service costs few of them, not one per pod.

A reconcile waits CALM_S after changes that rarely decide anything: a new object, a pod or router that became ready. A status
write waits until PACE_S after the last one if only counters changed. Conditions and the operator's own state are written at once.
"""

from dataclasses import replace

from phalanx_api.status import GroupStatus, Status
from phalanx_operator.decide.state.snapshot import ObservedDeployment, ObservedPod

CALM_S = 1.0
PACE_S = 1.0
_COUNTED = frozenset(
    ("replicas", "ready_replicas", "available_replicas", "updated_replicas", "draining_replicas", "groups", "conditions")
)


def is_calm(former: object, now: object) -> bool:
    """Returns whether the reconcile after this change may wait. None stands for an object that does not exist."""
    if former is None or now is None:
        return now is not None
    if isinstance(former, ObservedDeployment) and isinstance(now, ObservedDeployment):
        there, router = now.router, former.router
        counted = replace(router, updated=there.updated, ready=there.ready, current=there.current)
        comes_up = there.ready >= router.ready and there.updated >= router.updated and there.current >= router.current
        return comes_up and now == replace(former, router=counted)
    if not (isinstance(former, ObservedPod) and isinstance(now, ObservedPod)):
        return False
    return now.ready and not former.ready and (now.node, now.uid) == (former.node, former.uid)


def may_wait(before: Status, after: Status) -> bool:
    """Returns whether the status differs only in counts of groups and pods that start."""
    lasting = [field for field in Status.model_fields if field not in _COUNTED]
    if any(getattr(before, field) != getattr(after, field) for field in lasting):
        return False
    if [(c.type, c.status, c.reason, c.observed_generation) for c in before.conditions] != [
        (c.type, c.status, c.reason, c.observed_generation) for c in after.conditions
    ]:
        return False
    known = {group.name: _told(group) for group in before.groups}
    return all(known.get(group.name, _NOTHING) == _told(group) for group in after.groups)


def _told(group: GroupStatus) -> tuple[bool, str, int, int]:
    """Returns the fields of a group that are more than a count."""
    return group.phase in ("Draining", "Terminating"), group.reason, group.restarts, group.incarnation


_NOTHING = (False, "", 0, 0)
