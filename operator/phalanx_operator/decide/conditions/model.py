"""`ModelCached`, set only with `spec.model.cache`, and `status.model`.

The runtime's error message shows why a download failed; a test compares the patterns with all messages.
"""

import re

from phalanx_api.conditions import Reason, drop_condition, set_condition
from phalanx_api.spec.model import Model
from phalanx_api.status import ModelStatus, Status
from phalanx_operator.decide.groups.recovery import last_death
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import live_groups, staying_groups
from phalanx_operator.decide.state.snapshot import Snapshot

_DENIED = re.compile(r"is refused|refuses the|is private|check the credentials|gives no token")
_MISSING = re.compile(r"there is no ")
_UNBOUND_CLAIM = re.compile(r"persistentvolumeclaim|unbound immediate|volume node affinity", re.IGNORECASE)


def with_model_cached_condition(status: Status, model: Model, snapshot: Snapshot, fleet: Fleet, now: str) -> Status:
    """Sets the condition."""
    if model.cache is None or model.cache.type == "None":
        return status.model_copy(update={"conditions": drop_condition(status.conditions, "ModelCached")})
    reason, message = _verdict(snapshot, fleet)
    verdict = None if reason is Reason.DOWNLOADING and not message else reason is Reason.CACHED
    conditions = set_condition(
        status.conditions, "ModelCached", verdict, reason=reason, message=message, generation=snapshot.generation, now=now
    )
    return status.model_copy(update={"conditions": conditions})


def _verdict(snapshot: Snapshot, fleet: Fleet) -> tuple[Reason, str]:
    groups = live_groups(snapshot.groups)
    if groups and all(group.alive for group in groups):
        return Reason.CACHED, ""
    for group in groups:
        for pod in group.pods:
            if not pod.node and _UNBOUND_CLAIM.search(pod.message):
                return Reason.CLAIM_UNBOUND, f"pod {pod.name}: {pod.message}"
        death = last_death(group, fleet)
        if reason := download_failure(death):
            return reason, f"{group.name}: {death}"
    return Reason.DOWNLOADING, ""


def download_failure(message: str) -> Reason | None:
    """Returns the reason for an error message about the model's source."""
    if _DENIED.search(message):
        return Reason.AUTH_FAILED
    return Reason.NOT_FOUND if _MISSING.search(message) else None


def with_model_status(status: Status, model: Model, snapshot: Snapshot, fleet: Fleet) -> Status:
    """Sets the served version, and the nodes with a cached copy."""
    versions = _versions(snapshot, fleet)
    resolved = versions[-1] if versions else snapshot.status.model.resolved_revision
    is_fetched = model.uri.partition("://")[0] not in ("file", "pvc")
    is_local = model.cache is not None and model.cache.type == "NodeLocal"
    groups = live_groups(snapshot.groups) if is_local else []
    nodes = {pod.node for group in groups for pod in group.pods if pod.ready and pod.node}
    model_status = ModelStatus(resolved_revision=resolved if is_fetched else "", cached_nodes=len(nodes))
    return status.model_copy(update={"model": model_status})


def _versions(snapshot: Snapshot, fleet: Fleet) -> list[str]:
    """Returns loaded versions, the youngest group last."""
    oldest_first = sorted(staying_groups(snapshot.groups), key=lambda group: (group.created, group.name))
    reports = [fleet.groups[group.name] for group in oldest_first if group.alive and group.name in fleet.groups]
    return [report.engine.model_version for report in reports if report.is_linked and report.engine.model_version]
