"""Whether groups propose tokens as the service asks: the condition `Speculating`, only where `spec.engine.speculative` does.

A draft that cannot be loaded, or that fails, is done without; its group tells the routers, and they the operator.
"""

from phalanx_api.conditions import Condition, Reason, drop_condition, find_condition, set_condition
from phalanx_api.spec.inference_service import Engine
from phalanx_api.status import Status
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import live
from phalanx_operator.decide.state.snapshot import Snapshot


def with_speculating_condition(
    status: Status, engine: Engine, snapshot: Snapshot, revision: str, fleet: Fleet, now: str
) -> Status:
    """The status with what ready groups of this revision say of their drafts. While no router is heard, it stays as it was."""
    conditions = status.conditions
    is_asked = engine.speculative is not None and engine.speculative.method != "None"
    if not is_asked:
        conditions = drop_condition(conditions, "Speculating")
    elif not (fleet.asked and not fleet.answered and find_condition(conditions, "Speculating")):
        conditions = _set(conditions, snapshot, revision, fleet, now)
    return status.model_copy(update={"conditions": conditions})


def _set(conditions: tuple[Condition, ...], snapshot: Snapshot, revision: str, fleet: Fleet, now: str) -> tuple[Condition, ...]:
    names = sorted(group.name for group in live(snapshot.groups) if group.ready and group.revision == revision)
    seen = [fleet.groups[name] for name in names if name in fleet.groups]
    lost = [f"{group.name}: {group.draft_lost}" for group in seen if group.draft_lost]
    reason = Reason.DRAFT_LOST if lost else Reason.PROPOSING if seen else Reason.NO_READY_GROUP
    verdict = not lost if seen else None
    return set_condition(
        conditions, "Speculating", verdict, reason=reason, message="; ".join(lost), generation=snapshot.generation, now=now
    )
