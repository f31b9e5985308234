"""Which version of the model's source is served, and on how many nodes a cache has it: `status.model`."""

from phalanx_api.spec.inference_service import Model
from phalanx_api.status import ModelStatus, Status
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.groups import live, staying
from phalanx_operator.decide.state.snapshot import Snapshot


def with_model_status(status: Status, model: Model, snapshot: Snapshot, fleet: Fleet) -> Status:
    """The status with what groups and nodes say of the model."""
    versions = _versions(snapshot, fleet)
    resolved = versions[-1] if versions else snapshot.status.model.resolved_revision
    is_fetched = model.uri.partition("://")[0] not in ("file", "pvc")
    is_local = model.cache is not None and model.cache.type == "NodeLocal"
    nodes = {pod.node for group in live(snapshot.groups) for pod in group.pods if pod.ready and pod.node} if is_local else set()
    said = ModelStatus(resolved_revision=resolved if is_fetched else "", cached_nodes=len(nodes))
    return status.model_copy(update={"model": said})


def _versions(snapshot: Snapshot, fleet: Fleet) -> list[str]:
    """What groups that serve have loaded, by their age: the youngest last."""
    oldest_first = sorted(staying(snapshot.groups), key=lambda group: (group.created, group.name))
    seen = [fleet.groups[group.name] for group in oldest_first if group.ready and group.name in fleet.groups]
    return [group.model_version for group in seen if group.linked and group.model_version]
