"""Model caches: a read-only claim that a Job fills, a claim that all pods write, and a claim per pod (`NodeLocal`).

The Job is that of manifests/samples/filled-cache.yaml. The model source exists only while it runs.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster import claims, tiny_model
from tests.cluster import service as svc
from tests.cluster.config import API_IP
from tests.cluster.scenes import Scene
from tests.cluster.sources import NAME, URI, fetching
from tests.runtime.checkpoint.hub import HubServer, running_hub
from tools.errors import Failed

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "filled-cache.yaml"
FILLING, FILLED = "filling", "filled"
"""Claims of the Job and the groups on one folder."""
WRITE = "open('/var/cache/phalanx-models/new', 'w')"


@pytest.fixture(scope="module")
def claimed(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    """A namespace with both claims on an empty folder."""
    if scene.cluster.files is None:
        pytest.skip("the folder and the source are of this machine")
    folder = tmp_path_factory.mktemp("cache")
    folder.chmod(0o777)  # the Job runs as another user
    scene.cluster.claim(scene.namespace, FILLING, folder, access="ReadWriteMany")
    scene.cluster.claim(scene.namespace, FILLED, folder)
    yield scene
    scene.delete_service()


def service(scene: Scene) -> dict[str, Any]:
    """Returns a service with the model in the read-only claim."""
    manifest = scene.manifest(replicas=1, pods=1)
    manifest["spec"]["model"] = {"uri": URI, "cache": {"type": "Shared", "claimName": FILLED, "readOnly": True}}
    return manifest


def job(scene: Scene, endpoint: str) -> dict[str, Any]:
    """Returns the sample's Job for this model, claim and source."""
    body: dict[str, Any] = next(body for body in yaml.safe_load_all(SAMPLE.read_text()) if body["kind"] == "Job")
    body["metadata"]["namespace"] = scene.namespace
    pod = body["spec"]["template"]["spec"]
    (container,) = pod["containers"]
    container["image"] = scene.cluster.image("runtime")
    container["args"] = [URI if word.startswith("hf://") else word for word in container["args"]]
    container["env"] = [{"name": "HF_ENDPOINT", "value": endpoint}]
    pod["volumes"][0]["persistentVolumeClaim"]["claimName"] = FILLING
    changed = scene.cluster.with_site_packages({"spec": {"podTemplate": {"spec": pod}}})
    body["spec"]["template"]["spec"] = changed["spec"]["podTemplate"]["spec"]
    return body


def fetch(scene: Scene) -> HubServer:
    """Runs the Job with a model source and returns the source, which has ended."""
    files = (tiny_model.folder() / tiny_model.NAME).iterdir()
    with running_hub(API_IP) as hub:
        hub.large.add("model.safetensors")
        hub.add(NAME, {path.name: path.read_bytes() for path in files})
        scene.kubectl("apply", "-f", "-", stdin=json.dumps(job(scene, hub.endpoint)))
        job_name = ("job", "fetch-chat")
        svc.wait_for(
            lambda: {"succeeded", "failed"} & set(scene.get(*job_name).get("status", {})) or None, 180, "the Job has ended"
        )
        assert scene.get(*job_name)["status"].get("succeeded") == 1, scene.kubectl("logs", "job/fetch-chat", "--tail=20")
    return hub


def test_missing_model_is_reported_and_served_after_a_job(claimed: Scene) -> None:
    claimed.apply(service(claimed))
    svc.wait_for(lambda: claimed.condition("ModelCached") == ("False", "NotFound"), 180, "the missing model is reported")
    assert "phalanx-runtime fetch" in claimed.message("ModelCached")
    source = fetch(claimed)
    assert [request.status for request in source.requests_for("model.safetensors")] == [200]
    claimed.wait_ready(1, 500)
    svc.wait_for(lambda: claimed.condition("ModelCached") == ("True", "Cached"), 30, "the model is reported")
    body = {"model": "tiny", "prompt": "a downloaded model", "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{claimed.url}/v1/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 8)


def test_groups_mount_the_claim_read_only_without_source(claimed: Scene) -> None:
    claimed.scale(2)
    claimed.wait_ready(2, 300)
    pods = claimed.pods()
    assert len(pods) == 2
    for name in pods:
        with pytest.raises(Failed, match="Read-only file system"):
            claimed.kubectl("exec", name, "-c", "runtime", "--", "python3", "-c", WRITE)


def test_pods_with_a_shared_claim_fetch_the_model_once(scene: Scene, tmp_path: Path) -> None:
    if scene.cluster.files is None:
        pytest.skip("the folder and the source are of this machine")
    scene.delete_service()
    folder = tmp_path / "shared"
    folder.mkdir()
    folder.chmod(0o777)  # pods run as another user
    scene.cluster.claim(scene.namespace, "shared", folder, access="ReadWriteMany")
    with running_hub(API_IP) as hub:
        cache = {"type": "Shared", "claimName": "shared"}
        scene.apply(fetching(scene, hub, cache, replicas=2, pods=1, placement={"spreadGroups": "Required"}))
        scene.wait_ready(2, 500)
    assert len({pod["spec"]["nodeName"] for pod in scene.pods().values()}) == 2
    assert sum("/revision/main?" in request.path for request in hub.requests) >= 2, "each pod requests the file list"
    assert [request.status for request in hub.requests_for("model.safetensors")] == [200]
    assert scene.condition("ModelCached") == ("True", "Cached")
    scene.delete_service()


LOCAL = "local-models"


@pytest.fixture
def on_disks(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Path]]:
    """A StorageClass with two disks on each node: folders by volume name."""
    if scene.cluster.files is None:
        pytest.skip("the folders and the source are of this machine")
    scene.delete_service()
    nodes = [node["metadata"]["name"] for node in scene.get("nodes")["items"]]
    folders = {node: [tmp_path_factory.mktemp(f"{node}-{number}") for number in range(2)] for node in nodes}
    for folder in (folder for of_node in folders.values() for folder in of_node):
        folder.chmod(0o777)  # pods run as another user
    objects = {"apiVersion": "v1", "kind": "List", "items": claims.local_class(LOCAL, folders)}
    scene.cluster.kubectl("apply", "-f", "-", stdin=json.dumps(objects))
    yield {f"{LOCAL}-{node}-{number}": folder for node, of_node in folders.items() for number, folder in enumerate(of_node)}
    scene.delete_service()
    scene.cluster.kubectl("delete", "persistentvolume", "-l", f"app={LOCAL}", "--wait=false")
    scene.cluster.kubectl("delete", "storageclass", LOCAL)


def test_each_pod_caches_the_model_in_its_own_claim(scene: Scene, on_disks: dict[str, Path]) -> None:
    with running_hub(API_IP) as hub:
        cache = {"type": "NodeLocal", "storageClassName": LOCAL, "size": "1Gi"}
        scene.apply(fetching(scene, hub, cache, replicas=1, pods=2))
        scene.wait_ready(1, 500)
    pods, bound = scene.pods(), {claim["metadata"]["name"]: claim for claim in scene.get("persistentvolumeclaims")["items"]}
    own = {name: next(claim for claim in bound if claim.startswith(f"{name}-")) for name in pods}
    assert len(pods) == len(set(own.values())) == 2
    for name, pod in pods.items():
        claim = bound[own[name]]
        assert claim["metadata"]["ownerReferences"][0]["uid"] == pod["metadata"]["uid"], "the pod owns it"
        volume = claim["spec"]["volumeName"]
        assert volume.startswith(f"{LOCAL}-{pod['spec']['nodeName']}-"), "a disk of the pod's node"
        assert list(on_disks[volume].rglob("*.safetensors")), "the disk has the model"
    assert scene.condition("ModelCached") == ("True", "Cached")
    assert scene.status()["model"]["cachedNodes"] == len({pod["spec"]["nodeName"] for pod in pods.values()})
    body = {"model": "tiny", "prompt": "from the disk", "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{scene.url}/v1/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 8)
    scene.delete_service()
    svc.wait_for(
        lambda: not set(own.values()) & {c["metadata"]["name"] for c in scene.get("pvc")["items"]}, 60, "no claim remains"
    )
