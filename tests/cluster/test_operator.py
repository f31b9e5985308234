"""Two operators of which one leads, and an upgrade that restarts no pod of a group."""

import json
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from images import build
from tests.cluster import killing, tiny_model
from tests.cluster import operator as installation
from tests.cluster import service as svc
from tests.cluster.fixtures import Cluster
from tests.cluster.scenes import Scene
from tests.cluster.watching import always, falls, writes

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
CALM_S = 30.0
"""Time after an upgrade or a change of leader in which nothing may change."""
ROUTERS_S = 240.0
"""A new leader checks shared objects within a minute, and an old router finishes its requests."""
RENDERER = '''

_original = group


def group(*args, **kwargs):
    """Changes a label, a variable and a probe."""
    body = _original(*args, **kwargs)
    template = body["spec"]["template"]
    template["metadata"]["labels"]["phalanx.dev/renderer"] = "next"
    container = template["spec"]["containers"][0]
    container.setdefault("env", []).append({"name": "PHALANX_RENDERER", "value": "next"})
    container["readinessProbe"]["periodSeconds"] = 3
    return body
'''
ROUTERS = '''

_original = router_objects


def router_objects(*args, **kwargs):
    """Changes a label."""
    bodies = _original(*args, **kwargs)
    for body in bodies:
        if body["kind"] == "Deployment":
            body["spec"]["template"]["metadata"]["labels"]["phalanx.dev/renderer"] = "next"
    return bodies
'''


class OperatedService(Scene):
    """A service and its operators."""

    def all_pods(self, component: str = "") -> dict[str, tuple[str, int]]:
        """Returns UID and restarts of every pod of the service, or of one component."""
        pods = self.pods("phalanx.dev/service=chat" + (f",phalanx.dev/component={component}" if component else ""))
        restarts = {n: sum(c["restartCount"] for c in p["status"].get("containerStatuses", [])) for n, p in pods.items()}
        return {name: (pod["metadata"]["uid"], restarts[name]) for name, pod in pods.items()}

    def operators(self) -> dict[str, bool]:
        """Returns the live pods of the operator and whether they are ready."""
        query = ("-n", installation.NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=phalanx-operator", "-o", "json")
        pods = [p for p in json.loads(self.cluster.kubectl(*query))["items"] if "deletionTimestamp" not in p["metadata"]]
        conditions = {p["metadata"]["name"]: p["status"].get("conditions", []) for p in pods}
        return {name: any(c["type"] == "Ready" and c["status"] == "True" for c in of_pod) for name, of_pod in conditions.items()}

    def leader(self) -> str:
        """Returns the pod that leads, or an empty text."""
        query = ("-n", installation.NAMESPACE, "get", "lease", "phalanx-operator", "-o", "jsonpath={.spec.holderIdentity}")
        return self.cluster.kubectl(*query)

    def page(self, operator: str) -> str:
        """Returns the metrics page of an operator."""
        query = ("-n", installation.NAMESPACE, "get", "pod", operator, "-o", "jsonpath={.status.podIP}")
        return httpx.get(f"http://{self.cluster.kubectl(*query)}:8080/metrics", timeout=10).text

    def operator_deployment(self, *words: str) -> None:
        self.cluster.kubectl("-n", installation.NAMESPACE, *words)


@pytest.fixture(scope="module")
def operated(cluster: Cluster, operator: str, namespace: str) -> Iterator[OperatedService]:
    """The service, Ready with two groups."""
    cluster.claim(namespace, "models", tiny_model.folder())
    operated = OperatedService(cluster, namespace)
    manifest = svc.manifest("chat", model=f"pvc://models/{tiny_model.NAME}", replicas=2, servedNames=["tiny"])
    manifest["spec"]["engine"] |= {"kvCacheMemory": "64Mi"}
    operated.kubectl("apply", "-f", "-", stdin=json.dumps(cluster.with_site_packages(manifest)))
    operated.wait_ready(2)
    yield operated
    operated.kubectl("delete", "infsvc", "chat")


def both_ready(operated: OperatedService) -> bool:
    return list(operated.operators().values()) == [True, True]


def assert_only_the_leader_acts(operated: OperatedService) -> None:
    """By both metrics pages, the standby writes only the Lease."""
    svc.wait_for(lambda: both_ready(operated), 60, "two operators are ready")
    leader = operated.leader()
    (standby,) = set(operated.operators()) - {leader}
    pages = {name: operated.page(name) for name in (leader, standby)}
    assert {name: svc.metric(page, "phalanx_operator_is_leader") for name, page in pages.items()} == {leader: 1, standby: 0}
    assert writes(pages[leader]) > 0 == writes(pages[standby])
    assert svc.metric(pages[standby], "phalanx_operator_api_calls_total") > 0, "its reads are counted"


def test_both_operators_are_ready_and_one_leads(operated: OperatedService) -> None:
    assert_only_the_leader_acts(operated)


@pytest.mark.parametrize("method", ["deleted", "killed"])
def test_s43_one_operator_takes_over_when_the_leader_dies(operated: OperatedService, method: str) -> None:
    leader, before = operated.leader(), operated.all_pods()
    counts: list[int] = []
    sets: list[int] = []

    def check() -> str:
        counts.append(operated.get("infsvc", "chat")["spec"]["replicas"])
        sets.append(len(operated.groups()))
        return ""

    with always(check):
        started_s = time.monotonic()
        if method == "killed":
            killing.kill(operated.cluster, installation.NAMESPACE, leader, "phalanx-operator")
        else:
            operated.operator_deployment("delete", "pod", leader, "--grace-period=0", "--force")
        operated.scale(3)
        svc.wait_for(lambda: len(operated.groups()) == 3, 60, "an operator follows the change")
        print(f"{operated.leader()} acted {time.monotonic() - started_s:.1f} s after the leader {leader} was {method}")
        assert operated.leader() not in ("", leader if method == "deleted" else "")  # a killed leader may lead again
        operated.wait_ready(3)
        time.sleep(CALM_S)
    assert {2, 3} >= set(counts) and not falls(counts), counts
    assert {2, 3} >= set(sets) and not falls(sets), sets
    now = operated.all_pods()
    assert {name: now.get(name) for name in before} == before, "no other pod changed"
    assert_only_the_leader_acts(operated)
    operated.scale(2)
    operated.wait_ready(2)


def assert_a_new_service_works(operated: OperatedService) -> None:
    """Creates a service, which becomes Ready and has pods of the next version's renderer."""
    operated.apply(operated.manifest(name="second", replicas=1, pods=1))
    svc.wait_for(lambda: operated.condition("Ready", "second")[0] == "True", 300, "the new service is Ready")
    body = {"model": "tiny", "prompt": "the first request", "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{operated.address('second')}/v1/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 8)
    (pod,) = operated.pods("phalanx.dev/component=group,phalanx.dev/service=second").values()
    assert pod["metadata"]["labels"].get("phalanx.dev/renderer") == "next"


@contextmanager
def upgraded(operated: OperatedService, folder: Path, changes: Mapping[str, str]) -> Iterator[None]:
    """Runs an operator with changed renderers during the block."""
    if operated.cluster.files is None:
        pytest.skip("loads an image into the cluster of this machine")

    def change(packages: Path) -> None:
        for module, code in changes.items():
            path = packages / f"phalanx_operator/render/{module}.py"
            path.write_text(path.read_text() + code)

    archive = folder / "next.tar"
    image = build.write_changed_archive("operator", "next-" + "-".join(changes), change, archive)
    operated.cluster.load_image(archive)
    svc.wait_for(lambda: both_ready(operated), 60, "two operators are ready")
    former, deployment = set(operated.operators()), "deployment/phalanx-operator"
    try:
        operated.operator_deployment("set", "env", deployment, "PHALANX_OPERATOR_WORKERS=3")
        operated.operator_deployment("set", "image", deployment, f"operator={image}")
        operated.operator_deployment("rollout", "status", deployment, "--timeout=120s")
        svc.wait_for(lambda: operated.leader() not in former | {""}, 60, "an operator of the next version leads")
        yield
    finally:
        operated.operator_deployment("set", "env", deployment, "PHALANX_OPERATOR_WORKERS-")
        installation.install(operated.cluster)


@contextmanager
def check_no_restart(operated: OperatedService, component: str = "") -> Iterator[None]:
    """Fails if a pod of the service or component is replaced or restarts, or a request fails."""
    before = operated.all_pods(component)

    def check() -> str:
        now = operated.all_pods(component)
        return "" if now == before else f"pods changed from {before} to {now}"

    with always(check) as errors, operated.traffic(tokens=200) as traffic:
        yield
    assert errors == [] and traffic.failed == []


def test_s30_operator_upgrade_with_new_renderer_restarts_no_pod(operated: OperatedService, tmp_path: Path) -> None:
    before = operated.all_pods()
    try:
        with upgraded(operated, tmp_path, {"pods": RENDERER}):
            with check_no_restart(operated):
                assert_a_new_service_works(operated)
                time.sleep(CALM_S)
            operated.delete_service("second")
            operated.scale(3)
            operated.wait_ready(3)
            now = operated.all_pods()
            assert {name: now.get(name) for name in before} == before, "no pod changed since before the upgrade"
            new = [pod for name, pod in operated.pods().items() if name not in before]
            assert {pod["metadata"]["labels"].get("phalanx.dev/renderer") for pod in new} == {"next"}, "of the new renderer"
            assert len(new) == 2
    finally:
        operated.kubectl("delete", "infsvc", "second", "--ignore-not-found", "--wait=false")
        operated.scale(2)
        operated.wait_ready(2)


def test_s30_operator_upgrade_with_new_routers_restarts_no_group(operated: OperatedService, tmp_path: Path) -> None:
    """Requests continue: those open in a terminating router end there."""
    before, old = operated.all_pods("group"), set(operated.all_pods("router"))
    with upgraded(operated, tmp_path, {"pods": RENDERER, "router": ROUTERS}):
        with check_no_restart(operated, "group"):
            svc.wait_for(lambda: not old & set(operated.all_pods("router")), ROUTERS_S, "the routers are new")
            time.sleep(CALM_S)
        routers = operated.pods("phalanx.dev/service=chat,phalanx.dev/component=router").values()
        assert {pod["metadata"]["labels"].get("phalanx.dev/renderer") for pod in routers} == {"next"}
        assert operated.all_pods("group") == before
