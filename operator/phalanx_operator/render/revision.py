"""The revision: a hash of what changes a pod, and of what asks for new ones."""

import hashlib
import json
from typing import Any

from phalanx_api.inference_service import InferenceService

_PARTS: dict[str, Any] = dict.fromkeys(("model", "parallelism", "resources", "engine", "pod_template"), True)
_PARTS |= {"rollout": {"restart_id"}, "placement": True}


def revision(service: InferenceService) -> str:
    """Ten hex digits that differ when the pods of a group would have to differ.

    Unset fields and defaults do not count, so a later version of the API with more fields gives the same revision; what this
    version of the operator would render does not count either, so that an upgrade of the operator moves no pod.
    """
    part = service.spec.model_dump(mode="json", by_alias=True, include=_PARTS, exclude_defaults=True, exclude_none=True)
    if part.get("rollout") == {}:
        del part["rollout"]  # other fields of it are set: they replace no group
    if gang := part.get("placement", {}).get("gang"):
        gang.pop("timeoutSeconds", None)
        if not gang:
            del part["placement"]["gang"]
        if not part["placement"]:
            del part["placement"]
    part["servedNames"] = list(service.served_names)
    canonical = json.dumps(part, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]
