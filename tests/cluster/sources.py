"""A service that downloads the tiny model from a test hub."""

from typing import Any

from tests.cluster import tiny_model
from tests.cluster.scenes import Scene
from tests.runtime.checkpoint.hub import HubServer

NAME, URI = "org/tiny", "hf://org/tiny"


def fetching(scene: Scene, hub: HubServer, cache: dict[str, Any], replicas: int, pods: int, **spec: Any) -> dict[str, Any]:
    """Adds the model to the hub and returns the manifest of a service that downloads it into a cache."""
    hub.large.add("model.safetensors")
    hub.add(NAME, {path.name: path.read_bytes() for path in (tiny_model.folder() / tiny_model.NAME).iterdir()})
    manifest = scene.manifest(replicas=replicas, pods=pods, **spec)
    manifest["spec"]["model"] = {"uri": URI, "cache": cache}
    (runtime,) = [c for c in manifest["spec"]["podTemplate"]["spec"]["containers"] if c["name"] == "runtime"]
    runtime.setdefault("env", []).append({"name": "HF_ENDPOINT", "value": hub.endpoint})
    return manifest
