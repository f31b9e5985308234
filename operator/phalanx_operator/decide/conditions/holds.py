"""The conditions `ControlPlanePartitioned` and `DisruptionsHeld`: true while groups are kept that would otherwise be replaced.

A common cause is likely, which successors would share: silent nodes, or many slow or restarting groups; or the clock has changed.
"""

from dataclasses import replace

from phalanx_api.conditions import ConditionType, Reason, drop_condition, set_condition
from phalanx_api.status import Status
from phalanx_operator.decide.state.snapshot import Hold, Snapshot


def with_partition_condition(status: Status, snapshot: Snapshot, now: str) -> Status:
    """Sets `ControlPlanePartitioned`, which is absent unless it is true."""
    why = snapshot.kept_reason
    hold = (
        Hold(Reason.NODES_SILENT, f"only a command, or a lower count of another client, deletes groups: {why}") if why else None
    )
    return _with_condition(status, "ControlPlanePartitioned", hold, snapshot, now)


def with_held_condition(status: Status, snapshot: Snapshot, now: str) -> Status:
    """Sets `DisruptionsHeld`, which is absent unless it is true. Of several reasons it has the first by name."""
    found = [group.assessment.hold for group in snapshot.groups if group.assessment.hold]
    holds = [replace(hold, why=f"{hold.why}; {_outcome(hold.reason, snapshot)}") for hold in found]
    if snapshot.clock_reason:
        holds = [Hold(Reason.CLOCK_CHANGED, f"{snapshot.clock_reason}: no age ends a group, a drain or a rollout")]
    return _with_condition(status, "DisruptionsHeld", min(holds, key=lambda hold: hold.reason, default=None), snapshot, now)


def _outcome(reason: Reason, snapshot: Snapshot) -> str:
    if snapshot.kept_reason:
        return "none is replaced during the partition"
    return "at most one at a time is replaced" if reason == Reason.RESTARTS_TOGETHER else "none is replaced"


def _with_condition(status: Status, kind: ConditionType, hold: Hold | None, snapshot: Snapshot, now: str) -> Status:
    if hold:
        conditions = set_condition(
            status.conditions, kind, True, reason=hold.reason, message=hold.why, generation=snapshot.generation, now=now
        )
    else:
        conditions = drop_condition(status.conditions, kind)
    return status.model_copy(update={"conditions": conditions})
