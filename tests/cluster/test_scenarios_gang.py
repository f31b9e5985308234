"""S16, S17, S18, S38: groups are placed whole or not at all, together and apart, and evictions break one at a time."""

import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.cluster import service as svc
from tests.cluster.config import GPU_RESOURCE
from tests.cluster.scenes import Scene, is_over, is_placed
from tests.cluster.watching import always, at_most, broken, evicted
from tools.errors import Failed

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
TIMEOUT_S, LOOK_S = 20, 3
NATIVE = "/apis/scheduling.k8s.io/v1alpha2"


@pytest.fixture
def crowded(scene: Scene) -> Iterator[Scene]:
    """A namespace whose scenario takes devices away, and gives them back."""
    if scene.cluster.files is None:
        pytest.skip("devices are taken away: the cluster of this machine only")
    scene.gone()
    yield scene
    scene.free_all()
    scene.gone()


def has_native(scene: Scene) -> bool:
    try:
        scene.cluster.kubectl("get", "--raw", NATIVE)
    except Failed:
        return False
    return True


def placed(scene: Scene) -> dict[str, int]:
    """How many pods of each group have nodes, and the devices there: one that has ended has none any more."""
    return {name: sum(is_placed(pod) and not is_over(pod) for pod in pods.values()) for name, pods in scene.by_group().items()}


def uids(scene: Scene, group: str) -> set[str]:
    """UIDs of a group's pods; another group may have its name later."""
    return {pod["metadata"]["uid"] for pod in scene.by_group().get(group, {}).values()}


def tried(scene: Scene, whole: str) -> tuple[str, set[str]] | None:
    """Another group than that one, and the UIDs of its pods; None while there is none: attempts have pauses between them."""
    return next(((group, held) for group in scene.sets() if group != whole and (held := uids(scene, group))), None)


def test_s16_no_pod_of_a_group_starts_alone(crowded: Scene) -> None:
    assert has_native(crowded), "the test cluster serves PodGroups"
    crowded.leave(2)
    with always(lambda: str({g: n for g, n in placed(crowded).items() if 0 < n < 3} or "")) as halves:
        crowded.apply(crowded.manifest(replicas=1, pods=3, placement={"gang": {"mode": "Native"}}))
        svc.wait_for(lambda: [len(pods) for pods in crowded.by_group().values()] == [3], 60, "three pods")
        time.sleep(15)
        assert list(placed(crowded).values()) == [0]
        assert crowded.condition("CapacityAvailable")[0] == "False"
        assert crowded.status()["gang"] == "Native"
        group = crowded.groups()[0]
        owners = crowded.get("podgroups.scheduling.k8s.io", group)["metadata"]["ownerReferences"]
        assert [owner["uid"] for owner in owners] == [crowded.sets()[group]["metadata"]["uid"]]
    assert halves == []
    crowded.free_all()
    crowded.wait_ready(1, 300)
    assert list(placed(crowded).values()) == [3]
    crowded.kubectl("delete", "statefulset", group)
    svc.wait_for(lambda: group not in crowded.kubectl("get", "podgroups.scheduling.k8s.io", "-o", "name"), 60, "it goes with it")


def test_s17_half_scheduled_group_releases_its_devices(crowded: Scene) -> None:
    crowded.leave(3)
    gang = {"mode": "Fallback", "timeoutSeconds": TIMEOUT_S}
    crowded.apply(crowded.manifest(replicas=2, pods=2, placement={"gang": gang}))
    lived: dict[str, float] = {}

    def look() -> str:
        lived.update({uid(one): age_s(one) for one in crowded.get("statefulsets")["items"]})
        halves = [group for group, count in placed(crowded).items() if count == 1]
        return at_most(1, halves, "two half groups")

    with always(look) as wrong:
        svc.wait_for(lambda: len(crowded.ready_groups()) == 1, 300, "one group is whole")
        whole = crowded.ready_groups()[0]
        half, held = svc.wait_for(lambda: tried(crowded, whole), 360, "the other one is tried")
        struck = uid(crowded.sets()[half])
        svc.wait_for(lambda: says_shortage(crowded, half), 60, "what is short, and for whom, is said")
        svc.wait_for(lambda: sum(crowded.free_devices().values()) == 0, 30, "half of it has the last device")
        svc.wait_for(lambda: not held & uids(crowded, half), TIMEOUT_S + 90, "a half group gives its devices back")
        svc.wait_for(lambda: sum(crowded.free_devices().values()) == 1, 180, "the device is free again")
        svc.wait_for(lambda: says_shortage(crowded, half), 30, "and it is still said what is short")
        assert lived[struck] >= TIMEOUT_S - LOOK_S, "it had its time"
        assert crowded.condition("Available") == ("True", "Serving")
    assert wrong == []
    crowded.free_all()
    crowded.wait_ready(2, 500)
    assert whole in crowded.groups()
    assert crowded.condition("CapacityAvailable") == ("True", "Scheduled")


def uid(body: dict[str, Any]) -> str:
    found: str = body["metadata"]["uid"]
    return found


def age_s(body: dict[str, Any]) -> float:
    """How old an object is, or was when it was to be deleted."""
    times = body["metadata"]
    end = datetime.fromisoformat(times["deletionTimestamp"]) if "deletionTimestamp" in times else datetime.now(UTC)
    return (end - datetime.fromisoformat(times["creationTimestamp"])).total_seconds()


def says_shortage(scene: Scene, group: str) -> bool:
    """Whether the status names the group that has no room, and the device that is short."""
    said = scene.message("CapacityAvailable")
    return scene.condition("CapacityAvailable")[0] == "False" and group in said and GPU_RESOURCE in said


RACK = "example.com/rack"


@pytest.fixture
def racked(scene: Scene) -> Iterator[Scene]:
    """A namespace whose nodes are racks of their own meanwhile."""
    scene.gone()
    names = [one["metadata"]["name"] for one in scene.get("nodes")["items"]]
    if len(names) < 2:
        pytest.skip("two nodes")
    for name in names:
        scene.cluster.kubectl("label", "node", name, f"{RACK}=of-{name}", "--overwrite")
    yield scene
    scene.gone()
    for name in names:
        scene.cluster.kubectl("label", "node", name, f"{RACK}-")


def nodes_of(scene: Scene) -> dict[str, set[str]]:
    """The nodes of each group's pods that have any."""
    return {name: {pod["spec"]["nodeName"] for pod in pods.values() if is_placed(pod)} for name, pods in scene.by_group().items()}


def test_s18_groups_are_packed_spread_and_wait_whole(racked: Scene) -> None:
    """Each group in one rack, no two of them on one node; with as many groups as nodes there is no place for one more."""
    apart = {"topology": {"key": RACK, "mode": "Required"}, "spreadGroups": "Required"}
    placement = apart | {"gang": {"mode": "Fallback"}}
    num_nodes = len(racked.get("nodes")["items"])
    racked.apply(racked.manifest(replicas=num_nodes, pods=2, placement=placement))
    racked.wait_ready(num_nodes, 500)
    held = nodes_of(racked)
    assert [len(nodes) for nodes in held.values()] == [1] * num_nodes, "a group keeps together"
    assert len(set.union(*held.values())) == num_nodes, "groups keep apart"
    racked.scale(num_nodes + 1)
    svc.wait_for(lambda: racked.condition("CapacityAvailable") == ("False", "Unschedulable"), 120, "there is no place")
    (late,) = set(racked.by_group()) - set(held)
    said = racked.message("CapacityAvailable")
    assert late in said and "affinity" in said, said
    assert nodes_of(racked)[late] == set(), "not half of it is placed"
    assert racked.condition("Available") == ("True", "Serving")
    racked.scale(num_nodes)
    svc.wait_for(lambda: set(racked.sets()) == set(held), 120, "the one without a place goes first")
    svc.wait_for(lambda: racked.condition("CapacityAvailable") == ("True", "Scheduled"), 60, "nothing is short")
    assert nodes_of(racked) == held


def drain(scene: Scene, node: str) -> "subprocess.Popen[str]":
    """A drain of a node's groups, under way."""
    flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
    ours = ("--pod-selector", f"phalanx.dev/component=group,phalanx.dev/service=chat,{SCENE}={scene.namespace}")
    command = scene.cluster.command(scene.cluster.kubectl_program, "drain", node, *flags, *ours)
    return subprocess.Popen(
        command, env=scene.cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


SCENE = "example.com/scene"


def test_s38_draining_two_nodes_breaks_one_group_each_time(scene: Scene) -> None:
    scene.gone()
    manifest = scene.manifest(replicas=3, pods=4, placement={"gang": {"mode": "Native" if has_native(scene) else "Fallback"}})
    manifest["spec"]["podTemplate"]["metadata"] = {"labels": {SCENE: scene.namespace}}
    scene.apply(manifest)
    scene.wait_ready(3, 900)
    nodes = sorted({pod["spec"]["nodeName"] for pod in scene.pods().values()})
    before = {group: {name: pod["metadata"]["uid"] for name, pod in pods.items()} for group, pods in scene.by_group().items()}
    drains = [drain(scene, node) for node in nodes]

    def look() -> str:
        sets = list(scene.sets().values())
        missing = ["one that is not there"] * (3 - len(sets))
        return at_most(1, broken(sets, list(scene.pods().values())) + missing, "several groups are broken")

    try:
        with always(look) as wrong:
            time.sleep(60)
        assert wrong == []
        assert scene.condition("Available") == ("True", "Serving")
        told = "".join(one.communicate(timeout=120)[0] for one in drains)
        left = set(scene.uids().values())
        whole = [group for group, pods in before.items() if set(pods) <= evicted(told) and not left & set(pods.values())]
        assert whole, f"no group was evicted: {told}"
    finally:
        for one in drains:
            one.kill()
            one.wait(120)
        for node in nodes:
            scene.cluster.kubectl("uncordon", node)
    scene.wait_ready(3, 900)
    scene.gone()
