"""The operator's own life in a real cluster: two replicas of which one acts, and an upgrade that moves no pod."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from images import build
from tests.cluster import operator as installation
from tests.cluster import service as svc
from tests.cluster import tiny_model
from tests.cluster.fixtures import Cluster
from tests.cluster.test_path import Chat

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
CALM_S = 30.0
"""How long an upgrade is watched."""
RENDERER = '''

_of_this_version = group


def group(*args, **kwargs):
    """A group as a later version would render it: another label, another variable, another probe."""
    body = _of_this_version(*args, **kwargs)
    template = body["spec"]["template"]
    template["metadata"]["labels"]["phalanx.dev/renderer"] = "next"
    container = template["spec"]["containers"][0]
    container.setdefault("env", []).append({"name": "PHALANX_RENDERER", "value": "next"})
    container["readinessProbe"]["periodSeconds"] = 3
    return body
'''


class Operated(Chat):
    """A service, and the operator that minds it."""

    def fingerprints(self) -> dict[str, tuple[str, int]]:
        """UID and restarts of every pod of the service, routers too."""
        pods = self.pods("phalanx.dev/service=chat")
        restarts = {n: sum(c["restartCount"] for c in p["status"].get("containerStatuses", [])) for n, p in pods.items()}
        return {name: (pod["metadata"]["uid"], restarts[name]) for name, pod in pods.items()}

    def operators(self) -> dict[str, bool]:
        """The operator's pods that stay, and whether each is ready."""
        of = ("-n", installation.NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=phalanx-operator", "-o", "json")
        pods = [p for p in json.loads(self.cluster.kubectl(*of))["items"] if "deletionTimestamp" not in p["metadata"]]
        conditions = {p["metadata"]["name"]: p["status"].get("conditions", []) for p in pods}
        return {name: any(c["type"] == "Ready" and c["status"] == "True" for c in of_it) for name, of_it in conditions.items()}

    def leader(self) -> str:
        """The pod that leads; empty when none does."""
        of = ("-n", installation.NAMESPACE, "get", "lease", "phalanx-operator", "-o", "jsonpath={.spec.holderIdentity}")
        return self.cluster.kubectl(*of)

    def operator_deployment(self, *words: str) -> None:
        self.cluster.kubectl("-n", installation.NAMESPACE, *words)


@pytest.fixture(scope="module")
def operated(cluster: Cluster, operator: str, namespace: str) -> Iterator[Operated]:
    """The service, Ready with two groups."""
    cluster.claim(namespace, "models", tiny_model.folder())
    made = Operated(cluster, namespace)
    manifest = svc.manifest("chat", model=f"pvc://models/{tiny_model.NAME}", replicas=2, servedNames=["tiny"])
    manifest["spec"]["engine"] |= {"kvCacheMemory": "64Mi"}
    made.kubectl("apply", "-f", "-", stdin=json.dumps(cluster.with_site_packages(manifest)))
    made.wait_ready(2)
    yield made
    made.kubectl("delete", "infsvc", "chat")


def test_both_operators_are_ready_and_one_leads(operated: Operated) -> None:
    svc.wait_for(lambda: list(operated.operators().values()) == [True, True], 60, "two operators are ready")
    assert operated.leader() in operated.operators()


def test_when_the_leader_dies_the_other_one_acts_within_the_leases_time(operated: Operated) -> None:
    leader, before = operated.leader(), operated.fingerprints()
    began = time.monotonic()
    operated.operator_deployment("delete", "pod", leader, "--grace-period=0", "--force")
    operated.kubectl("scale", "infsvc", "chat", "--replicas=3")
    svc.wait_for(lambda: len(operated.groups()) == 3, 60, "another operator follows the change")
    print(f"another operator acted {time.monotonic() - began:.1f} s after the leader was killed")
    assert operated.leader() not in ("", leader)
    operated.wait_ready(3)
    now = operated.fingerprints()
    assert {name: now.get(name) for name in before} == before, "nothing else was touched"
    operated.kubectl("scale", "infsvc", "chat", "--replicas=2")
    operated.wait_ready(2)


def test_an_upgrade_whose_renderer_changed_moves_no_pod(operated: Operated, cluster: Cluster, tmp_path: Path) -> None:
    if cluster.files is None:
        pytest.skip("an image is made for the cluster of this machine")

    def change(packages: Path) -> None:
        module = packages / "phalanx_operator/render/pods.py"
        module.write_text(module.read_text() + RENDERER)

    archive = tmp_path / "next.tar"
    image = build.write_changed_archive("operator", "next", change, archive)
    cluster.load_image(archive)
    svc.wait_for(lambda: list(operated.operators().values()) == [True, True], 60, "two operators are ready")
    before, former = operated.fingerprints(), set(operated.operators())
    deployment = "deployment/phalanx-operator"
    try:
        operated.operator_deployment("set", "env", deployment, "PHALANX_OPERATOR_WORKERS=3")
        operated.operator_deployment("set", "image", deployment, f"operator={image}")
        operated.operator_deployment("rollout", "status", deployment, "--timeout=120s")
        svc.wait_for(lambda: operated.leader() not in former | {""}, 60, "an operator of the next version leads")
        end = time.monotonic() + CALM_S
        while time.monotonic() < end:
            assert operated.fingerprints() == before
            time.sleep(2)
        operated.kubectl("scale", "infsvc", "chat", "--replicas=3")
        operated.wait_ready(3)
        now = operated.fingerprints()
        assert {name: now.get(name) for name in before} == before
        new = [pod for name, pod in operated.pods().items() if name not in before]
        assert {pod["metadata"]["labels"].get("phalanx.dev/renderer") for pod in new} == {"next"}, "the new version renders so"
        assert len(new) == 2
    finally:
        operated.operator_deployment("set", "env", deployment, "PHALANX_OPERATOR_WORKERS-")
        installation.install(cluster)
