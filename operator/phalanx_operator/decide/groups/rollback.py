"""When a rollout goes back to the revision before, and what the status then says: `rollout.onFailure: Rollback`.

    a group of the newest revision is late, `progressDeadlineSeconds`  -> that revision is given up: noted in the status
    groups of it were given up for their restarts, twice               -> likewise
    noted, and what the last whole revision was is known               -> all groups are of that one again, as by any rollout,
                                                                          whatever `partition` and `paused` say
    noted, and that is not known any more                              -> no group is made or replaced until it is
    the spec changes, or says Pause                                    -> the note goes; the newest revision is tried (again)

What the last whole revision was, a ConfigMap keeps (`render.former`): the spec has only the newest.
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
"""What is not said to be well while the newest revision is given up."""


def given_up(snapshot: Snapshot, revision: str, spec: Spec, now: str) -> RollbackStatus | None:
    """The note that this revision of the spec is given up; None while it is followed, or there is none to go back to."""
    former, rollout = snapshot.status.rollback, spec.rollout
    if rollout.on_failure != "Rollback":
        return None
    if former and former.revision == revision:
        return former
    to, why = snapshot.status.current_revision, progress.late(snapshot.groups, revision, rollout, now)
    past = recovery.followed(snapshot.status.recovery, snapshot.groups, revision, spec.restart_policy, now)
    if not why and past and past.given_up > 1:
        why = past.message  # its groups never live for long enough to be late
    if not why or not to or to == revision:
        return None
    return RollbackStatus(revision=revision, to=to, message=why[:512], since=now)


def as_followed(service: InferenceService, *, is_former: bool) -> InferenceService:
    """The service while its newest revision is given up: nothing keeps groups of that one, and no share of requests goes there.

    `is_former`: it is the service as it was, so all of a share is for it; else it is the newest, because the former is not known.
    """
    rollout = service.spec.rollout
    changes: dict[str, object] = {"partition": 0, "paused": False} if is_former else {}
    if rollout.canary_weight is not None:
        changes["canary_weight"] = 100 if is_former else 0
    spec = service.spec.model_copy(update={"rollout": rollout.model_copy(update=changes)})
    return replace(service, spec=spec)


def is_whole(snapshot: Snapshot, desired: Desired) -> bool:
    """Whether all groups that are wanted are there, available, and of the revision."""
    here = staying(snapshot.groups)
    return len(here) == desired.replicas > 0 and all(group.available and group.revision == desired.revision for group in here)


def with_rollback_condition(status: Status, note: RollbackStatus | None, lacks: str, snapshot: Snapshot, now: str) -> Status:
    """The status of a service whose newest revision is given up: of that one, whatever is rolled out now; unchanged else.
    `lacks`: why groups do not become those of the one before, if so."""
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
    conditions = drop_condition(conditions, "Reconciling")  # though groups may come and go: a person must act
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
