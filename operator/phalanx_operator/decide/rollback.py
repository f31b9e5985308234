"""When a rollout goes back to the revision before, and what the status then says: `rollout.onFailure: Rollback`.

    a group of the newest revision is late, `progressDeadlineSeconds`  -> that revision is given up: noted in the status
    noted, and what the last whole revision was is known               -> groups are of that one again, as by any rollout
    the spec changes, or says Pause                                    -> the note goes; the newest revision is tried (again)

What the last whole revision was, a ConfigMap keeps (`render.former`): the spec has only the newest.
"""

from phalanx_api.conditions import Reason, find_condition, set_condition
from phalanx_api.status import RollbackStatus, Status
from phalanx_api.upkeep import Rollout
from phalanx_operator.decide import progress
from phalanx_operator.decide.groups import Desired, staying
from phalanx_operator.decide.snapshot import Snapshot

NO_RECORD = "there is no record of a revision that was rolled out whole while spec.rollout.onFailure said Rollback"


def given_up(snapshot: Snapshot, revision: str, rollout: Rollout, now: str) -> RollbackStatus | None:
    """The note that this revision of the spec is given up; None while it is followed, or there is none to go back to."""
    former = snapshot.status.rollback
    if rollout.on_failure != "Rollback":
        return None
    if former and former.revision == revision:
        return former
    to, why = snapshot.status.current_revision, progress.late(snapshot.groups, revision, rollout, now)
    if not why or not to or to == revision:
        return None
    return RollbackStatus(revision=revision, to=to, message=why[:512], since=now)


def is_whole(snapshot: Snapshot, desired: Desired) -> bool:
    """Whether all groups that are wanted are there, ready, and of the revision."""
    here = staying(snapshot.groups)
    return len(here) == desired.replicas > 0 and all(group.ready and group.revision == desired.revision for group in here)


def told(status: Status, note: RollbackStatus | None, snapshot: Snapshot, now: str) -> Status:
    """The status of a service whose newest revision is given up: of that one, whatever is rolled out now; unchanged else."""
    if note is None:
        return status
    message = f"revision {note.revision} was given up: {note.message}; groups are of {note.to} again"[:1024]
    conditions, generation = status.conditions, snapshot.generation
    ready = find_condition(conditions, "Ready")
    if ready and ready.status == "True":
        for kind in ("Ready", "Progressing"):
            conditions = set_condition(
                conditions, kind, False, reason=Reason.ROLLED_BACK, message=message, generation=generation, now=now
            )
    conditions = set_condition(
        conditions, "Stalled", True, reason=Reason.ROLLED_BACK, message=message, generation=generation, now=now
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
