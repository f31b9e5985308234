"""The revision: a hash of what changes a pod, and of what asks for new ones."""

import hashlib
import json
from typing import Any

from phalanx_api.schema import read
from phalanx_api.spec.inference_service import InferenceService, Spec
from phalanx_operator.render import objects as names
from phalanx_operator.render.objects import Object, child

PARTS = ("model", "parallelism", "resources", "engine", "pod_template", "placement")
"""Fields of a spec that change pods, with the served names."""
_HASHED: dict[str, Any] = dict.fromkeys(PARTS, True) | {"rollout": {"restart_id"}}


def revision(service: InferenceService) -> str:
    """Ten hex digits that differ when the pods of a group would have to differ.

    Unset fields and defaults do not count, whether the API server wrote them down or not, so a later version of the API with more
    fields gives the same revision; what this version of the operator would render does not count either, so that an upgrade of
    the operator moves no pod.
    """
    part = service.spec.model_dump(mode="json", by_alias=True, include=_HASHED, exclude_defaults=True, exclude_none=True)
    part.get("placement", {}).get("gang", {}).pop("timeoutSeconds", None)
    overlay = part.pop("podTemplate", {})  # nothing of it is ours to leave out
    part = _said(part) | ({"podTemplate": overlay} if overlay else {})
    part["servedNames"] = list(service.served_names)
    canonical = json.dumps(part, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def _said(part: dict[str, Any]) -> dict[str, Any]:
    """The fields that say anything: an object in which nothing is set says what its absence says."""
    inner = {name: _said(value) if isinstance(value, dict) else value for name, value in part.items()}
    return {name: value for name, value in inner.items() if value != {}}


# What the last revision was that was rolled out whole, in a ConfigMap: all that a service needs to go back to it.

COMPONENT = "former"
REVISION, SPEC = "revision", "spec"


def record(service: InferenceService, revision: str) -> Object:
    """The ConfigMap for this revision, which takes the place of the one for the revision before."""
    kept = service.spec.model_copy(update={"served_names": service.served_names})
    parts: dict[str, Any] = dict.fromkeys((*PARTS, "served_names"), True) | {"rollout": {"restart_id"}}
    text = kept.model_dump_json(by_alias=True, include=parts, exclude_unset=True, exclude_none=True)
    data = {REVISION: revision, SPEC: text}
    return child(service, "v1", "ConfigMap", names.former(service.name), COMPONENT, data=data)


def recalled(service: InferenceService, found: Object, revision: str) -> InferenceService | None:
    """The service as it was in this revision, in all that makes one; None when the ConfigMap is of another one.

    Raises: ValueError when what it holds is no part of a spec.
    """
    data = found.get("data") or {}
    if data.get(REVISION) != revision:
        return None
    former = read(Spec, json.loads(data.get(SPEC, "")))
    parts = {name: getattr(former, name) for name in (*PARTS, "served_names")}
    parts["rollout"] = service.spec.rollout.model_copy(update={"restart_id": former.rollout.restart_id})
    spec = service.spec.model_copy(update=parts)
    return InferenceService(service.namespace, service.name, service.uid, spec)
