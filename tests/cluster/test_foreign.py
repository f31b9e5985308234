"""What we write for other projects is what their own CRDs take, by the API server with strict validation."""

import copy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from phalanx_operator.render import exposed, gangs, monitoring
from tests.cluster.fixtures import Cluster
from tests.control.builders import make_service
from tools.errors import Failed

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
PLACEMENT = {"queueName": "team", "priorityClassName": "high"}
GATEWAY = {"name": "public", "namespace": "gateways", "sectionName": "https"}
DOORS: dict[str, dict[str, Any]] = {
    "route": {"type": "HTTPRoute", "hosts": ["chat.example.com"], "gateway": GATEWAY, "annotations": {"a": "b"}},
    "ingress": {"type": "Ingress", "hosts": ["chat.example.com"], "className": "nginx", "tlsSecretName": "chat-tls"},
}


def documents(path: str) -> list[dict[str, Any]]:
    return list(yaml.safe_load_all((ROOT / "manifests" / path).read_text()))


def written() -> dict[str, dict[str, Any]]:
    """Every object that the operator or the manifests have for another project, by a name for the test."""
    service = make_service(parallelism={"tensor": 4, "gpusPerPod": 2}, placement=PLACEMENT)
    (pod_group,) = gangs.of_kind("Volcano").objects(service, "chat-g-xxxxx", "uid-9", 2)
    found = [*monitoring.objects(service), *documents("components/monitoring/monitors.yaml"), pod_group]
    found += [body for body in documents("samples/keda.yaml") if body["kind"] == "ScaledObject"]
    for door in DOORS.values():
        found += [body for body, is_wanted in exposed.objects(make_service(router={"expose": door})) if is_wanted]
    return {f"{body['kind']} {body['metadata']['name']}": body for body in found}


@pytest.fixture(scope="module")
def foreign(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the CRDs of the other projects; those that were not there go again."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.cluster", "crds"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    files = sorted(Path(done.stdout.strip()).glob("*.yaml"))
    names = [body["metadata"]["name"] for path in files for body in yaml.safe_load_all(path.read_text()) if body]
    there = set(cluster.kubectl("get", "crd", "-o", "jsonpath={.items[*].metadata.name}").split())
    new = [name for name in names if name not in there]
    try:
        for path in files:
            if any(name in path.read_text() for name in new):
                cluster.kubectl("apply", "--server-side", "-f", str(path))
        cluster.kubectl("wait", "--for=condition=Established", *(f"crd/{name}" for name in names), "--timeout=60s")
        yield cluster
    finally:
        if new:
            cluster.kubectl("delete", "crd", "--ignore-not-found", *new)


def ask(cluster: Cluster, body: dict[str, Any]) -> str:
    """What the API server says to the object, in a namespace that is there. Nothing is made."""
    body = copy.deepcopy(body)
    body["metadata"]["namespace"] = "default"
    command = ("create", "--dry-run=server", "--validate=strict", "-f", "-")
    end = time.monotonic() + 30
    while True:
        try:
            return cluster.kubectl(*command, stdin=yaml.safe_dump(body))
        except Failed as error:  # a kind is known a moment after it is established
            if "no matches for kind" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.5)


@pytest.mark.parametrize("name", sorted(written()))
def test_it_is_taken(foreign: Cluster, name: str) -> None:
    assert "created (server dry run)" in ask(foreign, written()[name])


@pytest.mark.parametrize("name", sorted(written()))
def test_a_field_that_is_not_theirs_is_refused(foreign: Cluster, name: str) -> None:
    body = copy.deepcopy(written()[name])
    body["spec"]["nonsense"] = 1
    with pytest.raises(Failed, match="nonsense"):
        ask(foreign, body)
