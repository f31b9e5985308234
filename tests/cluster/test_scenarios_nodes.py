"""A node is lost with all that ran there, and comes back: meanwhile its groups have successors elsewhere, and no stream breaks.

tests/control/decide/test_lost_nodes.py has the cases; here kubelets are silent, controllers wait for them, and what is decided
must happen.
"""

import json
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from typing import Any

import httpx
import pytest

from bench.chaos.look import View, double, unsettled
from tests.cluster import operator as installation
from tests.cluster import service as svc
from tests.cluster.clients import Streams, Told
from tests.cluster.config import NODES
from tests.cluster.scenes import Scene
from tests.cluster.test_fleet import FADED_S
from tests.cluster.watching import always

pytestmark = [pytest.mark.cluster, pytest.mark.slow]
LOST_S = 10
"""How long the service waits for a node that the control plane does not hear."""
NUM_STREAMS, TOKENS = 16, 600
CALM_S = 30.0
HOME, LOST = (node.name for node in NODES)
"""The control plane is beside the first node, and our way to the routers leads through it."""
KINDS = ("StatefulSet", "Pod", "ReplicaSet", "Deployment")


@pytest.fixture(scope="module")
def spread(scene: Scene) -> Iterator[Scene]:
    """Two groups of two pods, each on a node of its own; the only router and an operator are where nothing is lost.

    Pods of others that are lost come back only minutes later: that is the cluster's to say.
    """
    if scene.cluster.files is None:
        pytest.skip("a node is killed: the cluster of this machine only")
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
    scene.gone()


def operators_at(scene: Scene) -> set[str]:
    """The nodes of the operators."""
    of = ("-n", installation.NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=phalanx-operator", "-o", "json")
    return {pod["spec"].get("nodeName", "") for pod in json.loads(scene.cluster.kubectl(*of))["items"]}


def bodies() -> list[dict[str, Any]]:
    """Half of them greedy, half seeded."""
    fixed = {"model": "tiny", "max_tokens": TOKENS, "extra_body": {"ignore_eos": True, "return_token_ids": True}}
    return [{**fixed, "prompt": f"node {i}", "temperature": float(i % 2), "seed": 50 + i} for i in range(NUM_STREAMS)]


def assert_equal(told: list[Told], alone: list[Told]) -> None:
    assert [one.error for one in told] == [None] * NUM_STREAMS
    assert [one.usage for one in told] == [TOKENS] * NUM_STREAMS
    assert [one.tokens for one in told] == [one.tokens for one in alone], "each token once, and the same ones"


def at(scene: Scene, node: str) -> dict[str, dict[str, Any]]:
    """The service's pods on a node, routers too."""
    pods = scene.pods("phalanx.dev/service=chat")
    return {name: pod for name, pod in pods.items() if pod["spec"].get("nodeName") == node}


def running(leader: dict[str, Any]) -> float:
    """How many streams a group runs."""
    return svc.metric(httpx.get(f"http://{leader['status']['podIP']}:8000/metrics", timeout=10).text, "vllm:num_requests_running")


def silent_since(scene: Scene, node: str) -> datetime | None:
    """Since when the control plane does not hear the node; None while it does."""
    (ready,) = [one for one in scene.get("node", node)["status"]["conditions"] if one["type"] == "Ready"]
    return None if ready["status"] == "True" else datetime.fromisoformat(ready["lastTransitionTime"])


def view(scene: Scene) -> View:
    """The service and what runs for it, as the chaos bench judges of it."""
    items = scene.get("statefulsets,pods,replicasets,deployments", "-l", "phalanx.dev/service=chat")["items"]
    sets, pods, replica_sets, deployments = ([one for one in items if one["kind"] == kind] for kind in KINDS)
    return View(scene.get("infsvc", "chat"), sets, pods, replica_sets, deployments)


def made(scene: Scene, group: str) -> datetime:
    """When the group was."""
    return datetime.fromisoformat(scene.sets()[group]["metadata"]["creationTimestamp"])


def uids(scene: Scene) -> dict[str, str]:
    """UIDs of the groups."""
    return {name: one["metadata"]["uid"] for name, one in scene.sets().items()}


def told(scene: Scene) -> str:
    """What the events of the service say."""
    return "\n".join(one["message"] for one in scene.get("events")["items"])


def test_lost_nodes_group_is_replaced_and_streams_continue(spread: Scene) -> None:
    alone = Streams(spread.url, bodies()).run()
    (struck,) = {pod["metadata"]["labels"]["phalanx.dev/group"] for pod in at(spread, LOST).values()}
    (other,) = set(spread.groups()) - {struck}
    calm, leader, over = spread.fingerprints(other), spread.pods()[f"{struck}-0"], spread.taken_over()
    killed: list[float] = []
    time.sleep(FADED_S)

    def kill() -> None:
        killed.extend([time.monotonic(), running(leader)])
        spread.cluster.kill_node(LOST)

    with always(lambda: "; ".join(double(view(spread)))) as doubles:
        assert_equal(Streams(spread.url, bodies(), kill).run(), alone)
        assert killed[1] > 0 and spread.taken_over() > over, f"{killed[1]:.0f} of them ran there"
        since = svc.wait_for(lambda: silent_since(spread, LOST), 60, "the node is silent")
        svc.wait_for(lambda: not at(spread, LOST), LOST_S + 60, "its pods are gone")
        svc.wait_for(lambda: struck not in spread.groups(), 60, "the group is gone")
        spread.wait_ready(2, 300)
        assert silent_since(spread, LOST) == since, "all that while the node was away"
        print(f"two groups again {time.monotonic() - killed[0]:.1f} s after a node with {killed[1]:.0f} streams was killed")
    assert doubles == []
    (successor,) = set(spread.groups()) - {other}
    assert {pod["spec"]["nodeName"] for pod in spread.by_group()[successor].values()} == {HOME}
    assert made(spread, successor) >= since + timedelta(seconds=LOST_S)
    assert f"{struck}: node {LOST} was not heard for {LOST_S} s" in told(spread)
    assert spread.fingerprints(other) == calm, "the other group was not touched"
    assert [group["restarts"] for group in spread.status()["groups"]] == [0, 0], "a lost node is no fault of a group"


def test_returning_node_duplicates_and_moves_nothing(spread: Scene) -> None:
    """It is the one that the test before has lost."""
    assert silent_since(spread, LOST), "the node is away"
    pods, sets, over = spread.uids(), uids(spread), spread.taken_over()
    with always(lambda: "; ".join(unsettled(view(spread)))) as wrong:
        spread.cluster.repair()
        time.sleep(CALM_S)
    assert wrong == []
    assert silent_since(spread, LOST) is None
    assert (spread.uids(), uids(spread), at(spread, LOST)) == (pods, sets, {})
    assert [one.error for one in Streams(spread.url, bodies()).run()] == [None] * NUM_STREAMS
    assert spread.taken_over() == over
