"""Lost routers: they are deleted with a silent node, unless they answer, in no partition, and not while nodes return."""

import pytest

from phalanx_operator.decide.groups.lost_nodes import (
    NodeStates,
    routers_to_delete,
)
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import ObservedNode, ObservedPod
from phalanx_operator.kube.client import PODS
from tests.control.builders import NOW, make_group
from tests.control.loop.scenes import world_with_routers

LONG_AGO = "2026-01-02T02:00:00Z"


def router(index: int, ip: str = "10.0.0.1") -> ObservedPod:
    name = f"chat-router-{index}"
    return ObservedPod(name=name, index=index, owner_uid="d", uid=name, node=f"node-{index}", ip=ip)


@pytest.mark.parametrize(
    ("first", "unreachable", "since", "deleted"),
    [
        (router(0), {"chat-router-0"}, LONG_AGO, ["chat-router-0"]),
        (router(0), set(), LONG_AGO, []),
        (router(0), {"chat-router-0"}, "2026-01-02T03:03:06Z", []),
        (router(0), {"chat-router-1"}, LONG_AGO, []),
        (router(0, ip=""), set(), LONG_AGO, ["chat-router-0"]),
    ],
    ids=["silent", "answers", "not yet", "another", "never started"],
)
def test_which_routers_are_lost(first: ObservedPod, unreachable: set[str], since: str, deleted: list[str]) -> None:
    nodes, fleet = {"node-0": ObservedNode("node-0", False, since)}, Fleet(unreachable=frozenset(unreachable))
    states = NodeStates(nodes, 60, NOW, fleet, routers=(first, router(1)))
    assert [pod.name for pod in routers_to_delete([make_group("a", pods=())], states)] == deleted


@pytest.mark.parametrize(("was_partitioned", "returned", "deleted"), [(False, 0, 1), (True, 0, 1), (True, 1, 0), (False, 1, 1)])
def test_routers_are_kept_while_nodes_return(was_partitioned: bool, returned: int, deleted: int) -> None:
    nodes = {"node-0": ObservedNode("node-0", False, LONG_AGO)}
    nodes |= {f"back-{i}": ObservedNode(f"back-{i}", True, "2026-01-02T03:04:00Z") for i in range(returned)}
    fleet = Fleet(unreachable=frozenset({"chat-router-0"}))
    states = NodeStates(nodes, 60, NOW, fleet, was_partitioned=was_partitioned, routers=(router(0),))
    assert len(routers_to_delete([], states)) == deleted


def test_no_router_is_lost_in_a_partition() -> None:
    """Of the routers' nodes alone too."""
    nodes = {f"node-{i}": ObservedNode(f"node-{i}", False, LONG_AGO) for i in range(2)}
    fleet = Fleet(unreachable=frozenset({"chat-router-0", "chat-router-1"}))
    assert routers_to_delete([], NodeStates(nodes, 60, NOW, fleet, routers=(router(0), router(1)))) == []
    assert len(routers_to_delete([], NodeStates(nodes, 60, NOW, fleet, routers=(router(0),)))) == 1, "one node is no partition"


async def test_lost_router_is_deleted_by_the_operator() -> None:
    world = await world_with_routers(replicas=1)
    body = world.kube.of_kind(PODS)["chat-router-0"]
    world.kube.put(PODS, body | {"spec": {"nodeName": "far"}})
    world.routers.unreachable = frozenset({"router-0"})
    world.cluster.lose_node("far", "2026-01-02T03:03:05Z")
    await world.reconcile()
    assert world.next_s == 10.0, "the next look is not later than the limit"
    world.now = "2026-01-02T03:06:05Z"
    assert "force-delete pods chat-router-0" in await world.reconcile()
