"""Records for tests: defaults, plus what the case is about."""

from typing import Any

from pydantic import ValidationError

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService, Spec, parse
from phalanx_api.status import Status
from phalanx_operator.decide.state.groups import Desired
from phalanx_operator.decide.state.snapshot import ObservedGroup, ObservedPod, ObservedRouter, Snapshot
from phalanx_operator.render.objects import group_names

NOW = "2026-01-02T03:04:05Z"
SETTLED_ROUTER = ObservedRouter(wanted=1, updated=1, ready=1, current=True)


def make_body(name: str = "chat", namespace: str = "team", uid: str = "uid-1", **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "uid": uid, "generation": 1, "resourceVersion": "1"}
    return {
        "apiVersion": "phalanx.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {"model": {"uri": "hf://org/model"}, "replicas": 1, **spec},
    }


def refuse_strangers(spec: dict[str, Any]) -> None:
    """Fails at fields that do not exist: `parse` leaves them out, as it must, and here they are mistakes."""
    try:
        Spec.model_validate(spec)
    except ValidationError as error:
        strangers = [one["loc"] for one in error.errors() if one["type"] == "extra_forbidden"]
        assert strangers == [], "no such field"


def make_service(**spec: Any) -> InferenceService:
    body = make_body(**spec)
    refuse_strangers(body["spec"])
    service = parse(body)
    assert isinstance(service, InferenceService), service
    return service


def make_group(name: str, revision: str = "new", *, ready: bool = True, created: str = "1", **fields: Any) -> ObservedGroup:
    uid = f"uid-{name}"
    size = fields.pop("size", 2)
    pods = tuple(ObservedPod(name=f"{name}-{i}", index=i, owner_uid=uid, ready=ready, node=f"node-{i}") for i in range(size))
    return ObservedGroup(name=name, uid=uid, revision=revision, created=created, size=size, **{"pods": pods} | fields)


def make_desired(replicas: int, revision: str = "new", routers: int = 1, **fields: Any) -> Desired:
    return Desired(
        revision=revision,
        replicas=replicas,
        routers=routers,
        names=group_names("chat", "uid-1", revision, replicas + 50),
        **fields,
    )


def make_snapshot(*groups: ObservedGroup, **fields: Any) -> Snapshot:
    defaults: dict[str, Any] = {
        "namespace": "team",
        "name": "chat",
        "uid": "uid-1",
        "generation": 7,
        "resource_version": "1",
        "has_replicas": True,
        "status": Status(),
        "router": SETTLED_ROUTER,
    }
    return Snapshot(**defaults | fields, groups=groups)


def pod_body(group: dict[str, Any], index: int, *, ready: bool, uid: str, reason: str = "") -> dict[str, Any]:
    """A pod as the StatefulSet controller and the kubelet would show it."""
    template = group["spec"]["template"]
    conditions = [{"type": "Ready", "status": str(ready)}]
    waiting = {"containerStatuses": [{"state": {"waiting": {"reason": reason, "message": "why"}}}]} if reason else {}
    metadata = {
        "name": f"{group['metadata']['name']}-{index}",
        "namespace": group["metadata"]["namespace"],
        "uid": uid,
        "labels": template["metadata"]["labels"] | {labels.POD_INDEX: str(index)},
        "ownerReferences": [{"uid": group["metadata"]["uid"], "controller": True}],
    }
    return {"metadata": metadata, "spec": {"nodeName": f"node-{index}"}, "status": {"conditions": conditions} | waiting}
