"""The revision of pods, and the record of the last complete one."""

import hashlib
import json
from typing import Any

from phalanx_api.schema import parse_record
from phalanx_api.spec.inference_service import InferenceService, Spec
from phalanx_operator.render import objects as names
from phalanx_operator.render.objects import Object, child

PARTS = ("model", "parallelism", "resources", "engine", "pod_template", "placement")
"""Fields that change pods, with the served names and those of `_SINGLE`."""
_SINGLE = {"rollout": {"restart_id"}, "security": {"tls"}}
"""Single fields of other parts."""
_HASHED: dict[str, Any] = dict.fromkeys(PARTS, True) | _SINGLE


def revision(service: InferenceService) -> str:
    """Returns ten hex digits that change when groups need new pods.

    Unset fields and defaults do not count, so neither new API fields nor an upgrade of the operator change it.
    """
    part = service.spec.model_dump(mode="json", by_alias=True, include=_HASHED, exclude_defaults=True, exclude_none=True)
    part.get("placement", {}).get("gang", {}).pop("timeoutSeconds", None)
    overlay = part.pop("podTemplate", {})  # every field counts, empty ones too
    part = _without_empty(part) | ({"podTemplate": overlay} if overlay else {})
    part["servedNames"] = list(service.served_names)
    canonical = json.dumps(part, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]


def _without_empty(part: dict[str, Any]) -> dict[str, Any]:
    """Drops empty objects, which equal their absence."""
    inner = {name: _without_empty(value) if isinstance(value, dict) else value for name, value in part.items()}
    return {name: value for name, value in inner.items() if value != {}}


COMPONENT = "former"
REVISION, SPEC = "revision", "spec"


def revision_record(service: InferenceService, revision: str) -> Object:
    """Returns the ConfigMap with this revision."""
    spec = service.spec.model_copy(update={"served_names": service.served_names})
    parts: dict[str, Any] = dict.fromkeys((*PARTS, "served_names"), True) | _SINGLE
    text = spec.model_dump_json(by_alias=True, include=parts, exclude_unset=True, exclude_none=True)
    data = {REVISION: revision, SPEC: text}
    return child(service, "v1", "ConfigMap", names.revision_record(service.name), COMPONENT, data=data)


def recall(service: InferenceService, record: Object, revision: str) -> InferenceService | None:
    """Returns the service with the spec in `record`, if it is of this revision. Raises ValueError."""
    data = record.get("data") or {}
    if data.get(REVISION) != revision:
        return None
    former = parse_record(Spec, json.loads(data.get(SPEC, "")))
    parts = {name: getattr(former, name) for name in (*PARTS, "served_names")}
    for part, fields in _SINGLE.items():
        update = {field: getattr(getattr(former, part), field) for field in fields}
        parts[part] = getattr(service.spec, part).model_copy(update=update)
    spec = service.spec.model_copy(update=parts)
    return InferenceService(service.namespace, service.name, service.uid, spec)
