"""The condition `ControlPlanePartitioned`: true while groups on silent nodes are kept because many nodes are silent."""

from phalanx_api.conditions import Reason, drop_condition, set_condition
from phalanx_api.status import Status
from phalanx_operator.decide.state.snapshot import Snapshot


def with_partition_condition(status: Status, snapshot: Snapshot, now: str) -> Status:
    """Sets the condition, which is absent unless it is true."""
    why = next((group.assessment.kept_reason for group in snapshot.groups if group.assessment.kept_reason), "")
    if why:
        conditions = set_condition(
            status.conditions,
            "ControlPlanePartitioned",
            True,
            reason=Reason.NODES_SILENT,
            message=f"no group or pod is deleted or restarted for its node: {why}",
            generation=snapshot.generation,
            now=now,
        )
    else:
        conditions = drop_condition(status.conditions, "ControlPlanePartitioned")
    return status.model_copy(update={"conditions": conditions})
