"""The revision: a hash of what changes a pod, and of what asks for new ones."""

import hashlib
import json
from typing import Any

from phalanx_api.spec.inference_service import InferenceService

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
