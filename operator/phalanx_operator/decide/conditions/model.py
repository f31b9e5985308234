"""The condition `ModelCached`, set only with `spec.model.cache`, and `status.model`.

The cause of a failed download is derived from the runtime's error message; a test compares the patterns with all its messages.
"""

import re

from phalanx_api.conditions import Reason, drop_condition, set_condition
from phalanx_api.spec.model import Model
from phalanx_api.status import ModelStatus, Status
from phalanx_operator.decide.groups.recovery import last_death
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import live, staying
from phalanx_operator.decide.state.snapshot import Snapshot

_REFUSED = re.compile(r"is refused|refuses the|is private|check the credentials|gives no token")
_MISSING = re.compile(r"there is no ")
_CLAIM = re.compile(r"persistentvolumeclaim|unbound immediate|volume node affinity", re.IGNORECASE)


def with_model_cached_condition(status: Status, model: Model, snapshot: Snapshot, fleet: Fleet, now: str) -> Status:
    """Returns the status with the condition."""
    if model.cache is None or model.cache.type == "None":
        return status.model_copy(update={"conditions": drop_condition(status.conditions, "ModelCached")})
    reason, message = _verdict(snapshot, fleet)
    verdict = None if reason is Reason.DOWNLOADING and not message else reason is Reason.CACHED
    conditions = set_condition(
        status.conditions, "ModelCached", verdict, reason=reason, message=message, generation=snapshot.generation, now=now
    )
    return status.model_copy(update={"conditions": conditions})


def _verdict(snapshot: Snapshot, fleet: Fleet) -> tuple[Reason, str]:
    """Returns the reason: cached once all groups are ready, else what the pods and deaths report."""
    groups = live(snapshot.groups)
    if groups and all(group.ready for group in groups):
        return Reason.CACHED, ""
    for group in groups:
        for pod in group.pods:
            if not pod.node and _CLAIM.search(pod.message):
                return Reason.CLAIM_UNBOUND, f"pod {pod.name}: {pod.message}"
        death = last_death(group, fleet)
        if reason := cause_of(death):
            return reason, f"{group.name}: {death}"
    return Reason.DOWNLOADING, ""


def cause_of(words: str) -> Reason | None:
    """Returns the reason for a runtime's error message about its model; None for any other message."""
    if _REFUSED.search(words):
        return Reason.AUTH_FAILED
    return Reason.NOT_FOUND if _MISSING.search(words) else None


# `status.model`: the served version of the model's source, and the number of nodes with a cached copy.


def with_model_status(status: Status, model: Model, snapshot: Snapshot, fleet: Fleet) -> Status:
    """Returns the status with the served version and the number of nodes."""
    versions = _versions(snapshot, fleet)
    resolved = versions[-1] if versions else snapshot.status.model.resolved_revision
    is_fetched = model.uri.partition("://")[0] not in ("file", "pvc")
    is_local = model.cache is not None and model.cache.type == "NodeLocal"
    nodes = {pod.node for group in live(snapshot.groups) for pod in group.pods if pod.ready and pod.node} if is_local else set()
    said = ModelStatus(resolved_revision=resolved if is_fetched else "", cached_nodes=len(nodes))
    return status.model_copy(update={"model": said})


def _versions(snapshot: Snapshot, fleet: Fleet) -> list[str]:
    """Returns the versions that ready groups have loaded, by the groups' age, the youngest last."""
    oldest_first = sorted(staying(snapshot.groups), key=lambda group: (group.created, group.name))
    seen = [fleet.groups[group.name] for group in oldest_first if group.ready and group.name in fleet.groups]
    return [group.model_version for group in seen if group.linked and group.model_version]
