"""S44, S47, S49: rejected manifests, isolation of services, no writes without changes; and quotas.

S30 and S43 are in tests/cluster/test_operator.py.
"""

import json
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import operator as installation
from tests.cluster import service as svc
from tests.cluster.config import API_IP
from tests.cluster.rule_cases import TARGETS
from tests.cluster.scenes import Scene
from tests.cluster.sources import NAME, fetching
from tests.cluster.watching import writes
from tests.runtime.checkpoint.hub import HubServer, running_hub
from tools.errors import Failed

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
CALM_S = 60.0
HELD_S = 75.0
"""Time without room in the quota."""
TABLE: list[tuple[str, dict[str, Any]]] = [
    ("spec.replicas", {"replicas": -1}),
    ("spec.parallelism.tensor", {"parallelism": {"tensor": 0}}),
    ("spec.parallelism.pipeline", {"parallelism": {"pipeline": 0}}),
    ("spec.parallelism.gpusPerPod", {"parallelism": {"tensor": 4, "gpusPerPod": 3}}),
    ("spec.autoscaling.minReplicas", {"autoscaling": {"minReplicas": 5, "maxReplicas": 4, "targets": TARGETS}}),
    ("spec.rollout.maxUnavailable", {"rollout": {"maxUnavailable": 0, "maxSurge": 0}}),
    ("spec.model.uri", {"model": {"uri": "ftp://host/x"}}),
]


@pytest.mark.parametrize(("field", "spec"), TABLE, ids=[field for field, _ in TABLE])
def test_s44_invalid_manifest_is_rejected_with_its_field(scene: Scene, field: str, spec: dict[str, Any]) -> None:
    manifest = scene.manifest()
    manifest["spec"] |= spec
    with pytest.raises(Failed, match=rf"{re.escape(field)}\b"):
        scene.apply(manifest)


def test_s44_too_long_name_is_rejected_with_its_field(scene: Scene) -> None:
    with pytest.raises(Failed, match=r"metadata\.name"):
        scene.apply(scene.manifest(name="a" * 41))


@pytest.fixture
def hub(scene: Scene, tmp_path: Path) -> Iterator[HubServer]:
    """A model source with a private model, and a claim for it. The service `broken` is deleted at the end."""
    if scene.cluster.files is None:
        pytest.skip("the folder and the source are of this machine")
    tmp_path.chmod(0o777)  # pods run as another user
    scene.cluster.claim(scene.namespace, "fetched", tmp_path, access="ReadWriteMany")
    with running_hub(API_IP) as server:
        server.private[NAME] = "right"
        yield server
        scene.delete_service("broken")


def create_secret(scene: Scene, name: str, **texts: str) -> None:
    """Creates a Secret."""
    scene.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": texts})


def request_status(scene: Scene, name: str, key: str = "") -> int:
    """Returns the HTTP status of a request, with an API key if given."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": "tiny", "prompt": "a request", "max_tokens": 4}
    return httpx.post(f"{scene.address(name)}/v1/completions", json=body, headers=headers, timeout=60).status_code


def test_s47_failing_service_does_not_affect_others(scene: Scene, hub: HubServer) -> None:
    """Its credentials are wrong, so every start fails. It serves with the right ones, and with API keys only clients that have
    one."""
    scene.apply(scene.manifest(replicas=1, pods=1))
    scene.wait_ready(1, 300)
    create_secret(scene, "hub", token="wrong")
    broken = fetching(scene, hub, {"type": "Shared", "claimName": "fetched"}, replicas=1, pods=1, name="broken")
    broken["spec"]["model"]["secretRef"] = {"name": "hub"}
    scene.apply(broken)
    svc.wait_for(lambda: scene.status("broken").get("groups"), 60, "the broken service is attempted")
    time.sleep(10)
    before = scene.get("infsvc", "chat")["metadata"]["resourceVersion"]
    restarts = svc.wait_for(lambda: num_restarts(scene, "broken") or None, 180, "it fails")
    svc.wait_for(lambda: num_restarts(scene, "broken") > restarts, 120, "it fails again")
    assert scene.get("infsvc", "chat")["metadata"]["resourceVersion"] == before
    failed = ("False", "AuthFailed")
    svc.wait_for(lambda: scene.condition("ModelCached", "broken") == failed, 120, "the status reports it")  # not while it starts
    create_secret(scene, "hub", token="right")
    svc.wait_for(lambda: scene.condition("Ready", "broken")[0] == "True", 400, "it serves with the right credentials")
    assert scene.condition("ModelCached", "broken") == ("True", "Cached")
    assert request_status(scene, "broken") == 200, "no API key is needed"
    create_secret(scene, "clients", keys="alice sk-alice\n")
    routers = "phalanx.dev/component=router,phalanx.dev/service=broken"
    former = set(scene.pods(routers))
    scene.patch({"router": {"apiKeys": {"name": "clients"}}}, "broken")
    svc.wait_for(lambda: request_status(scene, "broken") == 401, 120, "a request without API key is rejected")
    svc.wait_for(lambda: not former & set(scene.pods(routers)), 120, "no former router remains")
    assert (request_status(scene, "broken", "sk-alice"), request_status(scene, "broken", "sk-bob")) == (200, 401)


def status_texts(scene: Scene, name: str) -> str:
    """Returns the texts of the groups' status and of the conditions."""
    status = scene.status(name)
    texts = [group["reason"] for group in status.get("groups", [])] + [c["message"] for c in status.get("conditions", [])]
    return " ".join(texts)


def num_restarts(scene: Scene, name: str) -> int:
    """Returns the restarts of a service's groups, by its status."""
    return sum(int(group.get("restarts", 0)) for group in scene.status(name).get("groups", []))


def operator_writes(scene: Scene) -> float:
    """Returns the number of writes of the operators."""
    query = ("-n", installation.NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=phalanx-operator", "-o", "json")
    addresses = [pod["status"]["podIP"] for pod in json.loads(scene.cluster.kubectl(*query))["items"]]
    return sum(writes(httpx.get(f"http://{address}:8080/metrics", timeout=10).text) for address in addresses)


def versions(scene: Scene) -> dict[str, str]:
    """Returns the version of the service, its objects and its events."""
    kinds = "infsvc,statefulsets,deployments,pods,services,secrets,configmaps,poddisruptionbudgets,networkpolicies,roles,events"
    items = scene.get(kinds)["items"]
    return {f"{item['kind']}/{item['metadata']['name']}": item["metadata"]["resourceVersion"] for item in items}


def test_s49_unchanged_service_causes_no_write(scene: Scene) -> None:
    if not scene.get("infsvc")["items"]:
        scene.apply(scene.manifest(replicas=1, pods=1))
    scene.wait_ready(1, 300)
    time.sleep(15)
    before, writes_before = versions(scene), operator_writes(scene)
    time.sleep(CALM_S)
    assert versions(scene) == before
    assert operator_writes(scene) == writes_before
    assert writes_before > 0, "this operator has written before"
    scene.delete_service()


@pytest.fixture
def tight(scene: Scene) -> Iterator[Scene]:
    """A namespace with the quota `few`. It is deleted at the end, with the service."""
    scene.delete_service()
    yield scene
    scene.kubectl("delete", "resourcequota", "few", "--ignore-not-found")
    scene.delete_service()


def allow(scene: Scene, count: int, resource: str = "pods") -> None:
    """Sets the quota."""
    hard = {resource: str(count)}
    scene.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": hard}})
    svc.wait_for(lambda: scene.get("resourcequota", "few").get("status", {}).get("hard") == hard, 60, "the quota holds")


def test_exceeded_quota_is_reported_until_raised(tight: Scene) -> None:
    """The quota rejects the router, and then one of two pods of the group, until controllers wait minutes between retries."""
    allow(tight, 0)
    tight.apply(tight.manifest(replicas=0, pods=2))
    svc.wait_for(lambda: tight.condition("Ready") == ("False", "QuotaExceeded"), 60, "the router is rejected")
    assert tight.condition("RouterReady") == ("False", "RouterNotReady")
    time.sleep(HELD_S)
    allow(tight, 2)
    svc.wait_for(lambda: tight.condition("RouterReady")[0] == "True", 120, "a router")
    tight.scale(1)
    svc.wait_for(lambda: tight.condition("Ready") == ("False", "QuotaExceeded"), 60, "the status reports it")
    assert tight.condition("CapacityAvailable") == ("False", "QuotaExceeded")
    assert "exceeded quota: few" in status_texts(tight, "chat")
    svc.wait_for(lambda: ("Warning", "QuotaExceeded") in tight.events(), 30, "an event")
    before = {name: body["metadata"]["uid"] for name, body in tight.sets().items()}
    time.sleep(HELD_S)
    assert len(tight.pods()) == 1 and tight.condition("Ready") == ("False", "QuotaExceeded")
    allow(tight, 3)
    started_s = time.monotonic()
    svc.wait_for(lambda: len(tight.pods()) == 2, 120, "the pod is created")
    print(
        f"after {HELD_S:.0f} s without room the pod was created {time.monotonic() - started_s:.1f} s after the quota was raised"
    )
    tight.wait_ready(1, 300)
    assert {name: body["metadata"]["uid"] for name, body in tight.sets().items()} == before, "the same group"
    assert tight.condition("CapacityAvailable") == ("True", "Scheduled")


def test_quota_on_groups_is_reported_and_followed(tight: Scene) -> None:
    allow(tight, 1, "count/statefulsets.apps")
    tight.apply(tight.manifest(replicas=2, pods=1))
    svc.wait_for(lambda: tight.condition("CapacityAvailable") == ("False", "QuotaExceeded"), 60, "the status reports it")
    assert tight.condition("Ready") == ("False", "QuotaExceeded")
    assert "count/statefulsets.apps" in status_texts(tight, "chat")
    svc.wait_for(lambda: tight.condition("Available") == ("True", "Serving"), 300, "the allowed group serves")
    (first,) = tight.sets()
    allow(tight, 2, "count/statefulsets.apps")
    tight.wait_ready(2, 300)
    assert first in tight.sets()
    assert tight.condition("CapacityAvailable") == ("True", "Scheduled")
