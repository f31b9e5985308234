"""S1, S2, S5, S7, S10: the life of groups, and one of two stages of two ranks over both nodes.

The tests share a namespace and run in order; each takes its service away, or leaves it Ready with the groups that it says.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import claims
from tests.cluster import service as svc
from tests.cluster.clients import Streams, Told
from tests.cluster.scenes import Scene
from tests.cluster.watching import always, is_ready

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
TOKENS = 300


@pytest.fixture(scope="module")
def four(scene: Scene) -> Iterator[Scene]:
    """Two groups of four pods, Ready."""
    scene.apply(scene.manifest(replicas=2, pods=4))
    scene.wait_ready(2, 600)
    yield scene
    scene.gone()


def early(scene: Scene, groups: int) -> str:
    """What the status says of a spec that wants so many groups and that it has seen, before all pods are ready; empty where it
    may say so."""
    found = scene.get("infsvc", "chat")
    status, pods = found["status"], 4 * groups
    if found["spec"]["replicas"] != groups or status.get("observedGeneration") != found["metadata"]["generation"]:
        return ""
    told = {one["type"]: (one["status"], one["reason"]) for one in status["conditions"]}
    progress, ready = told["Progressing"], sum(map(is_ready, scene.pods().values()))  # the pods after the status
    if ready >= pods or (told["Ready"][0] == "False" and progress[0] == "True" and progress[1] != "Complete"):
        return ""
    return f"with {ready} of {pods} pods ready: Ready {told['Ready']}, Progressing {progress}"


def test_s1_scale_out_adds_whole_groups_and_keeps_pods(four: Scene) -> None:
    before = four.uids()
    with always(lambda: early(four, 4)) as wrong:
        four.scale(4)
        svc.wait_for(lambda: four.condition("Progressing") == ("True", "Scaling"), 30, "it progresses")
        assert four.condition("Ready")[0] == "False"
        four.wait_ready(4, 600)
    assert wrong == []
    after = four.uids()
    assert len(after) == 16
    assert {name: after[name] for name in before} == before
    assert four.condition("Progressing") == ("True", "Complete")


def test_s2_scaling_in_restarts_no_pod_that_stays(four: Scene) -> None:
    four.scale(4)
    four.wait_ready(4, 600)
    before = {name: four.fingerprints(name) for name in four.groups()}
    assert len(before) == 4
    four.scale(2)
    four.wait_ready(2, 300)
    left = four.groups()
    assert len(left) == 2
    assert {name: four.fingerprints(name) for name in left} == {name: before[name] for name in left}


def test_s5_deleted_group_is_replaced(four: Scene) -> None:
    victim, other = sorted(four.groups())
    before, gone = four.fingerprints(other), uids(four)[victim]
    four.kubectl("delete", "statefulset", victim, "--wait=false")
    svc.wait_for(lambda: len(uids(four)) == 2 and gone not in uids(four).values(), 60, "a replacement")
    four.wait_ready(2, 400)
    assert other in four.groups() and gone not in uids(four).values(), "it may have the name of the one that is gone"
    assert four.fingerprints(other) == before


def uids(scene: Scene) -> dict[str, str]:
    return {name: one["metadata"]["uid"] for name, one in scene.sets().items()}


def test_s10_deleted_worker_restarts_only_its_group(scene: Scene) -> None:
    scene.gone()
    scene.apply(scene.manifest(replicas=2, pods=3))
    scene.wait_ready(2, 400)
    struck, other = sorted(scene.groups())
    incarnations = {name: scene.incarnation(name) for name in (struck, other)}
    stay = [f"{struck}-0", f"{struck}-1"]
    ranks = {name: epochs(scene, name) for name in stay}
    assert all(map(len, ranks.values())), ranks
    calm = scene.fingerprints(other)
    scene.kubectl("delete", "pod", f"{struck}-2", "--wait=false", "--grace-period=1")
    svc.wait_for(lambda: scene.incarnation(struck) > incarnations[struck], 120, "all ranks of the group start anew")
    scene.wait_ready(2, 300)
    assert scene.incarnation(struck) > incarnations[struck]
    for name in stay:
        now = epochs(scene, name)
        assert now and not now & ranks[name], "no rank of the former incarnation is left"
    assert (scene.fingerprints(other), scene.incarnation(other)) == (calm, incarnations[other])
    told = {group["name"]: group for group in scene.status()["groups"]}
    assert told[struck]["restarts"] == 0, "a pod that was deleted is no fault of the group"


def test_a_group_comes_back_whole_while_no_operator_runs(scene: Scene) -> None:
    """The service is that of the test before: two groups of three pods."""
    struck, other = sorted(scene.groups())
    before, calm = scene.incarnation(struck), scene.fingerprints(other)
    scene.stop_operator()
    try:
        scene.kubectl("delete", "pod", f"{struck}-1", "--wait=false", "--grace-period=1")
        svc.wait_for(lambda: scene.incarnation(struck) > before, 120, "all ranks of the group start anew")
        svc.wait_for(lambda: sorted(scene.ready_groups()) == [struck, other], 120, "all pods are ready")
        assert answers(scene)
    finally:
        scene.start_operator()
    scene.wait_ready(2, 300)
    assert scene.fingerprints(other) == calm


RANKS = """
import pathlib
for one in pathlib.Path("/proc").iterdir():
    if one.name.isdigit() and b"phalanx_runtime.rank" in (one / "cmdline").read_bytes().split(b"\\0"):
        print(one.name, (one / "stat").read_text().rpartition(")")[2].split()[19])
"""


def epochs(scene: Scene, pod: str) -> set[str]:
    """Process id and time of the start of each rank of a pod."""
    return set(scene.kubectl("exec", pod, "-c", "runtime", "--", "python3", "-c", RANKS).splitlines())


SCRATCH = "scratch-disks"
KINDS = (
    *("pod", "service", "secret", "serviceaccount", "role", "rolebinding", "configmap", "statefulset", "deployment"),
    *("controllerrevision", "replicaset", "poddisruptionbudget", "networkpolicy", "podgroup", "persistentvolumeclaim"),
)
"""Of everything that a service has."""


@pytest.fixture(scope="module")
def scratch(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """A volume of each pod's own on the disk of its node: with it goes a claim."""
    if scene.cluster.files is None:
        pytest.skip("the disks are folders of this machine")
    nodes = [one["metadata"]["name"] for one in scene.get("nodes")["items"]]
    disks = claims.local_class(SCRATCH, {node: [tmp_path_factory.mktemp(node) for _ in range(4 * 3)] for node in nodes})
    scene.cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": disks}))
    size = {"requests": {"storage": "1Gi"}}
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": SCRATCH, "resources": size}
    yield {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": spec}}}
    scene.gone()
    scene.cluster.kubectl("delete", "persistentvolume", "-l", f"app={SCRATCH}", "--wait=false")
    scene.cluster.kubectl("delete", "storageclass", SCRATCH)


@pytest.mark.parametrize(
    ("how", "operated"), [(how, operated) for operated in (False, True) for how in ("foreground", "background")]
)
def test_s7_deletion_leaves_nothing_even_without_an_operator(
    scene: Scene, scratch: dict[str, Any], how: str, operated: bool
) -> None:
    scene.gone()
    svc.wait_for(lambda: not scene.things("-l", "phalanx.dev/service=chat"), 120, "nothing is left of the test before")
    before = scene.things()
    manifest = scene.manifest(replicas=2, pods=2, placement={"gang": {"mode": "Native"}})
    manifest["spec"]["podTemplate"]["spec"].setdefault("volumes", []).append(scratch)
    scene.apply(manifest)
    scene.wait_ready(2, 400)
    made = scene.things() - before
    assert set(KINDS) <= {one.partition("/")[0].partition(".")[0] for one in made}, made
    try:
        if not operated:
            scene.stop_operator()
        scene.kubectl("delete", "infsvc", "chat", f"--cascade={how}", "--wait=false")
        svc.wait_for(lambda: scene.things() <= before, 300, "nothing of it is left, whatever its labels")
    finally:
        if not operated:
            scene.start_operator()


def answers(scene: Scene) -> list[Told]:
    """Greedy and seeded streams, whole."""
    told = Streams(scene.url, bodies()).run()
    assert [(one.error, len(one.tokens)) for one in told] == [(None, TOKENS)] * len(told)
    return told


def bodies() -> list[dict[str, object]]:
    fixed = {"model": "tiny", "max_tokens": TOKENS, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    return [{**fixed, "prompt": f"stage {i}", "temperature": float(i % 2), "seed": 7 + i} for i in range(4)]


def test_tp_2_pp_2_equals_one_rank_across_restart(scene: Scene) -> None:
    scene.gone()
    scene.apply(scene.manifest(replicas=1, pods=1))
    scene.wait_ready(1, 300)
    alone = answers(scene)
    scene.gone()
    manifest = scene.manifest(replicas=1, pods=2)
    manifest["spec"]["parallelism"] = {"tensor": 2, "pipeline": 2, "gpusPerPod": 1}
    selector = {"matchLabels": {"phalanx.dev/service": "chat", "phalanx.dev/component": "group"}}
    spread = [{**svc.SPREAD, "labelSelector": selector}]
    manifest["spec"]["podTemplate"]["spec"]["topologySpreadConstraints"] = spread
    scene.apply(manifest)
    scene.wait_ready(1, 400)
    group = scene.groups()[0]
    pods = scene.by_group()[group]
    assert len(pods) == 4 and len({pod["spec"]["nodeName"] for pod in pods.values()}) == 2
    assert [one.tokens for one in answers(scene)] == [one.tokens for one in alone]
    before = scene.incarnation(group)
    kill = ("delete", "pod", f"{group}-3", "--wait=false", "--grace-period=1")
    struck = Streams(scene.url, bodies(), lambda: scene.kubectl(*kill))
    told = struck.run()
    assert struck.spread is not None
    assert [(one.error, one.tokens) for one in told] == [(None, one.tokens) for one in alone]
    scene.wait_ready(1, 300)
    assert scene.incarnation(group) > before
    time.sleep(1)
    assert [one.tokens for one in answers(scene)] == [one.tokens for one in alone]
