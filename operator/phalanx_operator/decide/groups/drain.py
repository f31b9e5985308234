"""When a group that is being emptied may go, and which groups routers are to take streams off.

A group may go when every router says that it holds no stream of it and the group itself has none; when there is no router that
could hold one; or when its time is over. What is noted on the group is all that this rests on, so a new operator goes on with it.
"""

from collections.abc import Iterable, Sequence

from phalanx_operator.decide.state.actions import DeletePod, DrainGroup, GroupAction, KeepGroup, MarkLeader
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import ObservedGroup, age_s, changed

LAST_S = 10
"""Grace of a pod whose streams had their time: they end with an error event, or go on elsewhere."""


START_S = 600.0
"""How long a new group may take until newcomers are not held for it any more."""
STRAGGLER_S, SETTLED_S = 60.0, 600.0
"""For how long a group must be far too slow, and for how long no group may be younger: replacing one must not become a habit."""


def assess(groups: Iterable[ObservedGroup], fleet: Fleet, timeout_s: float, now: str) -> tuple[ObservedGroup, ...]:
    """The groups with what routers say of them: tokens in their pages, and whether those that are being emptied may go."""
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
    """Why groups should be replaced that routers want to see evacuated, by name."""
    ages = [age_s(group.created, now) for group in groups]
    if any(age is None or age < SETTLED_S for age in ages):
        return {}
    return {
        hotspot.group: f"far slower than its equals for {STRAGGLER_S:.0f} s"
        for hotspot in fleet.hotspots
        if hotspot.cause == "straggler" and hotspot.action == "evacuate" and hotspot.since_s >= STRAGGLER_S
    }


def _tokens(group: ObservedGroup, fleet: Fleet) -> int:
    seen = fleet.groups.get(group.name)
    return seen.tokens if seen else 0


def why_over(group: ObservedGroup, fleet: Fleet, timeout_s: float, now: str) -> str:
    """Why a group that is being emptied may go; empty while it may not."""
    if group.draining is None:
        return ""
    if not fleet.asked:
        return "there is no router that could hold a stream"
    seen = fleet.groups.get(group.name)
    busy = seen is not None and seen.running + seen.waiting > 0
    if fleet.all_heard and group.name in fleet.emptied and not busy:
        return "it holds no stream"
    age = age_s(group.draining.since, now)
    if age is None or age >= timeout_s:
        return f"its streams had {timeout_s:.0f} s"
    return ""


def left_s(group: ObservedGroup, timeout_s: float, now: str) -> float | None:
    """Seconds until its time is over; None for a group that is not being emptied."""
    if group.draining is None:
        return None
    age = age_s(group.draining.since, now)
    return max(timeout_s - age, 0.0) if age is not None else 0.0


def to_end(groups: Iterable[ObservedGroup], timeout_s: float, now: str) -> list[DeletePod]:
    """Pods of groups that are being deleted after their streams had their time: they have LAST_S to say so to what is left."""
    return [
        DeletePod(pod.name, pod.uid, LAST_S, f"its streams had {timeout_s:.0f} s")
        for group in groups
        if group.terminating and left_s(group, timeout_s, now) == 0
        for pod in group.pods
        if pod.uid and not pod.hurried
    ]


def to_empty(groups: Iterable[ObservedGroup], actions: Iterable[GroupAction]) -> list[str]:
    """Groups that routers are to take streams off, the most urgent first: those that lose a pod, then those being emptied."""
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
    """Groups to be emptied that get no successor of their revision: of another one than is followed, and than groups have that
    stay, or when none is wanted.

    A group that only loses a pod comes back as it was.
    """
    emptied, groups = frozenset(empty), tuple(groups)
    ending = [group for group in groups if group.terminating or group.draining]
    lasting = {revision, *(group.revision for group in groups if group not in ending)} if wanted else ()
    return sorted(group.name for group in ending if group.name in emptied and group.revision not in lasting)


def is_awaited(groups: Sequence[ObservedGroup], empty: Iterable[str], wanted: int, now: str) -> bool:
    """Whether no group takes newcomers but one will soon: they are worth holding.

    So it is while the only group is emptied for its successor, and while that starts; not while a group that served is broken,
    for nobody knows when it comes back.
    """
    emptied = frozenset(empty)
    if not wanted or any(group.ready and group.name not in emptied for group in groups):
        return False
    ages = [age_s(group.created, now) for group in groups if not group.terminating]
    return any(group.name in emptied for group in groups) or any(age is not None and age < START_S for age in ages)


def marks(groups: Iterable[ObservedGroup], actions: Iterable[GroupAction]) -> list[MarkLeader]:
    """What is to be changed on leader pods, so that routers that watch see which groups are being emptied."""
    actions = tuple(actions)
    after = {action.uid: isinstance(action, DrainGroup) for action in actions if isinstance(action, DrainGroup | KeepGroup)}
    found = []
    for group in groups:
        leader = group.leader
        wanted = after.get(group.uid, group.draining is not None)
        if leader and leader.uid and not leader.leaving and not group.terminating and leader.marked != wanted:
            why = "its group is being emptied" if wanted else "its group stays"
            found.append(MarkLeader(group.name, leader.name, leader.uid, wanted, why))
    return found
