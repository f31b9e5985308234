"""Records for tests, with defaults."""

from dataclasses import fields as fields_of
from typing import Any

from pydantic import ValidationError

from phalanx_api import labels
from phalanx_api.spec.inference_service import InferenceService, Spec, parse
from phalanx_api.status import Status
from phalanx_operator.decide.state.fleet import EngineHealth, GroupLoadView, GroupReport
from phalanx_operator.decide.state.groups import DesiredGroups
from phalanx_operator.decide.state.snapshot import GroupAssessment, ObservedGroup, ObservedPod, ObservedRouter, Snapshot
from phalanx_operator.render.objects import group_names

NOW = "2026-01-02T03:04:05Z"
SETTLED_ROUTER = ObservedRouter(replicas=1, updated=1, ready=1, is_current=True)
_ASSESSED = {field.name for field in fields_of(GroupAssessment)}


def make_body(name: str = "chat", namespace: str = "team", uid: str = "uid-1", **spec: Any) -> dict[str, Any]:
    metadata = {"name": name, "namespace": namespace, "uid": uid, "generation": 1, "resourceVersion": "1"}
    return {
        "apiVersion": "phalanx.dev/v1alpha1",
        "kind": "InferenceService",
        "metadata": metadata,
        "spec": {"model": {"uri": "hf://org/model"}, "replicas": 1, **spec},
    }


def check_fields(spec: dict[str, Any]) -> None:
    """Fails for unknown fields, which `parse` ignores."""
    try:
        Spec.model_validate(spec)
    except ValidationError as error:
        unknown = [detail["loc"] for detail in error.errors() if detail["type"] == "extra_forbidden"]
        assert unknown == [], "no such field"


def make_service(**spec: Any) -> InferenceService:
    body = make_body(**spec)
    check_fields(body["spec"])
    service = parse(body)
    assert isinstance(service, InferenceService), service
    return service


def make_group(name: str, revision: str = "new", *, ready: bool = True, created: str = "1", **fields: Any) -> ObservedGroup:
    """Returns a group; fields of its assessment are passed like its own."""
    uid = f"uid-{name}"
    size = fields.pop("size", 2)
    assessment = GroupAssessment(**{field: fields.pop(field) for field in _ASSESSED & fields.keys()})
    pods = tuple(ObservedPod(name=f"{name}-{i}", index=i, owner_uid=uid, ready=ready, node=f"node-{i}") for i in range(size))
    return ObservedGroup(
        name=name, uid=uid, revision=revision, created=created, size=size, assessment=assessment, **{"pods": pods} | fields
    )


def make_report(name: str, *, is_linked: bool = True, is_fresh: bool = False, **engine: Any) -> GroupReport:
    """Returns an idle group as routers report it."""
    load = GroupLoadView(
        is_fresh=is_fresh,
        streams=0,
        running=0,
        waiting=0,
        pressure=0.0,
        backlog_s=0.0,
        itl_s=0.0,
        speed=1.0,
        kv_capacity=1,
        step_model=None,
    )
    return GroupReport(name=name, is_linked=is_linked, load=load, engine=EngineHealth(**engine))


def make_desired(replicas: int, revision: str = "new", routers: int = 1, **fields: Any) -> DesiredGroups:
    return DesiredGroups(
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
    """Returns a pod as its controller and kubelet report it."""
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
