"""S44, S47, S49: what the API server refuses, services that leave one another alone, an operator that leaves rest alone. Quota.

S30 (an upgrade of the operator moves no pod) and S43 (two operators) are tests/cluster/test_operator.py.
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
"""For how long a quota leaves no room."""
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
def test_s44_a_bad_manifest_is_refused_naming_the_field(scene: Scene, field: str, spec: dict[str, Any]) -> None:
    manifest = scene.manifest()
    manifest["spec"] |= spec
    with pytest.raises(Failed, match=rf"{re.escape(field)}\b"):
        scene.apply(manifest)


def test_s44_too_long_name_is_refused_with_its_field(scene: Scene) -> None:
    with pytest.raises(Failed, match=r"metadata\.name"):
        scene.apply(scene.manifest(name="a" * 41))


@pytest.fixture
def hub(scene: Scene, tmp_path: Path) -> Iterator[HubServer]:
    """A source that knows who may have its model, beside a claim to keep it. The service `broken` is gone afterwards."""
    if scene.cluster.files is None:
        pytest.skip("the folder and the source are of this machine")
    tmp_path.chmod(0o777)  # pods run as nobody
    scene.cluster.claim(scene.namespace, "fetched", tmp_path, access="ReadWriteMany")
    with running_hub(API_IP) as server:
        server.private[NAME] = "right"
        yield server
        scene.gone("broken")


def secret(scene: Scene, name: str, **texts: str) -> None:
    """Nothing; the namespace has such a Secret."""
    scene.apply({"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": texts})


def asked(scene: Scene, name: str, key: str = "") -> int:
    """The status of the answer to a request, with this API key if there is one."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    body = {"model": "tiny", "prompt": "who asks", "max_tokens": 4}
    return httpx.post(f"{scene.address(name)}/v1/completions", json=body, headers=headers, timeout=60).status_code


def test_s47_failing_service_does_not_affect_others(scene: Scene, hub: HubServer) -> None:
    """Its credentials are wrong, which ends each start at once. With the right ones it serves; with keys, who has one."""
    scene.apply(scene.manifest(replicas=1, pods=1))
    scene.wait_ready(1, 300)
    secret(scene, "hub", token="wrong")
    broken = fetching(scene, hub, {"type": "Shared", "claimName": "fetched"}, replicas=1, pods=1, name="broken")
    broken["spec"]["model"]["secretRef"] = {"name": "hub"}
    scene.apply(broken)
    svc.wait_for(lambda: scene.status("broken").get("groups"), 60, "the broken one is tried")
    time.sleep(10)
    before = scene.get("infsvc", "chat")["metadata"]["resourceVersion"]
    died = svc.wait_for(lambda: deaths(scene, "broken") or None, 180, "it dies")
    svc.wait_for(lambda: deaths(scene, "broken") > died, 120, "it dies again")
    assert scene.get("infsvc", "chat")["metadata"]["resourceVersion"] == before
    told = ("False", "AuthFailed")
    svc.wait_for(lambda: scene.condition("ModelCached", "broken") == told, 120, "the status says why")  # not while it starts
    secret(scene, "hub", token="right")
    svc.wait_for(lambda: scene.condition("Ready", "broken")[0] == "True", 400, "it serves with the right ones")
    assert scene.condition("ModelCached", "broken") == ("True", "Cached")
    assert asked(scene, "broken") == 200, "anybody may ask"
    secret(scene, "clients", keys="alice sk-alice\n")
    routers = "phalanx.dev/component=router,phalanx.dev/service=broken"
    former = set(scene.pods(routers))
    scene.patch({"router": {"apiKeys": {"name": "clients"}}}, "broken")
    svc.wait_for(lambda: asked(scene, "broken") == 401, 120, "who has no key may not ask any more")
    svc.wait_for(lambda: not former & set(scene.pods(routers)), 120, "no router is left that asks for none")
    assert (asked(scene, "broken", "sk-alice"), asked(scene, "broken", "sk-bob")) == (200, 401)


def said(scene: Scene, name: str) -> str:
    """What the status says of the groups, and of the whole."""
    status = scene.status(name)
    texts = [group["reason"] for group in status.get("groups", [])] + [one["message"] for one in status.get("conditions", [])]
    return " ".join(texts)


def deaths(scene: Scene, name: str) -> int:
    """How often the groups of a service died, as its status says."""
    return sum(int(group.get("restarts", 0)) for group in scene.status(name).get("groups", []))


def operator_writes(scene: Scene) -> float:
    """Calls of the operators that change anything, but for its Lease; by its own count."""
    of = ("-n", installation.NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=phalanx-operator", "-o", "json")
    addresses = [pod["status"]["podIP"] for pod in json.loads(scene.cluster.kubectl(*of))["items"]]
    return sum(writes(httpx.get(f"http://{address}:8080/metrics", timeout=10).text) for address in addresses)


def versions(scene: Scene) -> dict[str, str]:
    """The version of every object of the service, of the service itself and of its events."""
    kinds = "infsvc,statefulsets,deployments,pods,services,secrets,configmaps,poddisruptionbudgets,networkpolicies,roles,events"
    items = scene.get(kinds)["items"]
    return {f"{one['kind']}/{one['metadata']['name']}": one["metadata"]["resourceVersion"] for one in items}


def test_s49_a_service_at_rest_costs_no_write(scene: Scene) -> None:
    if not scene.get("infsvc")["items"]:
        scene.apply(scene.manifest(replicas=1, pods=1))
    scene.wait_ready(1, 300)
    time.sleep(15)
    before, wrote = versions(scene), operator_writes(scene)
    time.sleep(CALM_S)
    assert versions(scene) == before
    assert operator_writes(scene) == wrote
    assert wrote > 0, "the count is of this operator"
    scene.gone()


@pytest.fixture
def tight(scene: Scene) -> Iterator[Scene]:
    """A namespace whose scenario makes the quota `few`, which is gone afterwards, and so is the service."""
    scene.gone()
    yield scene
    scene.kubectl("delete", "resourcequota", "few", "--ignore-not-found")
    scene.gone()


def allow(scene: Scene, count: int, what: str = "pods") -> None:
    """Nothing; the namespace may have so many of them from now on."""
    hard = {what: str(count)}
    scene.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "few"}, "spec": {"hard": hard}})
    svc.wait_for(lambda: scene.get("resourcequota", "few").get("status", {}).get("hard") == hard, 60, "the quota holds")


def test_quota_refusal_is_reported_and_ends_with_the_quota(tight: Scene) -> None:
    """First there is no room for the router, then for one of two pods of the group. Meanwhile their controllers come to wait for
    minutes between two tries."""
    allow(tight, 0)
    tight.apply(tight.manifest(replicas=0, pods=2))
    svc.wait_for(lambda: tight.condition("Ready") == ("False", "QuotaExceeded"), 60, "the router is refused")
    assert tight.condition("RouterReady") == ("False", "RouterNotReady")
    time.sleep(HELD_S)
    allow(tight, 2)
    svc.wait_for(lambda: tight.condition("RouterReady")[0] == "True", 120, "a router")
    tight.scale(1)
    svc.wait_for(lambda: tight.condition("Ready") == ("False", "QuotaExceeded"), 60, "the status says why")
    assert tight.condition("CapacityAvailable") == ("False", "QuotaExceeded")
    assert "exceeded quota: few" in said(tight, "chat")
    svc.wait_for(lambda: ("Warning", "QuotaExceeded") in tight.events(), 30, "and an event")
    held = {name: one["metadata"]["uid"] for name, one in tight.sets().items()}
    time.sleep(HELD_S)
    assert len(tight.pods()) == 1 and tight.condition("Ready") == ("False", "QuotaExceeded")
    allow(tight, 3)
    began = time.monotonic()
    svc.wait_for(lambda: len(tight.pods()) == 2, 120, "the pod is made")
    print(f"after {HELD_S:.0f} s without room the pod was made {time.monotonic() - began:.1f} s after the quota was raised")
    tight.wait_ready(1, 300)
    assert {name: one["metadata"]["uid"] for name, one in tight.sets().items()} == held, "the same group"
    assert tight.condition("CapacityAvailable") == ("True", "Scheduled")


def test_quota_on_groups_is_reported_and_followed(tight: Scene) -> None:
    allow(tight, 1, "count/statefulsets.apps")
    tight.apply(tight.manifest(replicas=2, pods=1))
    svc.wait_for(lambda: tight.condition("CapacityAvailable") == ("False", "QuotaExceeded"), 60, "the status says why")
    assert tight.condition("Ready") == ("False", "QuotaExceeded")
    assert "count/statefulsets.apps" in said(tight, "chat")
    svc.wait_for(lambda: tight.condition("Available") == ("True", "Serving"), 300, "the group that there may be serves")
    (first,) = tight.sets()
    allow(tight, 2, "count/statefulsets.apps")
    tight.wait_ready(2, 300)
    assert first in tight.sets()
    assert tight.condition("CapacityAvailable") == ("True", "Scheduled")
