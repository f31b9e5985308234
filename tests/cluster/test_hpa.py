"""An HPA scales a service 1, 2, 1 by an external metric, and the test scales to 0 and 1 like KEDA, by the operator's gauge."""

import asyncio
import base64
import json
import ssl
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from tests.cluster import external_metrics, tiny_model
from tests.cluster import operator as installation
from tests.cluster import service as svc
from tests.cluster.chat import Chat
from tests.cluster.config import LOCKED
from tests.cluster.fixtures import Cluster
from tools.shell import output

pytestmark = pytest.mark.cluster
NAME = "chat"
API_SERVICE = f"{external_metrics.VERSION}.{external_metrics.GROUP}"
SAMPLE = Path(__file__).parents[2] / "manifests" / "samples" / "hpa.yaml"


class ScaledService(Chat):
    """The service under test, its HPA and metric."""

    def set_metric(self, value: int) -> None:
        """Sets the number of groups that the HPA reads."""
        address = self.get("pod", "external-metrics")["status"]["podIP"]
        trust = ssl.create_default_context()
        trust.check_hostname, trust.verify_mode = False, ssl.CERT_NONE
        httpx.put(f"https://{address}:8443/value", content=str(value), verify=trust, timeout=10).raise_for_status()

    @property
    def body(self) -> dict[str, Any]:
        body: dict[str, Any] = self.get("infsvc", NAME)
        return body

    @property
    def replicas(self) -> int:
        return int(self.body["spec"]["replicas"])

    def is_desired(self, groups: int) -> bool:
        """Whether the leader's gauge, which KEDA reads, has this value."""
        query = ("-n", installation.NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=phalanx-operator", "-o", "json")
        addresses = [pod["status"]["podIP"] for pod in json.loads(self.cluster.kubectl(*query))["items"]]
        pages = [httpx.get(f"http://{address}:8080/metrics", timeout=10).text for address in addresses]
        gauge = f'{external_metrics.METRIC}{{namespace="{self.namespace}",service="{NAME}"}}'
        return any(f"{gauge} {groups}.0" in page.splitlines() for page in pages)

    def scale(self, groups: int) -> None:
        """Writes the scale subresource."""
        self.kubectl("scale", "infsvc", NAME, f"--replicas={groups}")

    def is_empty(self) -> bool:
        """Whether the service is scaled to zero, without pods of groups."""
        return self.condition("Ready") == ("True", "ScaledToZero") and not self.groups() and not self.pods()

    def writers(self) -> set[str]:
        """Returns the managers of `spec.replicas`."""
        text = self.kubectl("get", "infsvc", NAME, "-o", "json", "--show-managed-fields")
        entries = json.loads(text)["metadata"]["managedFields"]
        return {e["manager"] for e in entries if "f:replicas" in e.get("fieldsV1", {}).get("f:spec", {})}

    def condition(self, kind: str, resource: str = "infsvc") -> tuple[str, str]:
        conditions = self.get(resource, NAME).get("status", {}).get("conditions", [])
        return {c["type"]: (c["status"], c["reason"]) for c in conditions}.get(kind, ("", ""))


def metrics_pod(cluster: Cluster, namespace: str, folder: Path) -> list[dict[str, Any]]:
    """Returns the pod that serves the metric, with its program, certificate, Service and APIService."""
    key, certificate = folder / "tls.key", folder / "tls.crt"
    how = ("-x509", "-newkey", "rsa:2048", "-nodes", "-days", "2", "-subj", "/CN=external-metrics")
    output("openssl", "req", *how, "-keyout", key, "-out", certificate)
    files = {path.name: base64.b64encode(path.read_bytes()).decode() for path in (key, certificate)}
    metadata = {"name": "external-metrics", "namespace": namespace}
    mounts = [{"name": "program", "mountPath": "/program"}, {"name": "keys", "mountPath": "/keys"}]
    container = {
        "name": "c",
        "image": cluster.image("operator"),
        "command": ["python3", "/program/external_metrics.py", "/keys/tls.crt", "/keys/tls.key", "8443"],
        "securityContext": LOCKED,
        "volumeMounts": mounts,
        "readinessProbe": {"tcpSocket": {"port": 8443}, "periodSeconds": 1},
    }
    pod = {
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": 65532,
            "runAsGroup": 65532,
            "fsGroup": 65532,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "terminationGracePeriodSeconds": 0,
        "containers": [container],
        "volumes": [
            {"name": "program", "configMap": {"name": "external-metrics"}},
            {"name": "keys", "secret": {"secretName": "external-metrics"}},
        ],
    }
    program = Path(external_metrics.__file__).read_text()
    service = {"selector": {"app": "external-metrics"}, "ports": [{"port": 443, "targetPort": 8443}]}
    api = {
        "group": external_metrics.GROUP,
        "version": external_metrics.VERSION,
        "groupPriorityMinimum": 100,
        "versionPriority": 100,
        "insecureSkipTLSVerify": True,
        "service": {"name": "external-metrics", "namespace": namespace},
    }
    return [
        {"apiVersion": "v1", "kind": "ConfigMap", "metadata": metadata, "data": {"external_metrics.py": program}},
        {"apiVersion": "v1", "kind": "Secret", "metadata": metadata, "data": files},
        {"apiVersion": "v1", "kind": "Pod", "metadata": {**metadata, "labels": {"app": "external-metrics"}}, "spec": pod},
        {"apiVersion": "v1", "kind": "Service", "metadata": metadata, "spec": service},
        {"apiVersion": "apiregistration.k8s.io/v1", "kind": "APIService", "metadata": {"name": API_SERVICE}, "spec": api},
    ]


def apply(scaled: ScaledService, *objects: dict[str, Any]) -> None:
    body = {"apiVersion": "v1", "kind": "List", "items": list(objects)}
    scaled.kubectl("apply", "-f", "-", stdin=json.dumps(body))


@pytest.fixture(scope="module")
def scaled(cluster: Cluster, operator: str, namespace: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[ScaledService]:
    """The service with one group and an HPA, as in the sample except for the model."""
    cluster.claim(namespace, "models", tiny_model.folder())
    scaled = ScaledService(cluster, namespace)
    sample, hpa = yaml.safe_load_all(SAMPLE.read_text())
    model = f"pvc://models/{tiny_model.NAME}"
    manifest = svc.manifest(NAME, model=model, replicas=1, servedNames=["tiny"], autoscaling=sample["spec"]["autoscaling"])
    del manifest["spec"]["podTemplate"]["spec"]["topologySpreadConstraints"]
    manifest["spec"]["engine"] |= {"kvCacheMemory": "64Mi"}
    apply(scaled, cluster.with_site_packages(manifest))
    try:
        apply(scaled, *metrics_pod(cluster, namespace, tmp_path_factory.mktemp("keys")))
        cluster.kubectl("wait", "--for=condition=Available", f"apiservice/{API_SERVICE}", "--timeout=60s")
        scaled.wait_ready(1)
        scaled.set_metric(1)
        apply(scaled, hpa)
        yield scaled
    finally:  # otherwise discovery and the deletion of namespaces fail
        cluster.kubectl("delete", "apiservice", API_SERVICE, "--ignore-not-found")
        scaled.kubectl("delete", "hpa,infsvc", NAME, "--ignore-not-found")


def test_hpa_reads_metric_and_scale_subresource(scaled: ScaledService) -> None:
    svc.wait_for(lambda: scaled.condition("ScalingActive", "hpa")[0] == "True", 90, "the HPA reads its metric")
    assert scaled.condition("AbleToScale", "hpa")[0] == "True"
    assert scaled.condition("ScalingActive") == ("True", "External")
    assert scaled.replicas == 1


def test_hpa_scales_to_two_and_back_to_one(scaled: ScaledService) -> None:
    scaled.set_metric(2)
    svc.wait_for(lambda: scaled.replicas == 2, 90, "two groups are desired")
    scaled.wait_ready(2)
    assert scaled.writers() == {"kube-controller-manager"}
    first = set(scaled.groups())
    scaled.set_metric(1)
    svc.wait_for(lambda: scaled.replicas == 1, 90, "one group is desired")
    scaled.wait_ready(1)
    assert set(scaled.groups()) < first
    assert scaled.condition("ScalingActive") == ("True", "External")


ZERO = {"minReplicas": 0, "scaleToZero": {"enabled": True, "idleSeconds": 20}}
REQUEST = {"model": "tiny", "prompt": "wake up", "max_tokens": 16, "ignore_eos": True}


def test_hpa_scales_from_zero_while_a_request_waits(scaled: ScaledService) -> None:
    scaled.kubectl("patch", "infsvc", NAME, "--type=merge", "-p", json.dumps({"spec": {"autoscaling": ZERO}}))
    svc.wait_for(lambda: scaled.is_desired(0), 300, "idle, no group is desired")
    assert scaled.replicas == 1, "the operator does not write it"
    scaled.scale(0)
    svc.wait_for(scaled.is_empty, 120, "the group is deleted")
    svc.wait_for(lambda: scaled.condition("ScalingActive", "hpa") == ("False", "ScalingDisabled"), 90, "the HPA is disabled at 0")
    with ThreadPoolExecutor(1) as threads:
        answers = threads.submit(lambda: asyncio.run(svc.stream_all(scaled.url, [REQUEST])))
        svc.wait_for(lambda: scaled.is_desired(1), 90, "a waiting request needs a group")
        assert (scaled.replicas, answers.done()) == (0, False)
        scaled.scale(1)
        (answer,) = answers.result(240)
    assert (answer.error, answer.finish, answer.usage) == (None, "length", 16)
    svc.wait_for(lambda: scaled.condition("ScalingActive", "hpa")[0] == "True", 90, "the HPA is active again")
    svc.wait_for(lambda: scaled.is_desired(0), 300, "it is idle again")
    scaled.scale(0)
    svc.wait_for(scaled.is_empty, 120, "the group is deleted again")
