"""What may wait a moment, so that a service whose groups come up costs a few looks and status writes, not one for each pod.

A look waits for CALM_S where what changed decides little: an object that is new, a pod or a router that has become ready; a
rollout goes on that much later. A status write waits until PACE_S after the last one where it only counts on. Conditions, and
all that the operator remembers in the status, are written at once.
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
    """Whether a change of a child may be looked at a moment later. None stands for an object that is not there."""
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
    """Whether what is new of a status only counts groups and pods that come up."""
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
    """What of a group is more than a count: that it goes, why it does not serve, and how often it began."""
    return group.phase in ("Draining", "Terminating"), group.reason, group.restarts, group.incarnation


_NOTHING = (False, "", 0, 0)
