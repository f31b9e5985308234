"""Decides when a rollout rolls back to the former revision (`rollout.onFailure: Rollback`), and its status.

    a group of the newest revision misses `progressDeadlineSeconds`  -> that revision is given up; recorded in the status
    groups of it were given up for their restarts, twice             -> likewise
    recorded, and the last complete revision is known                -> all groups become that one, as in any rollout, whatever
                                                                        `partition` and `paused` are
    recorded, and that revision is unknown                           -> no group is created or replaced until it is known
    the spec changes, or sets Pause                                  -> the record is removed; the newest revision is tried

A ConfigMap keeps the last complete revision (`render.revision`): the spec has only the newest.
"""

from dataclasses import replace

from phalanx_api.conditions import ConditionType, Reason, drop_condition, find_condition
from phalanx_api.spec.inference_service import InferenceService, Spec
from phalanx_api.status import RollbackStatus, Status
from phalanx_operator.decide.groups import progress, recovery
from phalanx_operator.decide.state.groups import Desired, staying
from phalanx_operator.decide.state.snapshot import Snapshot, override_condition

NO_RECORD = "there is no record of a revision that was rolled out whole while spec.rollout.onFailure said Rollback"
_WELL: tuple[ConditionType, ...] = ("Ready", "Progressing")
"""Conditions that cannot be true while the newest revision is given up."""


def given_up(snapshot: Snapshot, revision: str, spec: Spec, now: str) -> RollbackStatus | None:
    """Returns the record that this revision is given up; None while it is followed, or no former revision exists."""
    former, rollout = snapshot.status.rollback, spec.rollout
    if rollout.on_failure != "Rollback":
        return None
    if former and former.revision == revision:
        return former
    to, why = snapshot.status.current_revision, progress.late(snapshot.groups, revision, rollout, now)
    past = recovery.followed(snapshot.status.recovery, snapshot.groups, revision, spec.restart_policy, now)
    if not why and past and past.given_up > 1:
        why = past.message  # its groups never run long enough to miss the deadline
    if not why or not to or to == revision:
        return None
    return RollbackStatus(revision=revision, to=to, message=why[:512], since=now)


def as_followed(service: InferenceService, *, is_former: bool) -> InferenceService:
    """Returns the service to follow while its newest revision is given up: without partition, pause and canary share.

    `is_former`: the service has the former revision's spec; else the newest one, because the former is unknown.
    """
    rollout = service.spec.rollout
    changes: dict[str, object] = {"partition": 0, "paused": False} if is_former else {}
    if rollout.canary_weight is not None:
        changes["canary_weight"] = 100 if is_former else 0
    spec = service.spec.model_copy(update={"rollout": rollout.model_copy(update=changes)})
    return replace(service, spec=spec)


def is_whole(snapshot: Snapshot, desired: Desired) -> bool:
    """Returns whether all wanted groups exist, are available and have the revision."""
    here = staying(snapshot.groups)
    return len(here) == desired.replicas > 0 and all(group.available and group.revision == desired.revision for group in here)


def with_rollback_condition(status: Status, note: RollbackStatus | None, lacks: str, snapshot: Snapshot, now: str) -> Status:
    """Returns the status of a service whose newest revision is given up, in terms of that revision; else the status unchanged.
    `lacks`: why groups do not become the former revision, if so."""
    if note is None:
        return status
    after = lacks or f"groups are of {note.to} again"
    message = f"revision {note.revision} was given up: {note.message}; {after}"[:1024]
    conditions, ready = status.conditions, find_condition(status.conditions, "Ready")
    if ready and ready.status == "True":
        for kind in _WELL:
            conditions = override_condition(
                conditions, kind, is_true=False, reason=Reason.ROLLED_BACK, message=message, snapshot=snapshot, now=now
            )
    conditions = drop_condition(conditions, "Reconciling")  # even while groups change: intervention is needed
    conditions = override_condition(
        conditions, "Stalled", is_true=True, reason=Reason.ROLLED_BACK, message=message, snapshot=snapshot, now=now
    )
    updated = sum(group.revision == note.revision for group in staying(snapshot.groups))
    return status.model_copy(
        update={
            "rollback": note,
            "update_revision": note.revision,
            "updated_replicas": updated,
            "conditions": conditions,
        }
    )
