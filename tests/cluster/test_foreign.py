"""CRDs of other projects accept our objects, by strict validation. The operator creates those of one service."""

import copy
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cluster import service as svc
from tests.cluster.fixtures import Cluster
from tests.cluster.scenes import Scene
from tests.cluster.written import written
from tools.errors import Failed

pytestmark = pytest.mark.cluster
ROOT = Path(__file__).parents[2]
MONITORING = ("ServiceMonitor", "PrometheusRule")


@pytest.fixture(scope="module")
def foreign(cluster: Cluster) -> Iterator[Cluster]:
    """The cluster with the CRDs of other projects. Added ones are removed."""
    completed = subprocess.run(
        [sys.executable, "-m", "tests.cluster", "crds"], cwd=ROOT, stdout=subprocess.PIPE, text=True, check=True
    )
    files = sorted(Path(completed.stdout.strip()).glob("*.yaml"))
    names = [body["metadata"]["name"] for path in files for body in yaml.safe_load_all(path.read_text()) if body]
    existing = set(cluster.kubectl("get", "crd", "-o", "jsonpath={.items[*].metadata.name}").split())
    new = [name for name in names if name not in existing]
    try:
        for path in files:
            if any(name in path.read_text() for name in new):
                cluster.kubectl("apply", "--server-side", "-f", str(path))
        cluster.kubectl("wait", "--for=condition=Established", *(f"crd/{name}" for name in names), "--timeout=60s")
        yield cluster
    finally:
        if new:
            cluster.kubectl("delete", "crd", "--ignore-not-found", *new)


def dry_run(cluster: Cluster, body: dict[str, Any]) -> str:
    """Returns the output of a dry run in an existing namespace."""
    body = copy.deepcopy(body)
    body["metadata"]["namespace"] = "default"
    command = ("create", "--dry-run=server", "--validate=strict", "-f", "-")
    end = time.monotonic() + 30
    while True:
        try:
            return cluster.kubectl(*command, stdin=yaml.safe_dump(body))
        except Failed as error:  # a kind is discovered a moment after it is established
            if "no matches for kind" not in str(error) or time.monotonic() > end:
                raise
            time.sleep(0.5)


@pytest.mark.parametrize("name", sorted(written()))
def test_object_is_accepted(foreign: Cluster, name: str) -> None:
    assert "created (server dry run)" in dry_run(foreign, written()[name])


@pytest.mark.parametrize("name", sorted(written()))
def test_unknown_field_is_rejected(foreign: Cluster, name: str) -> None:
    body = copy.deepcopy(written()[name])
    body["spec"]["nonsense"] = 1
    with pytest.raises(Failed, match="nonsense"):
        dry_run(foreign, body)


def monitoring(scene: Scene) -> dict[str, dict[str, Any]]:
    """Returns the monitoring objects of the namespace by kind."""
    kinds = ",".join(f"{kind.lower()}s.monitoring.coreos.com" for kind in MONITORING)
    return {body["kind"]: body for body in scene.get(kinds)["items"]}


@pytest.mark.slow
def test_operator_creates_and_deletes_monitors_with_the_service(foreign: Cluster, scene: Scene) -> None:
    scene.restart_operator()  # otherwise it discovers the kinds within ten minutes
    scene.apply(scene.manifest(replicas=0))
    svc.wait_for(lambda: set(monitoring(scene)) == set(MONITORING), 120, "both exist")
    service, monitors = scene.get("infsvc", "chat"), monitoring(scene)
    for body in monitors.values():
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("InferenceService", service["metadata"]["uid"], True)
    monitor = monitors["ServiceMonitor"]["spec"]
    (endpoint,) = monitor["endpoints"]
    selected = [f"{label}={value}" for label, value in monitor["selector"]["matchLabels"].items()]
    ports = [{port["name"] for port in body["spec"]["ports"]} for body in scene.get("services", "-l", *selected)["items"]]
    assert len(ports) == 2 and all(endpoint["port"] in names for names in ports), "of routers and groups"
    scene.patch({"monitoring": {"serviceMonitor": "Off"}})
    svc.wait_for(lambda: not monitoring(scene), 60, "both are deleted")
    scene.patch({"monitoring": {"serviceMonitor": "Auto"}})
    svc.wait_for(lambda: set(monitoring(scene)) == set(MONITORING), 60, "both exist again")
    scene.delete_service()
    svc.wait_for(lambda: not monitoring(scene), 120, "both are deleted with the service")
