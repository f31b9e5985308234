"""The test cluster: scheduling, DNS, pod and Service traffic, admission, volumes, torch in a restricted pod."""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import claims
from tests.cluster.config import BUSYBOX_IMAGE, GPU_RESOURCE, LOCKED, NODES
from tests.cluster.fixtures import Cluster
from tools.errors import Failed

pytestmark = pytest.mark.cluster
NAMESPACE = "cluster-itself"
SERVER = "import http.server; http.server.test(http.server.SimpleHTTPRequestHandler, port=8080, bind='0.0.0.0')"
FETCH = "import sys, urllib.request; print(urllib.request.urlopen(sys.argv[1], timeout=3).status)"


def pod(cluster: Cluster, name: str, node: str, *command: str, **fields: Any) -> dict[str, Any]:
    """Returns a pod of the runtime image that meets the restricted Pod Security Standard."""
    container = {"name": "c", "image": cluster.image("runtime"), "command": list(command), "securityContext": LOCKED}
    security = {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
    spec = {
        "nodeName": node,
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 0,
        "securityContext": security,
        "containers": [{**container, **fields}],
        "volumes": [{"name": "site", "persistentVolumeClaim": {"claimName": claims.SITE_PACKAGES_CLAIM, "readOnly": True}}],
    }
    metadata = {"name": name, "namespace": NAMESPACE, "labels": {"app": name}}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def service(name: str, headless: bool) -> dict[str, Any]:
    """Returns a Service of the pod `server`."""
    spec: dict[str, Any] = {"selector": {"app": "server"}, "ports": [{"port": 8080}]}
    if headless:
        spec["clusterIP"] = "None"
    return {"apiVersion": "v1", "kind": "Service", "metadata": {"name": name, "namespace": NAMESPACE}, "spec": spec}


@pytest.fixture(scope="module")
def pods(cluster: Cluster) -> Iterator[Cluster]:
    """A restricted namespace with a web server on one node, a client on the other, and two Services."""
    if cluster.files is None:
        pytest.skip("needs the cluster of this machine")
    enforce = {"pod-security.kubernetes.io/enforce": "restricted"}
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": enforce}}
    cluster.kubectl("delete", "namespace", NAMESPACE, "--ignore-not-found")
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(namespace))
    cluster.claim_site_packages(NAMESPACE)
    objects = [
        pod(cluster, "server", NODES[0].name, "python3", "-c", SERVER),
        pod(cluster, "client", NODES[1].name, "python3", "-c", "import time; time.sleep(600)"),
        service("one", headless=False),
        service("many", headless=True),
    ]
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects}))
    cluster.kubectl("-n", NAMESPACE, "wait", "--for=condition=Ready", "pod/server", "pod/client", "--timeout=60s")
    yield cluster
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")
    cluster.kubectl("delete", "persistentvolume", "--wait=false", claims.volume_name(NAMESPACE, claims.SITE_PACKAGES_CLAIM))


def fetch(cluster: Cluster, url: str) -> str:
    """Returns the response to the client pod. Retries: rules follow endpoints within a second."""
    end = time.monotonic() + 20
    while True:
        try:
            return cluster.kubectl("-n", NAMESPACE, "exec", "client", "--", "python3", "-c", FETCH, url).strip()
        except Failed:
            if time.monotonic() > end:
                raise


def test_both_nodes_are_ready_and_offer_eight_gpus(pods: Cluster) -> None:
    nodes = json.loads(pods.kubectl("get", "nodes", "-o", "json"))["items"]
    ready = {x["metadata"]["name"]: c["status"] for x in nodes for c in x["status"]["conditions"] if c["type"] == "Ready"}
    assert ready == {node.name: "True" for node in NODES}
    assert [x["status"]["allocatable"][GPU_RESOURCE] for x in nodes] == ["8", "8"]


@pytest.mark.parametrize(
    "url",
    [
        pytest.param(f"http://one.{NAMESPACE}.svc.cluster.local:8080/", id="Service by full name"),
        pytest.param("http://one:8080/", id="Service by short name"),
        pytest.param(f"http://many.{NAMESPACE}.svc.cluster.local:8080/", id="headless Service"),
    ],
)
def test_services_resolve_to_the_other_node(pods: Cluster, url: str) -> None:
    assert fetch(pods, url) == "200"


def test_pod_reaches_a_pod_on_the_other_node(pods: Cluster) -> None:
    address = pods.kubectl("-n", NAMESPACE, "get", "pod", "server", "-o", "jsonpath={.status.podIP}")
    assert fetch(pods, f"http://{address}:8080/") == "200"


def test_this_process_reaches_services(pods: Cluster) -> None:
    address = pods.kubectl("-n", NAMESPACE, "get", "service", "one", "-o", "jsonpath={.spec.clusterIP}")
    assert pods.run("python3", "-c", FETCH, f"http://{address}:8080/").strip() == "200"


def test_a_restricted_pod_imports_torch_from_the_claim(pods: Cluster) -> None:
    fields = {
        "env": [{"name": "PYTHONPATH", "value": claims.SITE_PACKAGES_PATH}],
        "volumeMounts": [{"name": "site", "mountPath": claims.SITE_PACKAGES_PATH, "readOnly": True}],
    }
    source = "import os, torch, phalanx_api; print(os.getuid(), int(torch.ones(3).sum()))"
    pods.kubectl("apply", "-f", "-", stdin=json.dumps(pod(pods, "torch", NODES[1].name, "python3", "-c", source, **fields)))
    pods.kubectl("-n", NAMESPACE, "wait", "--for=jsonpath={.status.phase}=Succeeded", "pod/torch", "--timeout=120s")
    assert pods.kubectl("-n", NAMESPACE, "logs", "torch").split() == ["65532", "3"]


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        pytest.param({"securityContext": {}}, "allowPrivilegeEscalation", id="no security context"),
        pytest.param({"securityContext": {"privileged": True}}, "privileged", id="privileged"),
        pytest.param({"securityContext": {**LOCKED, "runAsUser": 0}}, "runAsUser", id="root"),
    ],
)
def test_pod_security_rejects_a_pod(pods: Cluster, fields: dict[str, Any], reason: str) -> None:
    bad = pod(pods, "bad", NODES[0].name, "true", **{"image": BUSYBOX_IMAGE, **fields})
    with pytest.raises(Failed, match=f"violates PodSecurity.*{reason}"):
        pods.kubectl("apply", "-f", "-", stdin=json.dumps(bad))


def test_more_gpus_than_a_node_has_are_not_scheduled(pods: Cluster) -> None:
    greedy = pod(pods, "greedy", "", "true", resources={"limits": {GPU_RESOURCE: "9"}})
    del greedy["spec"]["nodeName"]
    pods.kubectl("apply", "-f", "-", stdin=json.dumps(greedy))
    pods.kubectl("-n", NAMESPACE, "wait", "--for=condition=PodScheduled=False", "pod/greedy", "--timeout=30s")
    assert f"Insufficient {GPU_RESOURCE}" in pods.kubectl("-n", NAMESPACE, "get", "pod", "greedy", "-o", "json")
