"""Decides when a draining group may be deleted, and which groups routers must evacuate.

A group may be deleted without streams and requests, without routers, or after its timeout. All state is in its annotation.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from phalanx_api.conditions import Reason
from phalanx_operator.decide.state.actions import DeletePod, DrainGroup, GroupAction, KeepGroup, MarkLeader
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import are_together, live_groups
from phalanx_operator.decide.state.snapshot import DrainMark, Hold, ObservedGroup, age_s, with_assessment

FINAL_GRACE_S = 10
"""After the drain timeout: streams end with an error event or continue elsewhere."""
START_TIMEOUT_S = 600.0
"""Age of a starting group up to which requests are held."""
STRAGGLER_S = 60.0
SETTLED_S = 600.0
"""Least age of the wanted number of groups before a straggler is replaced. A successor that is one more may be younger."""


def assess(
    groups: Iterable[ObservedGroup], fleet: Fleet, timeout_s: float, now: str, *, replicas: int
) -> tuple[ObservedGroup, ...]:
    """Sets KV tokens, stragglers and drained groups."""
    groups = tuple(groups)
    stragglers = _stragglers(groups, fleet, replicas, now)
    hold = _hold(stragglers, groups)
    return tuple(
        with_assessment(
            group,
            hold=group.assessment.hold or (hold if group.name in stragglers else None),
            kv_tokens=fleet.groups[group.name].load.kv_tokens if group.name in fleet.groups else 0,
            straggler_reason="" if hold else stragglers.get(group.name, ""),
            drained_reason=drained_reason(group, fleet, timeout_s, now) if group.draining else "",
        )
        for group in groups
    )


def _stragglers(groups: Sequence[ObservedGroup], fleet: Fleet, replicas: int, now: str) -> dict[str, str]:
    ages = sorted((age_s(group.created, now) or 0.0 for group in groups), reverse=True)
    if any(age < SETTLED_S for age in ages[:replicas]):
        return {}
    return {
        hotspot.group: f"a straggler for {STRAGGLER_S:.0f} s"
        for hotspot in fleet.hotspots
        if hotspot.cause == "straggler" and hotspot.action == "evacuate" and hotspot.since_s >= STRAGGLER_S
    }


def _hold(stragglers: Mapping[str, str], groups: Sequence[ObservedGroup]) -> Hold | None:
    """Returns why no straggler is replaced: successors would be as slow."""
    staying = [group for group in live_groups(groups) if group.draining is None]
    count = sum(group.name in stragglers for group in staying)
    if not are_together(count, len(staying)):
        return None
    return Hold(Reason.STRAGGLERS_TOGETHER, f"{count} of {len(staying)} groups are stragglers")


def drained_reason(group: ObservedGroup, fleet: Fleet, timeout_s: float, now: str) -> str:
    """Returns why a draining group may be deleted."""
    if group.draining is None:
        return ""
    if not fleet.polled and not group.assessment.kept_reason:
        return "no router could hold a stream"
    report = fleet.groups.get(group.name)
    is_busy = report is not None and report.load.running + report.load.waiting > 0
    if fleet.is_complete and group.name in fleet.evacuated and not is_busy:
        return "it has no streams"
    age = age_s(group.draining.since, now)
    if age is None or age >= timeout_s:
        return f"the drain timeout of {timeout_s:.0f} s is over"
    return ""


def due_in_s(group: ObservedGroup, timeout_s: float, now: str) -> float | None:
    """Returns the seconds until the drain timeout."""
    if group.draining is None:
        return None
    age = age_s(group.draining.since, now)
    return max(timeout_s - age, 0.0) if age is not None else 0.0


def requested(groups: Iterable[ObservedGroup], fleet: Fleet, now: str) -> list[DrainGroup]:
    """Returns the drains that users of a console request, except of groups that were created since.

    A successor may have the name of the group that was drained.
    """
    return [
        DrainGroup(name=group.name, uid=group.uid, why="requested in the console", purpose="asked")
        for group in groups
        if group.name in fleet.drain_requests
        and (age_s(group.created, now) or 0.0) > fleet.drain_requests[group.name]
        and not (group.draining or group.terminating)
    ]


def with_marks(groups: Iterable[ObservedGroup], drains: Iterable[DrainGroup], now: str) -> tuple[ObservedGroup, ...]:
    """Returns the groups as they are after these drains begin."""
    marks = {drain.uid: DrainMark(now, drain.why, drain.purpose) for drain in drains}
    return tuple(replace(group, draining=marks[group.uid]) if group.uid in marks else group for group in groups)


def pods_to_delete(groups: Iterable[ObservedGroup], timeout_s: float, now: str) -> list[DeletePod]:
    """Returns the pods of terminating groups past their drain timeout."""
    return [
        DeletePod(pod.name, pod.uid, FINAL_GRACE_S, f"the drain timeout of {timeout_s:.0f} s is over")
        for group in groups
        if group.terminating and due_in_s(group, timeout_s, now) == 0
        for pod in group.pods
        if pod.uid and not pod.has_short_grace
    ]


def groups_to_evacuate(groups: Iterable[ObservedGroup], actions: Iterable[GroupAction]) -> list[str]:
    """Returns the groups that lose a pod, then draining ones. In a partition, evicted pods on silent nodes may still serve."""
    actions = tuple(actions)
    drained = {action.uid for action in actions if isinstance(action, DrainGroup)}
    kept = {action.uid for action in actions if isinstance(action, KeepGroup)}
    losing_pods, draining = [], []
    for group in groups:
        if group.terminating or (any(pod.terminating for pod in group.pods) and not group.assessment.kept_reason):
            losing_pods.append(group.name)
        elif (group.draining or group.uid in drained) and group.uid not in kept:
            draining.append(group.name)
    return sorted(losing_pods) + sorted(draining)


def groups_without_successor(groups: Iterable[ObservedGroup], evacuate: Iterable[str], revision: str, replicas: int) -> list[str]:
    """Returns the evacuated groups without a successor of their revision. A group that only loses a pod returns."""
    evacuated, groups = frozenset(evacuate), tuple(groups)
    ending = [group for group in groups if group.terminating or group.draining]
    lasting = {revision, *(group.revision for group in groups if group not in ending)} if replicas else ()
    return sorted(group.name for group in ending if group.name in evacuated and group.revision not in lasting)


def is_awaited(groups: Sequence[ObservedGroup], evacuate: Iterable[str], replicas: int, now: str) -> bool:
    """Returns whether no group accepts requests but one will soon.

    False while a group is broken, because its return is uncertain.
    """
    evacuated = frozenset(evacuate)
    if not replicas or any(group.alive and group.name not in evacuated for group in groups):
        return False
    ages = [age_s(group.created, now) for group in groups if not group.terminating]
    return any(group.name in evacuated for group in groups) or any(age is not None and age < START_TIMEOUT_S for age in ages)


def leader_marks(groups: Iterable[ObservedGroup], actions: Iterable[GroupAction]) -> list[MarkLeader]:
    """Returns leader pods with an annotation that differs from their group's."""
    actions = tuple(actions)
    after = {action.uid: isinstance(action, DrainGroup) for action in actions if isinstance(action, DrainGroup | KeepGroup)}
    marks = []
    for group in groups:
        leader = group.leader
        draining = after.get(group.uid, group.draining is not None)
        if not leader or not leader.uid or leader.terminating or group.terminating:
            continue
        if leader.is_marked_draining != draining:
            why = "its group is draining" if draining else "its group stays"
            marks.append(MarkLeader(group=group.name, pod=leader.name, uid=leader.uid, draining=draining, why=why))
    return marks
