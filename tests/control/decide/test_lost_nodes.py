"""Lost nodes: groups get successors, pods are deleted at once, and a node that returns in time changes nothing."""

from dataclasses import replace

import pytest

from phalanx_operator.decide.groups.lost_nodes import loss_reason, pods_to_delete
from phalanx_operator.decide.state.snapshot import ObservedNode
from tests.control.builders import NOW, make_group
from tests.control.worlds import World


@pytest.mark.parametrize(
    ("node", "lost"),
    [
        (None, False),
        (ObservedNode("n", True, "2026-01-01T00:00:00Z"), False),
        (ObservedNode("n", False, "2026-01-02T03:03:00Z"), False),
        (ObservedNode("n", False, "2026-01-02T03:02:00Z"), True),
        (ObservedNode("n", False, ""), False),
    ],
    ids=["unknown", "ready", "unready for a minute", "unready for two", "unknown time"],
)
def test_when_a_node_is_lost(node: ObservedNode | None, lost: bool) -> None:
    assert bool(loss_reason(node, 120, NOW)) is lost


def test_pods_of_a_kept_group_are_never_deleted_together() -> None:
    nodes = {"node-0": ObservedNode("node-0", False, "2026-01-02T03:00:00Z")}
    pods = tuple(replace(pod, uid=f"uid-{pod.name}") for pod in make_group("a").pods)
    staying, terminating = replace(make_group("a"), pods=pods), replace(make_group("a", terminating=True), pods=pods)
    assert pods_to_delete((staying,), nodes, 120, NOW) == []
    assert [(pod.name, pod.uid, pod.grace_s) for pod in pods_to_delete((terminating,), nodes, 120, NOW)] == [
        ("a-0", "uid-a-0", 0)
    ]


async def test_lost_node_replaces_its_groups() -> None:
    one_by_one = {"gang": {"mode": "None"}}
    two_pods = {"tensor": 2, "gpusPerPod": 1}
    world = World(replicas=2, parallelism=two_pods, placement=one_by_one, restartPolicy={"nodeLostSeconds": 60})
    await world.settle()
    before = world.groups
    world.cluster.lose_node("node-1", "2026-01-02T03:03:30Z")
    await world.reconcile()
    assert (world.groups, world.next_s) == (before, 25.0)
    world.now = "2026-01-02T03:04:31Z"
    writes = await world.reconcile()
    assert world.deleted() == before and len(world.groups) == 4
    assert sorted(w for w in writes if w.startswith("force-delete")) == sorted(f"force-delete pods {name}-1" for name in before)
    assert not [w for w in writes if w.startswith("force-delete") and w.endswith("-0")]
    assert [reason for _, reason in world.events()].count("GroupDeleted") == 1, "one event for both"


async def test_node_that_returns_in_time_changes_nothing() -> None:
    world = World(replicas=2)
    await world.settle()
    before = world.groups
    world.cluster.lose_node("node-0", "2026-01-02T03:04:00Z")
    await world.reconcile()
    world.cluster.start_pods()
    del world.kube.objects["nodes", "", "node-0"]
    world.now = "2026-01-02T03:14:05Z"
    await world.settle()
    assert (world.groups, world.deleted()) == (before, set())
