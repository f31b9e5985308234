"""The operator's own life in a real cluster: two replicas of which one acts, and an upgrade that moves no pod of a group."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from images import build
from tests.cluster import operator as installation
from tests.cluster import service as svc
from tests.cluster import tiny_model
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

KILL = """
import os, pathlib, signal, time
found = [int(one.name) for one in pathlib.Path("/proc").iterdir() if one.name.isdigit()]
others = [pid for pid in found if pid not in (1, os.getpid())]
programs = [pid for pid in others if b"phalanx-operator" in pathlib.Path(f"/proc/{pid}/cmdline").read_bytes()]
(program,) = programs
if os.fork():
    raise SystemExit(0)
os.closerange(0, 3)
time.sleep(1)
os.kill(program, signal.SIGKILL)
"""
"""In an operator's container, after a second, for whatever runs in it ends too. The program hears nothing of it; the container
begins again in its pod."""


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

    def kill_operator(self, operator: str) -> None:
        """SIGKILL to the program, which gives nothing back; its container has begun again."""
        before = self.starts(operator)
        self.cluster.kubectl("-n", installation.NAMESPACE, "exec", operator, "--", "/usr/bin/python3", "-c", KILL)
        svc.wait_for(lambda: self.starts(operator) > before, 30, "it was killed")

    def starts(self, operator: str) -> int:
        """How often the container of an operator's pod began again."""
        of = ("-n", installation.NAMESPACE, "get", "pod", operator, "-o", "jsonpath={.status.containerStatuses[0].restartCount}")
        return int(self.cluster.kubectl(*of))

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
def test_s43_when_the_leader_dies_one_acts_again_and_nothing_flaps(operated: Operated, how: str) -> None:
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
            operated.kill_operator(leader)
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


def assert_only_routers_roll(operated: Operated, before: dict[str, tuple[str, int]]) -> None:
    """Requests go on meanwhile: those that are open when a router leaves end there."""
    old = set(operated.everything("router"))

    def look() -> str:
        now = operated.everything("group")
        return "" if now == before else f"pods of groups were {before} and are {now}"

    with always(look) as wrong, operated.traffic(tokens=200) as traffic:
        svc.wait_for(lambda: not old & set(operated.everything("router")), ROUTERS_S, "the routers are new")
        time.sleep(CALM_S)
    assert wrong == [] and traffic.failed == []
    routers = operated.pods("phalanx.dev/service=chat,phalanx.dev/component=router").values()
    assert {pod["metadata"]["labels"].get("phalanx.dev/renderer") for pod in routers} == {"next"}


def test_s30_an_upgrade_whose_renderer_changed_moves_no_pod_and_a_new_service_works(
    operated: Operated, cluster: Cluster, tmp_path: Path
) -> None:
    if cluster.files is None:
        pytest.skip("an image is made for the cluster of this machine")

    def change(packages: Path) -> None:
        for module, more in (("pods", RENDERER), ("router", ROUTERS)):
            path = packages / f"phalanx_operator/render/{module}.py"
            path.write_text(path.read_text() + more)

    archive = tmp_path / "next.tar"
    image = build.write_changed_archive("operator", "next", change, archive)
    cluster.load_image(archive)
    svc.wait_for(lambda: both_ready(operated), 60, "two operators are ready")
    before, former = operated.everything("group"), set(operated.operators())
    deployment = "deployment/phalanx-operator"
    try:
        operated.operator_deployment("set", "env", deployment, "PHALANX_OPERATOR_WORKERS=3")
        operated.operator_deployment("set", "image", deployment, f"operator={image}")
        operated.operator_deployment("rollout", "status", deployment, "--timeout=120s")
        svc.wait_for(lambda: operated.leader() not in former | {""}, 60, "an operator of the next version leads")
        assert_only_routers_roll(operated, before)
        assert_a_new_service_works(operated)
        operated.gone("second")
        operated.scale(3)
        operated.wait_ready(3)
        now = operated.everything("group")
        assert {name: now.get(name) for name in before} == before
        new = [pod for name, pod in operated.pods().items() if name not in before]
        assert {pod["metadata"]["labels"].get("phalanx.dev/renderer") for pod in new} == {"next"}, "the new version renders so"
        assert len(new) == 2
    finally:
        operated.kubectl("delete", "infsvc", "second", "--ignore-not-found", "--wait=false")
        operated.operator_deployment("set", "env", deployment, "PHALANX_OPERATOR_WORKERS-")
        installation.install(cluster)
