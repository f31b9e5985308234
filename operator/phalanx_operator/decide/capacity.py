"""Whether every group that is wanted has its nodes: the condition `CapacityAvailable`."""

from phalanx_api.conditions import Reason, set_condition
from phalanx_api.status import Status
from phalanx_operator.decide.admission import Turn
from phalanx_operator.decide.groups import live
from phalanx_operator.decide.snapshot import Snapshot

WAITING = ("Unschedulable", "SchedulingGated")


def told(status: Status, snapshot: Snapshot, waits: Turn, now: str) -> Status:
    """The status with what the scheduler, or the wait for a turn, says. `waits`: what keeps groups from being made, if so."""
    reason, message = _verdict(snapshot, waits)
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


def _verdict(snapshot: Snapshot, waits: Turn) -> tuple[Reason, str]:
    pods = [pod for group in live(snapshot.groups) for pod in group.pods if not pod.node and pod.reason in WAITING]
    for pod in pods:
        if pod.reason == "Unschedulable":
            return Reason.UNSCHEDULABLE, f"pod {pod.name}: {pod.message}"
    if pods:
        return Reason.GANG_WAITING, f"pod {pods[0].name}: {pods[0].message}"
    if waits.told:
        return Reason.GANG_WAITING, waits.why
    return Reason.SCHEDULED, ""
