"""Pods that the controllers of StatefulSets and Deployments may not make: a quota, or a rule of the namespace."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx_api.conditions import find_condition
from phalanx_operator.kube.client import DEPLOYMENTS, PODS, STATEFUL_SETS, Denied, Gone
from phalanx_operator.observe.pod_failure import ASK_AGAIN_S, ImageRefusals
from tests.control.builders import NOW, make_group
from tests.control.fake_kube import FakeKube
from tests.control.loop.test_placement import waiting
from tests.control.worlds import KEY, World

LATER = "2026-01-02T03:04:35Z"
_FAILED = 'create Pod chat-g-a-0 in StatefulSet chat-g-a failed error: pods "chat-g-a-0" is forbidden: '
QUOTA = _FAILED + "exceeded quota: few, requested: pods=1, used: pods=3, limited: pods=3"
POLICY = _FAILED + 'violates PodSecurity "restricted:latest"'


def event(uid: str, message: str, at: str = NOW, **fields: Any) -> dict[str, Any]:
    return {"involvedObject": {"uid": uid}, "reason": "FailedCreate", "message": message, "lastTimestamp": at} | fields


@pytest.mark.parametrize(("words", "reason"), [(QUOTA, "QuotaExceeded"), (POLICY, "Rejected")])
async def test_the_status_has_the_words_of_the_api_server(words: str, reason: str) -> None:
    world = World(replicas=1)
    await world.look()
    (group,) = world.kube.of(STATEFUL_SETS).values()
    await world.look()
    world.now = LATER
    world.kube.told_of_groups = [event(group["metadata"]["uid"], words)]
    await world.look()
    ready = find_condition(world.status.conditions, "Ready")
    assert ready and (ready.status, ready.reason) == ("False", reason)
    assert words in ready.message
    assert world.status.groups[0].reason == words[:256]
    capacity = world.condition("CapacityAvailable")
    assert capacity == ("False", reason)
    assert ("Warning", reason) in world.notes()
    assert world.next_s is not None and world.next_s <= 10, "nothing wakes the operator when the quota is raised"
    world.kube.told_of_groups = []
    world.clock += ASK_AGAIN_S
    await world.settle()
    assert world.ready == ("True", "Ready")
    assert world.condition("CapacityAvailable") == ("True", "Scheduled")


async def test_refusal_is_reported_before_waiting_pods() -> None:
    """Pods that are placed together find no node while one of them may not be made."""
    world = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1})
    await world.look()
    (name,) = world.groups
    world.cluster.start_pods()
    del world.kube.objects["pods", "team", f"{name}-1"]
    world.kube.put(PODS, waiting(world.kube.of(PODS)[f"{name}-0"], NOW))
    await world.look()
    assert world.ready == ("False", "InsufficientCapacity")
    world.now = LATER
    world.kube.told_of_groups = [event(world.kube.of(STATEFUL_SETS)[name]["metadata"]["uid"], QUOTA)]
    await world.look()
    assert (world.ready, world.condition("CapacityAvailable")) == (("False", "QuotaExceeded"), ("False", "QuotaExceeded"))


async def test_refused_pods_are_retried_every_30_seconds() -> None:
    """By itself their controller waits longer each time: a quota that is raised would be of use only much later."""
    world = World(replicas=1)
    await world.look()
    await world.look()
    (group,) = world.kube.of(STATEFUL_SETS).values()
    world.kube.told_of_groups = [event(group["metadata"]["uid"], QUOTA)]
    tried = []
    for at in ("04:15", "04:34", "04:35", "04:50", "05:04", "05:05"):
        world.now = f"2026-01-02T03:{at}Z"
        if f"merge statefulsets {group['metadata']['name']}" in await world.look():
            tried.append(at)
    assert tried == ["04:35", "05:05"]
    world.now = "2026-01-02T04:00:00Z"
    await world.settle()
    assert world.ready == ("True", "Ready"), "nothing is tried once the pods are there"


async def test_group_deleted_before_the_retry_is_left_alone() -> None:
    world = World(replicas=1)
    await world.look()
    await world.look()
    (group,) = world.kube.of(STATEFUL_SETS).values()
    world.kube.told_of_groups = [event(group["metadata"]["uid"], QUOTA)]
    world.kube.failures[f"merge statefulsets {group['metadata']['name']}"] = Gone("404")
    world.now = LATER
    await world.look()
    assert world.kube.failures == {}, "it was tried"
    assert world.ready == ("False", "QuotaExceeded")


async def test_router_refused_by_a_quota_is_reported_and_retried() -> None:
    world = World(replicas=1)
    await world.settle()
    (deployment,) = world.kube.of(DEPLOYMENTS).values()
    words = "exceeded quota: few, requested: pods=1, used: pods=3, limited: pods=3"
    message = f'pods "chat-router-6d5f7c-x7k2p" is forbidden: {words}'
    failure = {"type": "ReplicaFailure", "status": "True", "message": message, "lastTransitionTime": NOW}
    world.kube.put(DEPLOYMENTS, deployment | {"status": {"observedGeneration": 1, "conditions": [failure]}})
    tried = "merge deployments chat-router"
    assert tried not in await world.look()
    ready = find_condition(world.status.conditions, "Ready")
    assert ready and (ready.status, ready.reason, ready.message) == ("False", "QuotaExceeded", f"router: {words}")
    assert world.condition("RouterReady") == ("False", "RouterNotReady")
    assert world.next_s is not None and world.next_s <= 10, "nothing wakes the operator when the quota is raised"
    world.now = LATER
    assert tried in await world.look()
    assert tried not in await world.look()
    await world.settle()
    assert world.ready == ("True", "Ready")


async def test_complete_or_new_groups_cause_no_event_query() -> None:
    kube = FakeKube()
    refusals = ImageRefusals(kube, clock=lambda: 0.0)
    whole = make_group("a", created=NOW)
    new = replace(make_group("b", created=NOW), pods=(), short_since=LATER)
    going = replace(make_group("c", created=NOW), pods=(), short_since=NOW, terminating=True)
    kube.told_of_groups = [event(one.uid, QUOTA) for one in (whole, new, going)]
    assert await refusals.of(KEY, [whole, new, going], LATER) == {}


async def test_latest_refusal_counts_and_is_read_periodically() -> None:
    kube, clock = FakeKube(), [0.0]
    refusals = ImageRefusals(kube, clock=lambda: clock[0])
    group = replace(make_group("a", created=NOW), pods=(), short_since=NOW)
    series = {"lastObservedTime": "2026-01-02T03:04:30Z"}
    kube.told_of_groups = [
        event(group.uid, "newest", "2026-01-02T03:04:09Z", series=series),
        event(group.uid, "older", "2026-01-02T03:04:20Z"),
    ]
    assert await refusals.of(KEY, [group], LATER) == {group.uid: "newest"}
    kube.told_of_groups = []
    assert await refusals.of(KEY, [group], LATER) == {group.uid: "newest"}, "not asked again at once"
    clock[0] = ASK_AGAIN_S
    assert await refusals.of(KEY, [group], LATER) == {}


async def test_operator_without_event_permission_continues() -> None:
    kube = FakeKube()
    kube.failures["list events"] = Denied("403")
    group = replace(make_group("a", created=NOW), pods=(), short_since=NOW)
    kube.told_of_groups = [event(group.uid, QUOTA)]
    assert await ImageRefusals(kube, clock=lambda: 0.0).of(KEY, [group], LATER) == {}


async def test_refusals_of_a_deleted_service_are_dropped() -> None:
    kube = FakeKube()
    refusals = ImageRefusals(kube, clock=lambda: 0.0)
    group = replace(make_group("a", created=NOW), pods=(), short_since=NOW)
    kube.told_of_groups = [event(group.uid, QUOTA)]
    await refusals.of(KEY, [group], LATER)
    refusals.forget(KEY)
    kube.told_of_groups = []
    assert await refusals.of(KEY, [group], LATER) == {}, "it is asked anew"
