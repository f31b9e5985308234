"""Decides when a rollout rolls back to the former revision (`rollout.onFailure: Rollback`), and its status.

    newest revision misses its deadline, or two of its
    groups exceed their restart budget                       recorded in the status: it is given up
    recorded, former revision stored                         groups follow it, without `partition` and `paused`
    recorded, former revision not stored                     no group is created or replaced
    spec changes, or `onFailure: Pause`                      the record is removed

`render.revision` stores the last revision that was rolled out completely.
"""

from dataclasses import dataclass, replace

from phalanx_api.conditions import ConditionType, Reason, drop_condition, find_condition
from phalanx_api.spec.inference_service import InferenceService, Spec
from phalanx_api.status import RollbackStatus, Status
from phalanx_operator.decide.groups import progress, recovery
from phalanx_operator.decide.state.groups import DesiredGroups, staying_groups
from phalanx_operator.decide.state.snapshot import Snapshot, override_condition

NO_RECORD = "no revision that was rolled out completely with spec.rollout.onFailure Rollback is stored"
_HEALTHY: tuple[ConditionType, ...] = ("Ready", "Progressing")


@dataclass(frozen=True, slots=True, kw_only=True)
class EffectiveService:
    """The service that groups follow."""

    service: InferenceService
    revision: str
    rollback: RollbackStatus | None = None
    """Set while the newest revision is given up."""
    blocked_reason: str = ""
    """Why a due rollback is impossible."""


def due_rollback(snapshot: Snapshot, revision: str, spec: Spec, now: str) -> RollbackStatus | None:
    """Returns the rollback if this revision is given up."""
    former, rollout = snapshot.status.rollback, spec.rollout
    if rollout.on_failure != "Rollback":
        return None
    if former and former.revision == revision:
        return former
    if snapshot.clock_reason:
        return None
    target, why = snapshot.status.current_revision, progress.deadline_failure(snapshot.groups, revision, spec, now)
    status = recovery.recovery_status(snapshot.status.recovery, snapshot.groups, revision, spec.restart_policy, now)
    if not why and status and status.given_up > 1:
        why = status.message  # its groups never run long enough to miss the deadline
    if not why or not target or target == revision:
        return None
    return RollbackStatus(revision=revision, to=target, message=why[:512], since=now)


def effective_service(
    newest: InferenceService, revision: str, snapshot: Snapshot, rollback: RollbackStatus | None, former: InferenceService | None
) -> EffectiveService:
    """Returns the service to follow. `former`: of `rollback.to`, if stored."""
    if rollback is None:
        return EffectiveService(service=newest, revision=revision)
    if former:
        return EffectiveService(service=_ignore_rollout(former, is_former=True), revision=rollback.to, rollback=rollback)
    if snapshot.status.rollback != rollback:  # it has not started
        return EffectiveService(service=newest, revision=revision, blocked_reason=NO_RECORD)
    service = _ignore_rollout(newest, is_former=False)
    return EffectiveService(service=service, revision=revision, rollback=rollback, blocked_reason=NO_RECORD)


def _ignore_rollout(service: InferenceService, *, is_former: bool) -> InferenceService:
    """Drops partition, pause and canary."""
    rollout = service.spec.rollout
    changes: dict[str, object] = {"partition": 0, "paused": False} if is_former else {}
    if rollout.canary_weight is not None:
        changes["canary_weight"] = 100 if is_former else 0
    spec = service.spec.model_copy(update={"rollout": rollout.model_copy(update=changes)})
    return replace(service, spec=spec)


def is_complete(snapshot: Snapshot, desired: DesiredGroups) -> bool:
    """Returns whether all wanted groups are available and of the revision."""
    staying = staying_groups(snapshot.groups)
    return len(staying) == desired.replicas > 0 and all(
        group.available and group.revision == desired.revision for group in staying
    )


def with_rollback_condition(
    status: Status, rollback: RollbackStatus | None, blocked_reason: str, snapshot: Snapshot, now: str
) -> Status:
    """Returns the status in terms of the given-up revision."""
    if rollback is None:
        return status
    outcome = blocked_reason or f"groups are of {rollback.to} again"
    message = f"revision {rollback.revision} was given up: {rollback.message}; {outcome}"[:1024]
    conditions, ready = status.conditions, find_condition(status.conditions, "Ready")
    if ready and ready.status == "True":
        for kind in _HEALTHY:
            conditions = override_condition(
                conditions, kind, is_true=False, reason=Reason.ROLLED_BACK, message=message, snapshot=snapshot, now=now
            )
    conditions = drop_condition(conditions, "Reconciling")  # intervention is needed even while groups change
    conditions = override_condition(
        conditions, "Stalled", is_true=True, reason=Reason.ROLLED_BACK, message=message, snapshot=snapshot, now=now
    )
    updated = sum(group.revision == rollback.revision for group in staying_groups(snapshot.groups))
    return status.model_copy(
        update={
            "rollback": rollback,
            "update_revision": rollback.revision,
            "updated_replicas": updated,
            "conditions": conditions,
        }
    )
