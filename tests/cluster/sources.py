"""A service whose pods fetch the tiny model from a hub of the tests."""

from typing import Any

from tests.cluster import tiny_model
from tests.cluster.scenes import Scene
from tests.runtime.checkpoint.hub import HubServer

NAME, URI = "org/tiny", "hf://org/tiny"


def fetching(scene: Scene, hub: HubServer, cache: dict[str, Any], replicas: int, pods: int, **spec: Any) -> dict[str, Any]:
    """The manifest of a service that fetches from there into this cache; the hub has the model."""
    hub.large.add("model.safetensors")
    hub.add(NAME, {path.name: path.read_bytes() for path in (tiny_model.folder() / tiny_model.NAME).iterdir()})
    made = scene.manifest(replicas=replicas, pods=pods, **spec)
    made["spec"]["model"] = {"uri": URI, "cache": cache}
    (runtime,) = [c for c in made["spec"]["podTemplate"]["spec"]["containers"] if c["name"] == "runtime"]
    runtime.setdefault("env", []).append({"name": "HF_ENDPOINT", "value": hub.endpoint})
    return made
