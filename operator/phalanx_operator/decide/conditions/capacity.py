"""The condition `CapacityAvailable`: every wanted group has its nodes."""

from collections.abc import Iterable

from phalanx_api.conditions import Reason, set_condition
from phalanx_api.status import Status
from phalanx_operator.decide.conditions.status import is_quota_error
from phalanx_operator.decide.groups.admission import PlacementTurn
from phalanx_operator.decide.state.groups import live_groups
from phalanx_operator.decide.state.snapshot import ObservedGroup, Snapshot, age_s

WAITING_REASONS = ("Unschedulable", "SchedulingGated")
MISSING_S = 10.0
"""Time after which a missing pod is reported."""


def with_capacity_condition(status: Status, snapshot: Snapshot, turn: PlacementTurn, gang_error: str, now: str) -> Status:
    """Sets the condition. `gang_error`: why a PodGroup could not be created."""
    reason, message = _verdict(snapshot, turn, gang_error, now)
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


def due_in_s(groups: Iterable[ObservedGroup], now: str) -> float | None:
    """Returns the seconds until the next missing pod is reported."""
    ages = [
        age for group in live_groups(groups) if group.incomplete_since and (age := age_s(group.incomplete_since, now)) is not None
    ]
    return min((MISSING_S - age for age in ages if age < MISSING_S), default=None)


def _verdict(snapshot: Snapshot, turn: PlacementTurn, gang_error: str, now: str) -> tuple[Reason, str]:
    groups = live_groups(snapshot.groups)
    for group in groups:
        if is_quota_error(group.rejection):
            return Reason.QUOTA_EXCEEDED, f"group {group.name}: {group.rejection}"
    unplaced = [pod for group in groups for pod in group.pods if not pod.node]
    if gang_error and unplaced:
        return Reason.GANG_WAITING, gang_error  # more precise than the scheduler
    waiting = [pod for pod in unplaced if pod.reason in WAITING_REASONS]
    for pod in waiting:
        if pod.reason == "Unschedulable":
            return Reason.UNSCHEDULABLE, f"pod {pod.name}: {pod.message}"
    if waiting:
        return Reason.GANG_WAITING, f"pod {waiting[0].name}: {waiting[0].message}"
    for group in groups:
        missing_s = age_s(group.incomplete_since, now) if group.incomplete_since else None
        if missing_s is not None and missing_s >= MISSING_S:
            detail = group.rejection or f"kubectl describe statefulset {group.name}"
            return Reason.REJECTED, f"group {group.name} has {len(group.pods)} of {group.size} pods: {detail}"
    if turn.is_reported:
        return Reason.GANG_WAITING, turn.why
    return Reason.SCHEDULED, ""
