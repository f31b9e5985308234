"""S16, S17, S18, S38: gang placement, packing, spreading, and evictions of one group at a time."""

import subprocess
import time
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.cluster import service as svc
from tests.cluster.config import GPU_RESOURCE
from tests.cluster.scenes import Scene, has_ended, is_placed
from tests.cluster.watching import always, at_most, broken, evicted
from tools.errors import Failed

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
TIMEOUT_S, CHECK_S = 20, 3
NATIVE = "/apis/scheduling.k8s.io/v1alpha2"


@pytest.fixture
def crowded(scene: Scene) -> Iterator[Scene]:
    """A namespace for scenarios that occupy devices."""
    if scene.cluster.files is None:
        pytest.skip("occupies devices: only in the cluster of this machine")
    scene.delete_service()
    yield scene
    scene.release_devices()
    scene.delete_service()


def has_native(scene: Scene) -> bool:
    try:
        scene.cluster.kubectl("get", "--raw", NATIVE)
    except Failed:
        return False
    return True


def placed(scene: Scene) -> dict[str, int]:
    """Returns the number of running pods with a node per group."""
    return {name: sum(is_placed(pod) and not has_ended(pod) for pod in pods.values()) for name, pods in scene.by_group().items()}


def uids(scene: Scene, group: str) -> set[str]:
    """Returns UIDs of a group's pods: group names are reused."""
    return {pod["metadata"]["uid"] for pod in scene.by_group().get(group, {}).values()}


def other_attempt(scene: Scene, complete: str) -> tuple[str, set[str]] | None:
    """Returns a group other than `complete` and the UIDs of its pods, if it exists: attempts have pauses."""
    return next(((group, pods) for group in scene.sets() if group != complete and (pods := uids(scene, group))), None)


def test_s16_no_pod_of_a_group_starts_alone(crowded: Scene) -> None:
    assert has_native(crowded), "the test cluster serves PodGroups"
    crowded.occupy_all_but(2)
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
    crowded.release_devices()
    crowded.wait_ready(1, 300)
    assert list(placed(crowded).values()) == [3]
    crowded.kubectl("delete", "statefulset", group)
    svc.wait_for(
        lambda: group not in crowded.kubectl("get", "podgroups.scheduling.k8s.io", "-o", "name"),
        60,
        "it is deleted with the group",
    )


def test_s17_half_scheduled_group_releases_its_devices(crowded: Scene) -> None:
    crowded.occupy_all_but(3)
    gang = {"mode": "Fallback", "timeoutSeconds": TIMEOUT_S}
    crowded.apply(crowded.manifest(replicas=2, pods=2, placement={"gang": gang}))
    ages_s: dict[str, float] = {}

    def check() -> str:
        ages_s.update({uid(body): age_s(body) for body in crowded.get("statefulsets")["items"]})
        halves = [group for group, count in placed(crowded).items() if count == 1]
        return at_most(1, halves, "two half groups")

    with always(check) as errors:
        svc.wait_for(lambda: len(crowded.ready_groups()) == 1, 300, "one group is complete")
        complete = crowded.ready_groups()[0]
        half, pods = svc.wait_for(lambda: other_attempt(crowded, complete), 360, "the other group is attempted")
        victim = uid(crowded.sets()[half])
        svc.wait_for(lambda: reports_shortage(crowded, half), 60, "the shortage is reported")
        svc.wait_for(lambda: sum(crowded.free_devices().values()) == 0, 30, "half a group has the last device")
        svc.wait_for(lambda: not pods & uids(crowded, half), TIMEOUT_S + 90, "a half group releases its devices")
        svc.wait_for(lambda: sum(crowded.free_devices().values()) == 1, 180, "the device is free again")
        svc.wait_for(lambda: reports_shortage(crowded, half), 30, "the shortage is still reported")
        assert ages_s[victim] >= TIMEOUT_S - CHECK_S, "its timeout has passed"
        assert crowded.condition("Available") == ("True", "Serving")
    assert errors == []
    crowded.release_devices()
    crowded.wait_ready(2, 500)
    assert complete in crowded.groups()
    assert crowded.condition("CapacityAvailable") == ("True", "Scheduled")


def uid(body: dict[str, Any]) -> str:
    text: str = body["metadata"]["uid"]
    return text


def age_s(body: dict[str, Any]) -> float:
    """Returns the age of an object, up to its deletion."""
    times = body["metadata"]
    end = datetime.fromisoformat(times["deletionTimestamp"]) if "deletionTimestamp" in times else datetime.now(UTC)
    return (end - datetime.fromisoformat(times["creationTimestamp"])).total_seconds()


def reports_shortage(scene: Scene, group: str) -> bool:
    """Whether the status names the unplaced group and the missing device."""
    message = scene.message("CapacityAvailable")
    return scene.condition("CapacityAvailable")[0] == "False" and group in message and GPU_RESOURCE in message


RACK = "example.com/rack"


@pytest.fixture
def racked(scene: Scene) -> Iterator[Scene]:
    """A namespace in a cluster with one rack per node."""
    scene.delete_service()
    names = [node["metadata"]["name"] for node in scene.get("nodes")["items"]]
    if len(names) < 2:
        pytest.skip("needs two nodes")
    for name in names:
        scene.cluster.kubectl("label", "node", name, f"{RACK}=of-{name}", "--overwrite")
    yield scene
    scene.delete_service()
    for name in names:
        scene.cluster.kubectl("label", "node", name, f"{RACK}-")


def nodes_of(scene: Scene) -> dict[str, set[str]]:
    """Returns the nodes of each group's placed pods."""
    return {name: {pod["spec"]["nodeName"] for pod in pods.values() if is_placed(pod)} for name, pods in scene.by_group().items()}


def test_s18_groups_are_packed_spread_and_wait_whole(racked: Scene) -> None:
    """Each group is in one rack, with no other group on its node. One more group than nodes has no place."""
    apart = {"topology": {"key": RACK, "mode": "Required"}, "spreadGroups": "Required"}
    placement = apart | {"gang": {"mode": "Fallback"}}
    num_nodes = len(racked.get("nodes")["items"])
    racked.apply(racked.manifest(replicas=num_nodes, pods=2, placement=placement))
    racked.wait_ready(num_nodes, 500)
    nodes_before = nodes_of(racked)
    assert [len(nodes) for nodes in nodes_before.values()] == [1] * num_nodes, "groups are packed"
    assert len(set.union(*nodes_before.values())) == num_nodes, "groups are spread"
    racked.scale(num_nodes + 1)
    svc.wait_for(lambda: racked.condition("CapacityAvailable") == ("False", "Unschedulable"), 120, "a group has no place")
    (late,) = set(racked.by_group()) - set(nodes_before)
    message = racked.message("CapacityAvailable")
    assert late in message and "affinity" in message, message
    assert nodes_of(racked)[late] == set(), "no pod of it is placed"
    assert racked.condition("Available") == ("True", "Serving")
    racked.scale(num_nodes)
    svc.wait_for(lambda: set(racked.sets()) == set(nodes_before), 120, "the unplaced group is deleted first")
    svc.wait_for(lambda: racked.condition("CapacityAvailable") == ("True", "Scheduled"), 60, "no shortage")
    assert nodes_of(racked) == nodes_before


def drain(scene: Scene, node: str) -> "subprocess.Popen[str]":
    """Starts a drain of a node's groups."""
    flags = ("--ignore-daemonsets", "--delete-emptydir-data", "--force", "--timeout=60s")
    selector = ("--pod-selector", f"phalanx.dev/component=group,phalanx.dev/service=chat,{SCENE}={scene.namespace}")
    command = scene.cluster.command(scene.cluster.kubectl_program, "drain", node, *flags, *selector)
    return subprocess.Popen(
        command, env=scene.cluster.environment(), stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
    )


SCENE = "example.com/scene"


def test_s38_draining_two_nodes_breaks_one_group_each_time(scene: Scene) -> None:
    scene.delete_service()
    manifest = scene.manifest(replicas=3, pods=4, placement={"gang": {"mode": "Native" if has_native(scene) else "Fallback"}})
    manifest["spec"]["podTemplate"]["metadata"] = {"labels": {SCENE: scene.namespace}}
    scene.apply(manifest)
    scene.wait_ready(3, 900)
    nodes = sorted({pod["spec"]["nodeName"] for pod in scene.pods().values()})
    before = {group: {name: pod["metadata"]["uid"] for name, pod in pods.items()} for group, pods in scene.by_group().items()}
    drains = [drain(scene, node) for node in nodes]

    def check() -> str:
        sets = list(scene.sets().values())
        missing = ["missing"] * (3 - len(sets))
        return at_most(1, broken(sets, list(scene.pods().values())) + missing, "several groups are broken")

    try:
        with always(check) as errors:
            time.sleep(60)
        assert errors == []
        assert scene.condition("Available") == ("True", "Serving")
        output = "".join(each.communicate(timeout=120)[0] for each in drains)
        remaining = set(scene.uids().values())
        groups = [group for group, pods in before.items() if set(pods) <= evicted(output) and not remaining & set(pods.values())]
        assert groups, f"no group was evicted: {output}"
    finally:
        for each in drains:
            each.kill()
            each.wait(120)
        for node in nodes:
            scene.cluster.kubectl("uncordon", node)
    scene.wait_ready(3, 900)
    scene.delete_service()
