"""The condition `CapacityAvailable`: every wanted group has its nodes."""

from collections.abc import Iterable

from phalanx_api.conditions import Reason, set_condition
from phalanx_api.status import Status
from phalanx_operator.decide.conditions.status import is_quota
from phalanx_operator.decide.groups.admission import PlacementTurn
from phalanx_operator.decide.state.groups import live
from phalanx_operator.decide.state.snapshot import ObservedGroup, Snapshot, age_s

WAITING = ("Unschedulable", "SchedulingGated")
MISSING_S = 10.0
"""How long a pod may be missing: the StatefulSet controller creates an admitted pod within a moment."""


def with_capacity_condition(status: Status, snapshot: Snapshot, waits: PlacementTurn, ungated: str, now: str) -> Status:
    """Returns the status with the condition. `waits`: what keeps groups from being created; `ungated`: why a PodGroup could not
    be created."""
    reason, message = _verdict(snapshot, waits, ungated, now)
    conditions = set_condition(
        status.conditions,
        "CapacityAvailable",
        reason is Reason.SCHEDULED,
        reason=reason,
        message=message,
        generation=snapshot.generation,
        now=now,
    )
    return status.model_copy(update={"conditions": conditions})


def left_s(groups: Iterable[ObservedGroup], now: str) -> float | None:
    """Returns the seconds until a missing pod exceeds its time; None if no pod is missing or all have exceeded it."""
    ages = [age for group in live(groups) if group.short_since and (age := age_s(group.short_since, now)) is not None]
    return min((MISSING_S - age for age in ages if age < MISSING_S), default=None)


def _verdict(snapshot: Snapshot, waits: PlacementTurn, ungated: str, now: str) -> tuple[Reason, str]:
    for group in live(snapshot.groups):
        if is_quota(group.refused):
            return Reason.QUOTA_EXCEEDED, f"group {group.name}: {group.refused}"
    pods = [pod for group in live(snapshot.groups) for pod in group.pods if not pod.node and pod.reason in WAITING]
    if ungated and any(not pod.node for group in live(snapshot.groups) for pod in group.pods):
        return Reason.GANG_WAITING, ungated  # the scheduler only reports that it waits for it
    for pod in pods:
        if pod.reason == "Unschedulable":
            return Reason.UNSCHEDULABLE, f"pod {pod.name}: {pod.message}"
    if pods:
        return Reason.GANG_WAITING, f"pod {pods[0].name}: {pods[0].message}"
    for group in live(snapshot.groups):
        missing_s = age_s(group.short_since, now) if group.short_since else None
        if missing_s is not None and missing_s >= MISSING_S:
            words = group.refused or f"kubectl describe statefulset {group.name}"
            return Reason.REJECTED, f"group {group.name} has {len(group.pods)} of {group.size} pods: {words}"
    if waits.told:
        return Reason.GANG_WAITING, waits.why
    return Reason.SCHEDULED, ""
