"""What we write for other projects is what their own CRDs take, by the API server with strict validation.

One service has an operator that writes it.
"""

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


def monitoring(scene: Scene) -> dict[str, dict[str, Any]]:
    """What Prometheus's operator would read in the namespace, by kind."""
    kinds = ",".join(f"{kind.lower()}s.monitoring.coreos.com" for kind in MONITORING)
    return {one["kind"]: one for one in scene.get(kinds)["items"]}


@pytest.mark.slow
def test_operator_creates_and_deletes_monitors_with_the_service(foreign: Cluster, scene: Scene) -> None:
    scene.restart_operator()  # one that missed the kinds looks for them again after ten minutes
    scene.apply(scene.manifest(replicas=0))
    svc.wait_for(lambda: set(monitoring(scene)) == set(MONITORING), 120, "both are made")
    service, found = scene.get("infsvc", "chat"), monitoring(scene)
    for body in found.values():
        (owner,) = body["metadata"]["ownerReferences"]
        assert (owner["kind"], owner["uid"], owner["controller"]) == ("InferenceService", service["metadata"]["uid"], True)
    monitor = found["ServiceMonitor"]["spec"]
    (endpoint,) = monitor["endpoints"]
    chosen = [f"{label}={value}" for label, value in monitor["selector"]["matchLabels"].items()]
    ports = [{port["name"] for port in one["spec"]["ports"]} for one in scene.get("services", "-l", *chosen)["items"]]
    assert len(ports) == 2 and all(endpoint["port"] in names for names in ports), "of routers and groups"
    scene.patch({"monitoring": {"serviceMonitor": "Off"}})
    svc.wait_for(lambda: not monitoring(scene), 60, "nobody wants them")
    scene.patch({"monitoring": {"serviceMonitor": "Auto"}})
    svc.wait_for(lambda: set(monitoring(scene)) == set(MONITORING), 60, "both are made again")
    scene.gone()
    svc.wait_for(lambda: not monitoring(scene), 120, "they go with the service")
