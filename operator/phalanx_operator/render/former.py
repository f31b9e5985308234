"""What the last revision was that was rolled out whole, in a ConfigMap: all that a service needs to go back to it."""

import json
from typing import Any

from phalanx_api.schema import read
from phalanx_api.spec.inference_service import InferenceService, Spec
from phalanx_operator.render import names
from phalanx_operator.render.objects import Object, child
from phalanx_operator.render.revision import PARTS

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
