"""S1, S2, S5, S7, S10: creation, scaling, replacement and deletion of groups, and one group of TP 2 and PP 2.

The tests share a namespace and run in order.
"""

import json
import time
from collections.abc import Iterator
from typing import Any

import pytest

from tests.cluster import claims
from tests.cluster import service as svc
from tests.cluster.clients import StreamResult, Streams
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
    scene.delete_service()


def premature_ready(scene: Scene, groups: int) -> str:
    """Returns an error if the status of the current spec claims completion before all pods are ready."""
    service = scene.get("infsvc", "chat")
    status, pods = service["status"], 4 * groups
    if service["spec"]["replicas"] != groups or status.get("observedGeneration") != service["metadata"]["generation"]:
        return ""
    conditions = {c["type"]: (c["status"], c["reason"]) for c in status["conditions"]}
    progress, ready = conditions["Progressing"], sum(map(is_ready, scene.pods().values()))  # pods are read after the status
    if ready >= pods or (conditions["Ready"][0] == "False" and progress[0] == "True" and progress[1] != "Complete"):
        return ""
    return f"with {ready} of {pods} pods ready: Ready {conditions['Ready']}, Progressing {progress}"


def test_s1_scale_out_adds_whole_groups_and_keeps_pods(four: Scene) -> None:
    before = four.uids()
    with always(lambda: premature_ready(four, 4)) as errors:
        four.scale(4)
        svc.wait_for(lambda: four.condition("Progressing") == ("True", "Scaling"), 30, "it progresses")
        assert four.condition("Ready")[0] == "False"
        four.wait_ready(4, 600)
    assert errors == []
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
    remaining = four.groups()
    assert len(remaining) == 2
    assert {name: four.fingerprints(name) for name in remaining} == {name: before[name] for name in remaining}


def test_s5_deleted_group_is_replaced(four: Scene) -> None:
    victim, other = sorted(four.groups())
    before, deleted = four.fingerprints(other), uids(four)[victim]
    four.kubectl("delete", "statefulset", victim, "--wait=false")
    svc.wait_for(lambda: len(uids(four)) == 2 and deleted not in uids(four).values(), 60, "a replacement")
    four.wait_ready(2, 400)
    assert other in four.groups() and deleted not in uids(four).values(), "names are reused"
    assert four.fingerprints(other) == before


def uids(scene: Scene) -> dict[str, str]:
    return {name: body["metadata"]["uid"] for name, body in scene.sets().items()}


def test_s10_deleted_worker_restarts_only_its_group(scene: Scene) -> None:
    scene.delete_service()
    scene.apply(scene.manifest(replicas=2, pods=3))
    scene.wait_ready(2, 400)
    victim, other = sorted(scene.groups())
    incarnations = {name: scene.incarnation(name) for name in (victim, other)}
    stay = [f"{victim}-0", f"{victim}-1"]
    ranks = {name: rank_starts(scene, name) for name in stay}
    assert all(map(len, ranks.values())), ranks
    untouched = scene.fingerprints(other)
    scene.kubectl("delete", "pod", f"{victim}-2", "--wait=false", "--grace-period=1")
    svc.wait_for(lambda: scene.incarnation(victim) > incarnations[victim], 120, "all ranks of the group restart")
    scene.wait_ready(2, 300)
    assert scene.incarnation(victim) > incarnations[victim]
    for name in stay:
        now = rank_starts(scene, name)
        assert now and not now & ranks[name], "no rank of the former incarnation remains"
    assert (scene.fingerprints(other), scene.incarnation(other)) == (untouched, incarnations[other])
    groups = {group["name"]: group for group in scene.status()["groups"]}
    assert groups[victim]["restarts"] == 0, "a deleted pod is not a failure of the group"


def test_group_restarts_without_an_operator(scene: Scene) -> None:
    """Uses the service of the previous test: two groups of three pods."""
    victim, other = sorted(scene.groups())
    before, untouched = scene.incarnation(victim), scene.fingerprints(other)
    scene.stop_operator()
    try:
        scene.kubectl("delete", "pod", f"{victim}-1", "--wait=false", "--grace-period=1")
        svc.wait_for(lambda: scene.incarnation(victim) > before, 120, "all ranks of the group restart")
        svc.wait_for(lambda: sorted(scene.ready_groups()) == [victim, other], 120, "all pods are ready")
        assert run_streams(scene)
    finally:
        scene.start_operator()
    scene.wait_ready(2, 300)
    assert scene.fingerprints(other) == untouched


RANKS = """
import pathlib
for entry in pathlib.Path("/proc").iterdir():
    if entry.name.isdigit() and b"phalanx_runtime.rank" in (entry / "cmdline").read_bytes().split(b"\\0"):
        print(entry.name, (entry / "stat").read_text().rpartition(")")[2].split()[19])
"""


def rank_starts(scene: Scene, pod: str) -> set[str]:
    """Returns PID and start time of each rank of a pod."""
    return set(scene.kubectl("exec", pod, "-c", "runtime", "--", "python3", "-c", RANKS).splitlines())


SCRATCH = "scratch-disks"
KINDS = (
    *("pod", "service", "secret", "serviceaccount", "role", "rolebinding", "configmap", "statefulset", "deployment"),
    *("controllerrevision", "replicaset", "poddisruptionbudget", "networkpolicy", "podgroup", "persistentvolumeclaim"),
)
"""Kinds of a service's objects."""


@pytest.fixture(scope="module")
def scratch(scene: Scene, tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """An ephemeral volume per pod, with its claim."""
    if scene.cluster.files is None:
        pytest.skip("the disks are folders of this machine")
    nodes = [node["metadata"]["name"] for node in scene.get("nodes")["items"]]
    disks = claims.local_class(SCRATCH, {node: [tmp_path_factory.mktemp(node) for _ in range(4 * 3)] for node in nodes})
    scene.cluster.kubectl("apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": disks}))
    size = {"requests": {"storage": "1Gi"}}
    spec = {"accessModes": ["ReadWriteOnce"], "storageClassName": SCRATCH, "resources": size}
    yield {"name": "scratch", "ephemeral": {"volumeClaimTemplate": {"spec": spec}}}
    scene.delete_service()
    scene.cluster.kubectl("delete", "persistentvolume", "-l", f"app={SCRATCH}", "--wait=false")
    scene.cluster.kubectl("delete", "storageclass", SCRATCH)


@pytest.mark.parametrize(
    ("cascade", "has_operator"),
    [(cascade, runs) for runs in (False, True) for cascade in ("foreground", "background")],
)
def test_s7_deletion_leaves_nothing_even_without_an_operator(
    scene: Scene, scratch: dict[str, Any], cascade: str, has_operator: bool
) -> None:
    scene.delete_service()
    svc.wait_for(lambda: not scene.object_names("-l", "phalanx.dev/service=chat"), 120, "nothing remains of the previous test")
    before = scene.object_names()
    manifest = scene.manifest(replicas=2, pods=2, placement={"gang": {"mode": "Native"}})
    manifest["spec"]["podTemplate"]["spec"].setdefault("volumes", []).append(scratch)
    scene.apply(manifest)
    scene.wait_ready(2, 400)
    created = scene.object_names() - before
    assert set(KINDS) <= {name.partition("/")[0].partition(".")[0] for name in created}, created
    try:
        if not has_operator:
            scene.stop_operator()
        scene.kubectl("delete", "infsvc", "chat", f"--cascade={cascade}", "--wait=false")
        svc.wait_for(lambda: scene.object_names() <= before, 300, "nothing remains, with any labels")
    finally:
        if not has_operator:
            scene.start_operator()


def run_streams(scene: Scene) -> list[StreamResult]:
    """Returns the results of greedy and seeded streams, which must be complete."""
    results = Streams(scene.url, bodies()).run()
    assert [(result.error, len(result.tokens)) for result in results] == [(None, TOKENS)] * len(results)
    return results


def bodies() -> list[dict[str, object]]:
    fixed = {"model": "tiny", "max_tokens": TOKENS, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    return [{**fixed, "prompt": f"stage {i}", "temperature": float(i % 2), "seed": 7 + i} for i in range(4)]


def test_tp_2_pp_2_equals_one_rank_across_restart(scene: Scene) -> None:
    scene.delete_service()
    scene.apply(scene.manifest(replicas=1, pods=1))
    scene.wait_ready(1, 300)
    expected = [result.tokens for result in run_streams(scene)]
    scene.delete_service()
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
    assert [result.tokens for result in run_streams(scene)] == expected
    before = scene.incarnation(group)
    kill = ("delete", "pod", f"{group}-3", "--wait=false", "--grace-period=1")
    streams = Streams(scene.url, bodies(), lambda: scene.kubectl(*kill))
    results = streams.run()
    assert streams.spread is not None
    assert [(result.error, result.tokens) for result in results] == [(None, tokens) for tokens in expected]
    scene.wait_ready(1, 300)
    assert scene.incarnation(group) > before
    time.sleep(1)
    assert [result.tokens for result in run_streams(scene)] == expected
