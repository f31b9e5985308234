"""The conditions `ControlPlanePartitioned` and `DisruptionsHeld`: true while groups are kept because many fail together.

A common cause is likely then, which successors would share: silent nodes, slow or restarting groups, a changed clock.
"""

from phalanx_api.conditions import ConditionType, Reason, drop_condition, set_condition
from phalanx_api.status import Status
from phalanx_operator.decide.state.snapshot import Snapshot


def with_partition_condition(status: Status, snapshot: Snapshot, now: str) -> Status:
    """Sets `ControlPlanePartitioned`, which is absent unless it is true."""
    why = next((group.assessment.kept_reason for group in snapshot.groups if group.assessment.kept_reason), "")
    message = f"no group or pod is deleted or restarted for its node: {why}" if why else ""
    return _with_condition(status, "ControlPlanePartitioned", Reason.NODES_SILENT, message, snapshot=snapshot, now=now)


def with_held_condition(status: Status, snapshot: Snapshot, now: str) -> Status:
    """Sets `DisruptionsHeld`, which is absent unless it is true."""
    hold = next((group.assessment.hold for group in snapshot.groups if group.assessment.hold), None)
    reason, message = (hold.reason, hold.why) if hold else (Reason.CLOCK_CHANGED, "")
    return _with_condition(status, "DisruptionsHeld", reason, message, snapshot=snapshot, now=now)


def _with_condition(status: Status, kind: ConditionType, reason: Reason, message: str, *, snapshot: Snapshot, now: str) -> Status:
    if message:
        conditions = set_condition(
            status.conditions, kind, True, reason=reason, message=message, generation=snapshot.generation, now=now
        )
    else:
        conditions = drop_condition(status.conditions, kind)
    return status.model_copy(update={"conditions": conditions})
