"""Pods that the API server rejects, because of a quota or a policy of the namespace."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx_api.conditions import find_condition
from phalanx_operator.kube.client import DEPLOYMENTS, PODS, STATEFUL_SETS, Denied, Gone
from phalanx_operator.observe.pod_failure import REREAD_S, PodRejections
from tests.control.builders import NOW, make_group
from tests.control.fake_kube import FakeKube
from tests.control.loop.scenes import make_unschedulable
from tests.control.worlds import KEY, World

LATER = "2026-01-02T03:04:35Z"
_PREFIX = 'create Pod chat-g-a-0 in StatefulSet chat-g-a failed error: pods "chat-g-a-0" is forbidden: '
QUOTA = _PREFIX + "exceeded quota: few, requested: pods=1, used: pods=3, limited: pods=3"
POLICY = _PREFIX + 'violates PodSecurity "restricted:latest"'


def event(uid: str, message: str, at: str = NOW, **fields: Any) -> dict[str, Any]:
    return {"involvedObject": {"uid": uid}, "reason": "FailedCreate", "message": message, "lastTimestamp": at} | fields


@pytest.mark.parametrize(("message", "reason"), [(QUOTA, "QuotaExceeded"), (POLICY, "Rejected")])
async def test_status_has_the_message_of_the_api_server(message: str, reason: str) -> None:
    world = World(replicas=1)
    await world.reconcile()
    (group,) = world.kube.of_kind(STATEFUL_SETS).values()
    await world.reconcile()
    world.now = LATER
    world.kube.group_events = [event(group["metadata"]["uid"], message)]
    await world.reconcile()
    ready = find_condition(world.status.conditions, "Ready")
    assert ready and (ready.status, ready.reason) == ("False", reason)
    assert message in ready.message
    assert world.status.groups[0].reason == message[:256]
    capacity = world.condition("CapacityAvailable")
    assert capacity == ("False", reason)
    assert ("Warning", reason) in world.events()
    assert world.next_s is not None and world.next_s <= 10, "a raised quota wakes no operator"
    world.kube.group_events = []
    world.clock += REREAD_S
    await world.settle()
    assert world.ready == ("True", "Ready")
    assert world.condition("CapacityAvailable") == ("True", "Scheduled")


async def test_rejection_is_reported_before_waiting_pods() -> None:
    """Pods of a gang find no node while one of them is rejected."""
    world = World(replicas=1, parallelism={"tensor": 2, "gpusPerPod": 1})
    await world.reconcile()
    (name,) = world.groups
    world.cluster.start_pods()
    del world.kube.objects["pods", "team", f"{name}-1"]
    world.kube.put(PODS, make_unschedulable(world.kube.of_kind(PODS)[f"{name}-0"], NOW))
    await world.reconcile()
    assert world.ready == ("False", "InsufficientCapacity")
    world.now = LATER
    world.kube.group_events = [event(world.kube.of_kind(STATEFUL_SETS)[name]["metadata"]["uid"], QUOTA)]
    await world.reconcile()
    assert (world.ready, world.condition("CapacityAvailable")) == (("False", "QuotaExceeded"), ("False", "QuotaExceeded"))


async def test_rejected_pods_are_retried_every_30_seconds() -> None:
    """Their controller backs off, so a raised quota would take effect only much later."""
    world = World(replicas=1)
    await world.reconcile()
    await world.reconcile()
    (group,) = world.kube.of_kind(STATEFUL_SETS).values()
    world.kube.group_events = [event(group["metadata"]["uid"], QUOTA)]
    retries = []
    for at in ("04:15", "04:34", "04:35", "04:50", "05:04", "05:05"):
        world.now = f"2026-01-02T03:{at}Z"
        if f"merge statefulsets {group['metadata']['name']}" in await world.reconcile():
            retries.append(at)
    assert retries == ["04:35", "05:05"]
    world.now = "2026-01-02T04:00:00Z"
    await world.settle()
    assert world.ready == ("True", "Ready"), "no retry once the pods exist"


async def test_group_deleted_before_the_retry_is_left_alone() -> None:
    world = World(replicas=1)
    await world.reconcile()
    await world.reconcile()
    (group,) = world.kube.of_kind(STATEFUL_SETS).values()
    world.kube.group_events = [event(group["metadata"]["uid"], QUOTA)]
    world.kube.failures[f"merge statefulsets {group['metadata']['name']}"] = Gone("404")
    world.now = LATER
    await world.reconcile()
    assert world.kube.failures == {}, "no retry"
    assert world.ready == ("False", "QuotaExceeded")


async def test_router_rejected_by_a_quota_is_reported_and_retried() -> None:
    world = World(replicas=1)
    await world.settle()
    (deployment,) = world.kube.of_kind(DEPLOYMENTS).values()
    reason = "exceeded quota: few, requested: pods=1, used: pods=3, limited: pods=3"
    message = f'pods "chat-router-6d5f7c-x7k2p" is forbidden: {reason}'
    failure = {"type": "ReplicaFailure", "status": "True", "message": message, "lastTransitionTime": NOW}
    world.kube.put(DEPLOYMENTS, deployment | {"status": {"observedGeneration": 1, "conditions": [failure]}})
    retry = "merge deployments chat-router"
    assert retry not in await world.reconcile()
    ready = find_condition(world.status.conditions, "Ready")
    assert ready and (ready.status, ready.reason, ready.message) == ("False", "QuotaExceeded", f"router: {reason}")
    assert world.condition("RouterReady") == ("False", "RouterNotReady")
    assert world.next_s is not None and world.next_s <= 10, "a raised quota wakes no operator"
    world.now = LATER
    assert retry in await world.reconcile()
    assert retry not in await world.reconcile()
    await world.settle()
    assert world.ready == ("True", "Ready")


async def test_complete_or_new_groups_cause_no_event_query() -> None:
    kube = FakeKube()
    rejections = PodRejections(kube, clock=lambda: 0.0)
    complete = make_group("a", created=NOW)
    new = replace(make_group("b", created=NOW), pods=(), incomplete_since=LATER)
    terminating = replace(make_group("c", created=NOW), pods=(), incomplete_since=NOW, terminating=True)
    kube.group_events = [event(g.uid, QUOTA) for g in (complete, new, terminating)]
    assert await rejections.read(KEY, [complete, new, terminating], LATER) == {}


async def test_latest_rejection_counts_and_is_read_periodically() -> None:
    kube, clock = FakeKube(), [0.0]
    rejections = PodRejections(kube, clock=lambda: clock[0])
    group = replace(make_group("a", created=NOW), pods=(), incomplete_since=NOW)
    series = {"lastObservedTime": "2026-01-02T03:04:30Z"}
    kube.group_events = [
        event(group.uid, "newest", "2026-01-02T03:04:09Z", series=series),
        event(group.uid, "older", "2026-01-02T03:04:20Z"),
    ]
    assert await rejections.read(KEY, [group], LATER) == {group.uid: "newest"}
    kube.group_events = []
    assert await rejections.read(KEY, [group], LATER) == {group.uid: "newest"}, "not read again at once"
    clock[0] = REREAD_S
    assert await rejections.read(KEY, [group], LATER) == {}


async def test_operator_without_event_permission_continues() -> None:
    kube = FakeKube()
    kube.failures["list events"] = Denied("403")
    group = replace(make_group("a", created=NOW), pods=(), incomplete_since=NOW)
    kube.group_events = [event(group.uid, QUOTA)]
    assert await PodRejections(kube, clock=lambda: 0.0).read(KEY, [group], LATER) == {}


async def test_rejections_of_a_deleted_service_are_dropped() -> None:
    kube = FakeKube()
    rejections = PodRejections(kube, clock=lambda: 0.0)
    group = replace(make_group("a", created=NOW), pods=(), incomplete_since=NOW)
    kube.group_events = [event(group.uid, QUOTA)]
    await rejections.read(KEY, [group], LATER)
    rejections.forget(KEY)
    kube.group_events = []
    assert await rejections.read(KEY, [group], LATER) == {}, "it is read again"
