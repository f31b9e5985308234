"""The revision: a hash of what changes a pod, and of what asks for new ones."""

import hashlib
import json

from phalanx_api.inference_service import InferenceService

_PARTS = ("model", "parallelism", "resources", "engine", "pod_template", "rollout")


def revision(service: InferenceService) -> str:
    """Ten hex digits that differ when the pods of a group would have to differ.

    Unset fields and defaults do not count, so a later version of the API with more fields gives the same revision; what this
    version of the operator would render does not count either, so that an upgrade of the operator moves no pod.
    """
    part = service.spec.model_dump(mode="json", by_alias=True, include=set(_PARTS), exclude_defaults=True, exclude_none=True)
    part["servedNames"] = list(service.served_names)
    canonical = json.dumps(part, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(canonical.encode()).hexdigest()[:10]
