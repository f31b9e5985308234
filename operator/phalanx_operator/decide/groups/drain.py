"""Decides when a draining group may be deleted, and which groups routers must evacuate.

A group may be deleted when every router reports no stream on it and the group has no request, when no router exists, or after its
timeout. All state is in the group's annotation, so a new operator continues the drain.
"""

from collections.abc import Iterable, Sequence

from phalanx_operator.decide.state.actions import DeletePod, DrainGroup, GroupAction, KeepGroup, MarkLeader
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import ObservedGroup, age_s, changed

LAST_S = 10
"""Termination grace of a pod after the drain timeout: its streams end with an error event or continue elsewhere."""


START_S = 600.0
"""Longest start of a new group for which new requests are held."""
STRAGGLER_S, SETTLED_S = 60.0, 600.0
"""How long a group must be a straggler, and the least age of all groups, before a straggler is replaced."""


def assess(groups: Iterable[ObservedGroup], fleet: Fleet, timeout_s: float, now: str) -> tuple[ObservedGroup, ...]:
    """Returns the groups with router data: tokens in their pages, and whether draining ones may be deleted."""
    groups = tuple(groups)
    slow = _stragglers(groups, fleet, now)
    return tuple(
        changed(
            group,
            tokens=_tokens(group, fleet),
            slow=slow.get(group.name, ""),
            drained=why_over(group, fleet, timeout_s, now) if group.draining else "",
        )
        for group in groups
    )


def _stragglers(groups: Sequence[ObservedGroup], fleet: Fleet, now: str) -> dict[str, str]:
    """Returns the stragglers to replace, with the reason, by name."""
    ages = [age_s(group.created, now) for group in groups]
    if any(age is None or age < SETTLED_S for age in ages):
        return {}
    return {
        hotspot.group: f"a straggler for {STRAGGLER_S:.0f} s"
        for hotspot in fleet.hotspots
        if hotspot.cause == "straggler" and hotspot.action == "evacuate" and hotspot.since_s >= STRAGGLER_S
    }


def _tokens(group: ObservedGroup, fleet: Fleet) -> int:
    seen = fleet.groups.get(group.name)
    return seen.tokens if seen else 0


def why_over(group: ObservedGroup, fleet: Fleet, timeout_s: float, now: str) -> str:
    """Returns why a draining group may be deleted; empty while it may not."""
    if group.draining is None:
        return ""
    if not fleet.asked:
        return "no router could hold a stream"
    seen = fleet.groups.get(group.name)
    busy = seen is not None and seen.running + seen.waiting > 0
    if fleet.all_heard and group.name in fleet.emptied and not busy:
        return "it has no streams"
    age = age_s(group.draining.since, now)
    if age is None or age >= timeout_s:
        return f"the drain timeout of {timeout_s:.0f} s is over"
    return ""


def left_s(group: ObservedGroup, timeout_s: float, now: str) -> float | None:
    """Returns the seconds until its timeout; None for a group that is not draining."""
    if group.draining is None:
        return None
    age = age_s(group.draining.since, now)
    return max(timeout_s - age, 0.0) if age is not None else 0.0


def to_end(groups: Iterable[ObservedGroup], timeout_s: float, now: str) -> list[DeletePod]:
    """Returns pods of deleted groups past their drain timeout; LAST_S lets their streams end with an error event."""
    return [
        DeletePod(pod.name, pod.uid, LAST_S, f"the drain timeout of {timeout_s:.0f} s is over")
        for group in groups
        if group.terminating and left_s(group, timeout_s, now) == 0
        for pod in group.pods
        if pod.uid and not pod.hurried
    ]


def to_empty(groups: Iterable[ObservedGroup], actions: Iterable[GroupAction]) -> list[str]:
    """Returns the groups that routers must evacuate, most urgent first: groups that lose a pod, then draining ones."""
    actions = tuple(actions)
    draining = {action.uid for action in actions if isinstance(action, DrainGroup)}
    kept = {action.uid for action in actions if isinstance(action, KeepGroup)}
    losing, leaving = [], []
    for group in groups:
        if group.terminating or any(pod.leaving for pod in group.pods):
            losing.append(group.name)
        elif (group.draining or group.uid in draining) and group.uid not in kept:
            leaving.append(group.name)
    return sorted(losing) + sorted(leaving)


def for_good(groups: Iterable[ObservedGroup], empty: Iterable[str], revision: str, wanted: int) -> list[str]:
    """Returns the groups to evacuate that get no successor of their revision: neither the followed revision nor that of any
    remaining group, or no group is wanted.

    A group that only loses a pod returns with the same revision.
    """
    emptied, groups = frozenset(empty), tuple(groups)
    ending = [group for group in groups if group.terminating or group.draining]
    lasting = {revision, *(group.revision for group in groups if group not in ending)} if wanted else ()
    return sorted(group.name for group in ending if group.name in emptied and group.revision not in lasting)


def is_awaited(groups: Sequence[ObservedGroup], empty: Iterable[str], wanted: int, now: str) -> bool:
    """Returns whether no group accepts new requests but one will soon, so that requests are held.

    True while the only group drains for its successor and while that starts; false while a group that served is broken: its
    return is uncertain.
    """
    emptied = frozenset(empty)
    if not wanted or any(group.ready and group.name not in emptied for group in groups):
        return False
    ages = [age_s(group.created, now) for group in groups if not group.terminating]
    return any(group.name in emptied for group in groups) or any(age is not None and age < START_S for age in ages)


def marks(groups: Iterable[ObservedGroup], actions: Iterable[GroupAction]) -> list[MarkLeader]:
    """Returns changes of leader pods' labels, by which routers learn which groups are draining."""
    actions = tuple(actions)
    after = {action.uid: isinstance(action, DrainGroup) for action in actions if isinstance(action, DrainGroup | KeepGroup)}
    found = []
    for group in groups:
        leader = group.leader
        wanted = after.get(group.uid, group.draining is not None)
        if leader and leader.uid and not leader.leaving and not group.terminating and leader.marked != wanted:
            why = "its group is draining" if wanted else "its group stays"
            found.append(MarkLeader(group=group.name, pod=leader.name, uid=leader.uid, draining=wanted, why=why))
    return found
