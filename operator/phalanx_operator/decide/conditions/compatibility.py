"""Whether the parts of a service understand one another: the condition `Compatible`.

It is absent until two parts were found that share no version of a protocol; since then it says whether all do.
"""

from phalanx_api.conditions import Reason, find_condition, set_condition
from phalanx_api.status import Status
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import Snapshot


def with_compatible_condition(status: Status, fleet: Fleet, snapshot: Snapshot, now: str) -> Status:
    """The status with what is known of versions. While no router is heard, that is what was last known."""
    unknown = fleet.unknown_versions
    if not unknown and (find_condition(status.conditions, "Compatible") is None or not fleet.all_heard or not fleet.answered):
        return status
    reason = Reason.UNKNOWN_VERSION if unknown else Reason.VERSIONS_AGREE
    conditions = set_condition(
        status.conditions,
        "Compatible",
        not unknown,
        reason=reason,
        message="; ".join(unknown),
        generation=snapshot.generation,
        now=now,
    )
    return status.model_copy(update={"conditions": conditions})
