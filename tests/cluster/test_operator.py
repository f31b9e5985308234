"""The operator's own life in a real cluster: two replicas of which one acts, and an upgrade that moves no pod of a group."""

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
"""How long an upgrade is watched, and what follows when another operator leads."""
ROUTERS_S = 240.0
"""A new leader looks at what groups share within a minute, and an old router ends what it has."""
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
ROUTERS = '''

_of_this_version = router_objects


def router_objects(*args, **kwargs):
    """The routers as a later version would render them: another label."""
    made = _of_this_version(*args, **kwargs)
    for body in made:
        if body["kind"] == "Deployment":
            body["spec"]["template"]["metadata"]["labels"]["phalanx.dev/renderer"] = "next"
    return made
'''


class Operated(Scene):
    """A service, and the operator that minds it."""

    def everything(self, which: str = "") -> dict[str, tuple[str, int]]:
        """UID and restarts of every pod of the service, routers too, or of those of a component."""
        pods = self.pods("phalanx.dev/service=chat" + (f",phalanx.dev/component={which}" if which else ""))
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

    def page(self, operator: str) -> str:
        """What an operator's pod says of itself."""
        of = ("-n", installation.NAMESPACE, "get", "pod", operator, "-o", "jsonpath={.status.podIP}")
        return httpx.get(f"http://{self.cluster.kubectl(*of)}:8080/metrics", timeout=10).text

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


def both_ready(operated: Operated) -> bool:
    return list(operated.operators().values()) == [True, True]


def assert_only_the_leader_acts(operated: Operated) -> None:
    """By what each of the two counted since it began: the standby looks, and changes nothing but the Lease."""
    svc.wait_for(lambda: both_ready(operated), 60, "two operators are ready")
    leader = operated.leader()
    (standby,) = set(operated.operators()) - {leader}
    pages = {name: operated.page(name) for name in (leader, standby)}
    assert {name: svc.metric(page, "phalanx_operator_is_leader") for name, page in pages.items()} == {leader: 1, standby: 0}
    assert writes(pages[leader]) > 0 == writes(pages[standby])
    assert svc.metric(pages[standby], "phalanx_operator_api_calls_total") > 0, "its calls are counted"


def test_both_operators_are_ready_and_one_leads(operated: Operated) -> None:
    assert_only_the_leader_acts(operated)


@pytest.mark.parametrize("how", ["deleted", "killed"])
def test_s43_one_operator_takes_over_when_the_leader_dies(operated: Operated, how: str) -> None:
    leader, before = operated.leader(), operated.everything()
    counts: list[int] = []
    sets: list[int] = []

    def look() -> str:
        counts.append(operated.get("infsvc", "chat")["spec"]["replicas"])
        sets.append(len(operated.groups()))
        return ""

    with always(look):
        began = time.monotonic()
        if how == "killed":
            killing.kill(operated.cluster, installation.NAMESPACE, leader, "phalanx-operator")
        else:
            operated.operator_deployment("delete", "pod", leader, "--grace-period=0", "--force")
        operated.scale(3)
        svc.wait_for(lambda: len(operated.groups()) == 3, 60, "an operator follows the change")
        print(f"{operated.leader()} acted {time.monotonic() - began:.1f} s after {leader}, which led, was {how}")
        assert operated.leader() not in ("", leader if how == "deleted" else "")  # who was killed may be first to come again
        operated.wait_ready(3)
        time.sleep(CALM_S)
    assert {2, 3} >= set(counts) and not falls(counts), counts
    assert {2, 3} >= set(sets) and not falls(sets), sets
    now = operated.everything()
    assert {name: now.get(name) for name in before} == before, "nothing else was touched"
    assert_only_the_leader_acts(operated)
    operated.scale(2)
    operated.wait_ready(2)


def assert_a_new_service_works(operated: Operated) -> None:
    """Applied now, it becomes Ready and answers, and its pods are as the next version renders them."""
    operated.apply(operated.manifest(name="second", replicas=1, pods=1))
    svc.wait_for(lambda: operated.condition("Ready", "second")[0] == "True", 300, "the new service is Ready")
    body = {"model": "tiny", "prompt": "the first request", "max_tokens": 8, "ignore_eos": True}
    answer = httpx.post(f"{operated.address('second')}/v1/completions", json=body, timeout=60)
    assert (answer.status_code, answer.json()["usage"]["completion_tokens"]) == (200, 8)
    (pod,) = operated.pods("phalanx.dev/component=group,phalanx.dev/service=second").values()
    assert pod["metadata"]["labels"].get("phalanx.dev/renderer") == "next"


@contextmanager
def upgraded(operated: Operated, folder: Path, changes: Mapping[str, str]) -> Iterator[None]:
    """Once an operator leads whose renderers go on so; those of this version are back afterwards."""
    if operated.cluster.files is None:
        pytest.skip("an image is made for the cluster of this machine")

    def change(packages: Path) -> None:
        for module, more in changes.items():
            path = packages / f"phalanx_operator/render/{module}.py"
            path.write_text(path.read_text() + more)

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
def unmoved(operated: Operated, which: str = "") -> Iterator[None]:
    """No pod of the service, or of this component, is another one or begins again meanwhile, and no request fails."""
    before = operated.everything(which)

    def look() -> str:
        now = operated.everything(which)
        return "" if now == before else f"pods were {before} and are {now}"

    with always(look) as wrong, operated.traffic(tokens=200) as traffic:
        yield
    assert wrong == [] and traffic.failed == []


def test_s30_operator_upgrade_with_new_renderer_restarts_no_pod(operated: Operated, tmp_path: Path) -> None:
    before = operated.everything()
    try:
        with upgraded(operated, tmp_path, {"pods": RENDERER}):
            with unmoved(operated):
                assert_a_new_service_works(operated)
                time.sleep(CALM_S)
            operated.gone("second")
            operated.scale(3)
            operated.wait_ready(3)
            now = operated.everything()
            assert {name: now.get(name) for name in before} == before, "since before the upgrade"
            new = [pod for name, pod in operated.pods().items() if name not in before]
            assert {pod["metadata"]["labels"].get("phalanx.dev/renderer") for pod in new} == {"next"}, (
                "the new version renders so"
            )
            assert len(new) == 2
    finally:
        operated.kubectl("delete", "infsvc", "second", "--ignore-not-found", "--wait=false")
        operated.scale(2)
        operated.wait_ready(2)


def test_s30_operator_upgrade_with_new_routers_restarts_no_group(operated: Operated, tmp_path: Path) -> None:
    """Requests go on meanwhile: those that are open when a router leaves end there."""
    before, old = operated.everything("group"), set(operated.everything("router"))
    with upgraded(operated, tmp_path, {"pods": RENDERER, "router": ROUTERS}):
        with unmoved(operated, "group"):
            svc.wait_for(lambda: not old & set(operated.everything("router")), ROUTERS_S, "the routers are new")
            time.sleep(CALM_S)
        routers = operated.pods("phalanx.dev/service=chat,phalanx.dev/component=router").values()
        assert {pod["metadata"]["labels"].get("phalanx.dev/renderer") for pod in routers} == {"next"}
        assert operated.everything("group") == before
