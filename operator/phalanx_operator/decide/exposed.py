"""What the status says where clients from outside cannot come in as the spec asks: `spec.router.expose`."""

from phalanx_api.conditions import ConditionType, Reason, drop_condition, find_condition
from phalanx_api.status import Status
from phalanx_operator.decide.overrule import overruled
from phalanx_operator.decide.state.snapshot import Snapshot


def with_exposure_condition(status: Status, why: str, snapshot: Snapshot, now: str) -> Status:
    """The status with why the Ingress or HTTPRoute could not be made; unchanged where it could, or none is wanted.

    The service serves in the cluster all the same, so only what says that all is as asked for says so no more.
    """
    if not why:
        return status
    conditions = drop_condition(status.conditions, "Reconciling")  # though groups may come and go: a person must act
    message = f"spec.router.expose: {why}"[:1024]
    ready = find_condition(conditions, "Ready")
    verdicts: list[tuple[ConditionType, bool]] = [("RouterReady", False)]
    verdicts += [("Ready", False)] if ready and ready.status == "True" else []
    verdicts += [("Stalled", True)] if find_condition(conditions, "Stalled") is None else []
    for kind, is_true in verdicts:
        conditions = overruled(conditions, kind, is_true, Reason.REJECTED, message, snapshot, now)
    return status.model_copy(update={"conditions": conditions})
