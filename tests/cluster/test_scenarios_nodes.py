"""Lost nodes: their groups have successors elsewhere, and streams continue. Nodes lost to the control plane alone keep theirs.

tests/control/decide/test_lost_nodes.py covers the decisions; these tests use real kubelets and controllers.
"""

import json
import os
import time
from collections.abc import Iterator
from contextlib import ExitStack
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest

from bench.chaos.checks import ServiceState, duplicates, unsettled
from tests.cluster import operator as installation
from tests.cluster import service as svc
from tests.cluster.chat import ROUTERS, SPEED_DECAY_S
from tests.cluster.clients import StreamResult, Streams
from tests.cluster.config import NODES
from tests.cluster.scenes import Scene
from tests.cluster.watching import always

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
LOST_S = 10
"""Time until the service declares a node lost."""
NUM_STREAMS, TOKENS = 16, 600
CALM_S = 30.0
CUT_S = float(os.environ.get("PHALANX_CUT_S", "120"))
"""Time for which nodes are separated from the API server. Kubernetes evicts pods without tolerations after 300 s."""
SUCCESSOR_LIMIT_S = 60.0
"""From the routers' loss of a group to its successor."""
HOME, LOST = (node.name for node in NODES)
"""The first node has the control plane and the route to the routers."""
KINDS = ("StatefulSet", "Pod", "ReplicaSet", "Deployment")


@pytest.fixture(scope="module")
def spread(scene: Scene) -> Iterator[Scene]:
    """Two groups of two pods on separate nodes. The only router and an operator are on the remaining node.

    Other pods of the lost node are replaced only minutes later.
    """
    if scene.cluster.files is None:
        pytest.skip("kills a node: only in the cluster of this machine")
    one_node = {"key": "kubernetes.io/hostname", "mode": "Required"}
    placement = {"topology": one_node, "spreadGroups": "Preferred"}
    scene.cluster.kubectl("cordon", LOST)
    try:
        if operators_at(scene) == {LOST}:
            scene.restart_operator()
        scene.apply(scene.manifest(replicas=0, placement=placement, restartPolicy={"nodeLostSeconds": LOST_S}))
        svc.wait_for(lambda: scene.condition("RouterReady")[0] == "True", 120, "a router")
    finally:
        scene.cluster.kubectl("uncordon", LOST)
    scene.scale(2)
    scene.wait_ready(2, 400)
    yield scene
    scene.cluster.repair()
    scene.delete_service()


def operators_at(scene: Scene) -> set[str]:
    """Returns the nodes of the operators."""
    query = ("-n", installation.NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=phalanx-operator", "-o", "json")
    return {pod["spec"].get("nodeName", "") for pod in json.loads(scene.cluster.kubectl(*query))["items"]}


def bodies() -> list[dict[str, Any]]:
    """Returns greedy and seeded requests."""
    fixed = {"model": "tiny", "max_tokens": TOKENS, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    return [{**fixed, "prompt": f"node {i}", "temperature": float(i % 2), "seed": 50 + i} for i in range(NUM_STREAMS)]


def assert_equal(results: list[StreamResult], expected: list[StreamResult]) -> None:
    assert [result.error for result in results] == [None] * NUM_STREAMS
    assert [result.usage for result in results] == [TOKENS] * NUM_STREAMS
    assert [result.tokens for result in results] == [result.tokens for result in expected]


def at(scene: Scene, node: str) -> dict[str, dict[str, Any]]:
    """Returns the service's pods on a node, with routers."""
    pods = scene.pods("phalanx.dev/service=chat")
    return {name: pod for name, pod in pods.items() if pod["spec"].get("nodeName") == node}


def running(leader: dict[str, Any]) -> float:
    """Returns the running requests of a leader."""
    return svc.metric(httpx.get(f"http://{leader['status']['podIP']}:8000/metrics", timeout=10).text, "vllm:num_requests_running")


def unready_since(scene: Scene, node: str) -> datetime | None:
    """Returns the time since which a node is not ready, if it is not."""
    (ready,) = [c for c in scene.get("node", node)["status"]["conditions"] if c["type"] == "Ready"]
    return None if ready["status"] == "True" else datetime.fromisoformat(ready["lastTransitionTime"])


def view(scene: Scene) -> ServiceState:
    """Returns the service and its objects for the checks of the chaos bench."""
    items = scene.get("statefulsets,pods,replicasets,deployments", "-l", "phalanx.dev/service=chat")["items"]
    sets, pods, replica_sets, deployments = ([item for item in items if item["kind"] == kind] for kind in KINDS)
    return ServiceState(scene.get("infsvc", "chat"), sets, pods, replica_sets, deployments)


def created_at(scene: Scene, group: str) -> datetime:
    """Returns the creation time of a group."""
    return datetime.fromisoformat(scene.sets()[group]["metadata"]["creationTimestamp"])


def uids(scene: Scene) -> dict[str, str]:
    """Returns UIDs of the groups."""
    return {name: body["metadata"]["uid"] for name, body in scene.sets().items()}


def event_messages(scene: Scene) -> str:
    """Returns the messages of all events."""
    return "\n".join(event["message"] for event in scene.get("events")["items"])


def test_lost_nodes_group_is_replaced_and_streams_continue(spread: Scene) -> None:
    expected = Streams(spread.url, bodies()).run()
    (victim,) = {pod["metadata"]["labels"]["phalanx.dev/group"] for pod in at(spread, LOST).values()}
    (other,) = set(spread.groups()) - {victim}
    untouched, leader, takeovers = spread.fingerprints(other), spread.pods()[f"{victim}-0"], spread.num_takeovers()
    killed: list[float] = []
    time.sleep(SPEED_DECAY_S)

    def kill() -> None:
        killed.extend([time.monotonic(), running(leader)])
        spread.cluster.kill_node(LOST)

    with always(lambda: "; ".join(duplicates(view(spread)))) as doubles:
        assert_equal(Streams(spread.url, bodies(), kill).run(), expected)
        assert killed[1] > 0 and spread.num_takeovers() > takeovers, f"{killed[1]:.0f} streams ran there"
        since = svc.wait_for(lambda: unready_since(spread, LOST), 60, "the node is not ready")
        svc.wait_for(lambda: not at(spread, LOST), LOST_S + 60, "its pods are deleted")
        svc.wait_for(lambda: victim not in spread.groups(), 60, "the group is deleted")
        spread.wait_ready(2, 300)
        assert unready_since(spread, LOST) == since, "the node is still lost"
        print(f"two groups again {time.monotonic() - killed[0]:.1f} s after a node with {killed[1]:.0f} streams was killed")
    assert doubles == []
    (successor,) = set(spread.groups()) - {other}
    assert {pod["spec"]["nodeName"] for pod in spread.by_group()[successor].values()} == {HOME}
    assert created_at(spread, successor) >= since + timedelta(seconds=LOST_S)
    assert f"{victim}: node {LOST} has not been ready for {LOST_S} s" in event_messages(spread)
    assert spread.fingerprints(other) == untouched, "the other group did not change"
    assert [group["restarts"] for group in spread.status()["groups"]] == [0, 0], "a lost node is not a failure of a group"


def test_returning_node_duplicates_and_moves_nothing(spread: Scene) -> None:
    """The node that the previous test has killed."""
    assert unready_since(spread, LOST), "the node is lost"
    pods, sets, takeovers = spread.uids(), uids(spread), spread.num_takeovers()
    with always(lambda: "; ".join(unsettled(view(spread)))) as errors:
        spread.cluster.repair()
        time.sleep(CALM_S)
    assert errors == []
    assert unready_since(spread, LOST) is None
    assert (spread.uids(), uids(spread), at(spread, LOST)) == (pods, sets, {})
    assert [result.error for result in Streams(spread.url, bodies()).run()] == [None] * NUM_STREAMS
    assert spread.num_takeovers() == takeovers


def stream_for(scene: Scene, seconds: float, expected: list[StreamResult]) -> int:
    """Returns the number of streams that began within `seconds`. Each is whole and equal to the expected one."""
    end_s, count = time.monotonic() + seconds, 0
    while time.monotonic() < end_s:
        assert_equal(Streams(scene.url, bodies()).run(), expected)
        count += NUM_STREAMS
    return count


def refusal(scene: Scene) -> str:
    """Returns why a new connection fails, and when, if it does."""
    try:
        status = httpx.get(f"{scene.url}/readyz", timeout=10).status_code
        return "" if status == 200 else f"{status} at {time.strftime('%X')}"
    except httpx.TransportError as error:
        return f"{type(error).__name__} at {time.strftime('%X')}"


def publishes_unready(scene: Scene) -> bool:
    """Returns whether unready routers get connections."""
    return bool(scene.get("service", "chat")["spec"].get("publishNotReadyAddresses"))


def pods_and_restarts(scene: Scene) -> tuple[dict[str, str], int]:
    """Returns the UIDs of the pods of groups and routers, and how often their containers were restarted."""
    return scene.uids() | scene.uids(ROUTERS), scene.restarts() + scene.restarts(ROUTERS)


def test_nodes_cut_off_from_the_control_plane_keep_everything(spread: Scene) -> None:
    """Both nodes. Streams run during the cut and when it ends, and no new connection fails then, although Kubernetes counts the
    only router as unready until its kubelet has reported it.

    The successor of the first test's group is replaced first, so that each node has a group again.
    """
    spread.scale(1)
    spread.wait_ready(1, 240)
    spread.scale(2)
    spread.wait_ready(2, 400)
    assert at(spread, LOST), "a group on each node"
    expected = Streams(spread.url, bodies()).run()
    pods, sets = pods_and_restarts(spread), uids(spread)
    with always(lambda: "; ".join(duplicates(view(spread)))) as doubles, ExitStack() as cut:
        cut.enter_context(spread.cluster.separated(HOME, LOST))
        for node in (HOME, LOST):
            svc.wait_for(lambda node=node: unready_since(spread, node), 90, f"{node} is not ready")  # type: ignore[misc]
        svc.wait_for(lambda: spread.condition("ControlPlanePartitioned")[0] == "True", 60, "the partition is reported")
        svc.wait_for(lambda: spread.condition("Available")[1] == "NodesSilent", 60, "routers' reports count")
        count = stream_for(spread, CUT_S, expected)
        assert spread.condition("Available") in (("True", "NodesSilent"), ("True", "Unreachable")), "clients get answers"
        assert spread.condition("Ready") == ("False", "Unreachable")
        assert (pods_and_restarts(spread), uids(spread)) == (pods, sets), "nothing was deleted"
        assert publishes_unready(spread)
        with always(lambda: refusal(spread)) as refused:
            assert_equal(Streams(spread.url, bodies(), cut.close).run(), expected)  # the cut ends while they run
            for node in (HOME, LOST):
                svc.wait_for(lambda node=node: not unready_since(spread, node), 120, f"{node} is ready")  # type: ignore[misc]
            svc.wait_for(lambda: spread.condition("Ready")[0] == "True", 120, "the service is ready")
            count += NUM_STREAMS + stream_for(spread, CALM_S, expected)
            svc.wait_for(lambda: not publishes_unready(spread), 120, "the Service has ready routers only")
            time.sleep(2)
        assert refused == [], "the Service keeps the router"
    assert spread.condition("Available") == ("True", "Serving")
    assert doubles == [] and (pods_and_restarts(spread), uids(spread)) == (pods, sets)
    assert [group["restarts"] for group in spread.status()["groups"]] == [0, 0]
    print(f"{count} streams while both nodes were cut off for {CUT_S:.0f} s and after; nothing was deleted or restarted")


def test_cut_off_node_that_dies_gets_successors(spread: Scene) -> None:
    expected = Streams(spread.url, bodies()).run()
    (victim,) = {pod["metadata"]["labels"]["phalanx.dev/group"] for pod in at(spread, LOST).values()}
    sets = uids(spread)
    try:
        with spread.cluster.separated(LOST):
            svc.wait_for(lambda: unready_since(spread, LOST), 90, "the node is not ready")
            count = stream_for(spread, 2 * LOST_S, expected)
            assert uids(spread) == sets and spread.condition("Ready") == ("False", "Unreachable")
            assert spread.condition("Available") == ("True", "Serving"), "the router's node is not silent"
            assert "routers report that the group serves" in spread.message("Ready")
            spread.cluster.kill_node(LOST)
            killed_s = time.monotonic()
            svc.wait_for(lambda: set(uids(spread)) - set(sets), SUCCESSOR_LIMIT_S, "a successor")
            successor_s = time.monotonic() - killed_s
        svc.wait_for(lambda: victim not in spread.groups(), 60, "the group is deleted")
        spread.wait_ready(2, 300)
        assert_equal(Streams(spread.url, bodies()).run(), expected)
    finally:
        spread.cluster.repair()
    print(f"{count} streams while the node was only cut off; a successor {successor_s:.1f} s after it died")
