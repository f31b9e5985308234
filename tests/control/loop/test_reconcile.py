"""One service from creation to deletion, with an API server in memory and simulated controllers."""

import logging

import pytest

from phalanx_operator.decide.plan import RESYNC_S
from phalanx_operator.kube.client import (
    INFERENCE_SERVICES,
    PODS,
    SECRETS,
    STATEFUL_SETS,
    Conflict,
)
from phalanx_operator.loop.reconcile import rfc3339_now
from phalanx_operator.render.objects import Images
from tests.control.builders import make_body
from tests.control.loop.scenes import overdue_world, settled_world, world_with_routers
from tests.control.summaries import group, summary
from tests.control.worlds import KEY, World
from tests.reachable import texts


async def test_a_manifest_becomes_groups_a_router_and_their_objects() -> None:
    one_by_one = {"gang": {"mode": "None"}}
    world = World(replicas=2, parallelism={"tensor": 4, "gpusPerPod": 2}, placement=one_by_one)
    writes = await world.reconcile()
    groups = sorted(world.groups)
    assert writes[:12] == [
        "create secrets chat-token",
        "apply networkpolicies chat-groups",
        "apply networkpolicies chat-router",
        "apply services chat-groups",
        "apply serviceaccounts chat-router",
        "apply roles chat-router",
        "apply rolebindings chat-router",
        "apply services chat",
        "apply configmaps chat-policy",
        "apply poddisruptionbudgets chat-router",
        "apply deployments chat-router",
        "apply poddisruptionbudgets chat-groups",
    ]
    assert sorted(writes[12:14]) == [f"create statefulsets {name}" for name in groups]
    assert writes[14] == "apply inferenceservices/status chat"
    assert world.kube.of_kind(SECRETS)["chat-token"]["stringData"] == {"token": "drawn"}
    await world.settle()
    assert world.ready == ("True", "Ready")
    assert (world.status.replicas, world.status.ready_replicas) == (2, 2)


async def test_settled_service_causes_no_writes() -> None:
    world = World()
    await world.settle()
    assert await world.reconcile() == []
    assert world.next_s == RESYNC_S


@pytest.mark.parametrize(("sources", "value"), [((), ""), (("minio.store", "10.0.0.0/8"), "minio.store,10.0.0.0/8")])
async def test_groups_get_the_private_sources(sources: tuple[str, ...], value: str) -> None:
    """An empty value allows none; without the variable a runtime would allow all."""
    world = World(private_sources=sources)
    await world.settle()
    [group] = world.kube.of_kind(STATEFUL_SETS).values()
    variables = group["spec"]["template"]["spec"]["containers"][0]["env"]
    assert {"name": "PHALANX_PRIVATE_SOURCES", "value": value} in variables


async def test_only_two_secrets_are_read_by_name() -> None:
    world = World(rebalancing={"sharePages": True})
    await world.settle()
    asked = {call for call in (*world.kube.calls, *world.kube.reads) if "secrets" in call}
    assert asked == {
        "create secrets chat-token",
        "apply secrets phalanx-shared-pages",
    }


async def test_missing_replicas_are_written_once() -> None:
    world = World(replicas=None)
    await world.settle()
    assert world.service["spec"]["replicas"] == 1
    assert world.kube.calls.count("merge inferenceservices chat") == 1
    assert len(world.groups) == 1


async def test_scaling_keeps_existing_groups() -> None:
    world = World(replicas=1)
    await world.settle()
    first = world.groups
    await world.change(replicas=3)
    await world.settle()
    assert first < world.groups and len(world.groups) == 3
    await world.change(replicas=1)
    await world.settle()
    assert world.groups == first
    await world.change(replicas=0)
    await world.settle()
    assert (world.groups, world.ready) == (set(), ("True", "ScaledToZero"))


async def test_changes_of_groups_leave_audit_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "phalanx.audit")
    world = World(replicas=1)
    await world.settle()
    [created] = world.groups
    await world.change(replicas=0)
    await world.settle()
    lines = [record.__dict__ for record in caplog.records if record.name == "phalanx.audit"]
    assert [(line["verb"], line["object"]) for line in lines] == [
        (verb, f"groups/{created}") for verb in ("create", "drain", "delete")
    ]
    assert {(line["service"], line["caller"], line["outcome"]) for line in lines} == {("/".join(KEY), "operator", "done")}
    assert all(line["why"] for line in lines)


async def test_restarts_and_undrains_leave_audit_lines(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "phalanx.audit")
    restarted = await overdue_world()
    await restarted.reconcile()
    undrained = await world_with_routers(replicas=2)
    undrained.routers.summary = summary(*(group(name) for name in undrained.groups))
    await undrained.change(replicas=1)
    await undrained.reconcile()
    await undrained.change(replicas=2)
    await undrained.reconcile()
    lines = [record.__dict__ for record in caplog.records if record.name == "phalanx.audit"]
    found = {line["verb"]: (line["object"], line["caller"], line["why"]) for line in lines}
    [of_restart] = restarted.groups
    assert found["restart"] == (f"groups/{of_restart}", "operator", "it is not ready after 1800 s")
    assert found["undrain"] == (found["drain"][0], "operator", "2 groups are wanted again")


async def test_a_changed_spec_rolls_group_by_group() -> None:
    world = World(replicas=3)
    await world.settle()
    old = world.groups
    await world.change(engine={"maxModelLen": 512})
    for _ in range(12):
        writes = await world.reconcile()
        assert sum(write.startswith("delete") for write in writes) <= 1
        world.cluster.start_pods()
    assert not old & world.groups and len(world.groups) == 3
    assert world.status.current_revision == world.status.update_revision


async def test_suspending_keeps_replicas() -> None:
    world = World(replicas=2)
    await world.settle()
    await world.change(suspend=True)
    await world.settle()
    assert (world.groups, world.service["spec"]["replicas"], world.ready) == (set(), 2, ("True", "Suspended"))
    await world.change(suspend=False)
    await world.settle()
    assert len(world.groups) == 2


async def test_a_new_operator_changes_no_pod() -> None:
    world = World(replicas=2)
    await world.settle()
    before, calls = world.kube.of_kind(STATEFUL_SETS), len(world.kube.calls)
    other = World(world.kube, Images("runtime:2", "router:1"))
    await other.settle()
    assert world.kube.of_kind(STATEFUL_SETS) == before
    assert not any("statefulsets" in call or "pods" in call for call in world.kube.calls[calls:])


async def test_a_deleted_pod_is_left_to_its_controller() -> None:
    world = World(replicas=1)
    await world.settle()
    group = next(iter(world.groups))
    del world.kube.objects["pods", "team", f"{group}-0"]
    writes = await world.reconcile()
    assert writes == ["apply inferenceservices/status chat", writes[1]] and writes[1].startswith("create events")
    assert world.ready == ("False", "GroupsNotReady")
    await world.settle()
    assert (world.ready, world.groups) == (("True", "Ready"), {group})


async def test_group_that_a_user_scales_to_zero_is_replaced() -> None:
    """As `kubectl scale statefulset --all --replicas=0` does."""
    world = await settled_world(replicas=2)
    replaced, other = sorted(world.groups)
    body = world.kube.of_kind(STATEFUL_SETS)[replaced]
    world.kube.put(STATEFUL_SETS, body | {"spec": body["spec"] | {"replicas": 0}})
    del world.kube.objects[PODS.plural, "team", f"{replaced}-0"]
    await world.reconcile()
    assert world.deleted() == {replaced} and world.ready == ("False", "GroupsNotReady")
    await world.settle()
    assert world.ready == ("True", "Ready") and world.status.ready_replicas == 2
    assert other in world.groups


async def test_groups_are_created_with_a_random_key() -> None:
    world = World()
    await world.settle()
    (body,) = world.kube.of_kind(STATEFUL_SETS).values()
    assert {"name": "PHALANX_GROUP_KEY", "value": "drawn"} in body["spec"]["template"]["spec"]["containers"][0]["env"]


async def test_stale_informer_creates_no_second_group() -> None:
    world = World(replicas=2)
    await world.reconcile()
    created = world.groups
    await world.reconciler.reconcile(KEY)
    assert world.groups == created


async def test_created_group_counts_before_it_is_observed() -> None:
    world = World(replicas=2, rollout={"maxSurge": 1, "maxUnavailable": 0})
    await world.reconciler.reconcile(KEY)
    former = world.groups
    await world.change(engine={"maxModelLen": 1024})
    await world.reconciler.reconcile(KEY)
    assert world.children.sets.of_service(KEY) == []
    assert set(world.deleted()) == former, "groups of the next revision replace those that are not observed yet"
    world.now = "2026-01-02T03:08:06Z"
    await world.settle()
    assert len(world.groups) == 2 and KEY not in world.children.pending


async def test_created_group_that_never_appears_is_given_up() -> None:
    world = World(replicas=1)
    await world.reconciler.reconcile(KEY)
    (lost,) = world.groups
    del world.kube.objects["statefulsets", "team", lost]
    await world.reconciler.reconcile(KEY)
    assert world.groups == set(), "its deletion is not observed"
    world.now = "2026-01-02T03:08:06Z"
    await world.reconciler.reconcile(KEY)
    assert len(world.groups) == 1


async def test_created_group_that_was_deleted_is_replaced_at_once() -> None:
    """Both events arrive between two reconciles."""
    world = World(replicas=1)
    await world.reconciler.reconcile(KEY)
    (name,) = world.groups
    body = world.kube.objects.pop(("statefulsets", "team", name))
    world.children.sets.put(body)
    world.children.sets.drop("team", name, body["metadata"]["uid"])
    await world.reconciler.reconcile(KEY)
    assert len(world.groups) == 1


async def test_group_with_a_missed_deletion_is_not_counted() -> None:
    world = World(replicas=3)
    await world.settle()
    await world.change(replicas=2)
    await world.reconcile()
    await world.reconciler.reconcile(KEY)
    assert len(world.deleted()) == 1
    assert world.children.pending[KEY].deleted
    await world.settle()
    assert KEY not in world.children.pending


@pytest.mark.parametrize("error", ["deleted", "replaced"])
async def test_group_deleted_by_another_client_is_no_error(error: str) -> None:
    world = World(replicas=2)
    await world.settle()
    await world.change(replicas=1)
    world.cluster.sync_informers()
    await world.reconcile()
    victims = [call for call in await world.reconcile() if call.startswith("delete statefulsets")]
    assert len(victims) == 1
    name = victims[0].split()[-1]
    body = world.kube.objects.pop(("statefulsets", "team", name))
    if error == "replaced":
        world.kube.put(STATEFUL_SETS, body | {"metadata": {**body["metadata"], "uid": "another"}})
    world.children.pending.clear()
    await world.reconciler.reconcile(KEY)
    assert len(world.groups) == (1 if error == "deleted" else 2)


@pytest.mark.parametrize("verb", ["create", "delete"])
async def test_conflict_without_effect_is_retried(verb: str) -> None:
    """A quota or a webhook may answer so: the group counts neither as created nor as deleted."""
    twin, world = World(replicas=1), World(replicas=1)
    await twin.reconcile()
    (name,) = twin.groups
    if verb == "delete":
        await world.reconcile()
        await world.change(replicas=0)
    world.kube.failures[f"{verb} statefulsets {name}"] = Conflict("another writer was first")
    with pytest.raises(Conflict):
        await world.reconcile()
    assert f"{verb} statefulsets {name}" in await world.reconcile()


async def test_pod_failure_reaches_the_status() -> None:
    world = World()
    await world.reconcile()
    world.cluster.start_pods(ready=False, reason="ImagePullBackOff")
    await world.reconcile()
    assert world.ready == ("False", "ImagePullFailed")
    assert ("Warning", "ImagePullFailed") in world.events()
    assert world.status.groups[0].reason == "ImagePullBackOff: why"


async def test_deleted_service_is_forgotten() -> None:
    world = World()
    await world.settle()
    body = world.kube.objects.pop(("inferenceservices", "team", "chat"))
    assert await world.reconcile() == [] and world.next_s is None
    assert "team" not in str([metric.samples for metric in world.metrics.groups.collect()])
    world.kube.put(INFERENCE_SERVICES, body | {"metadata": {**body["metadata"], "deletionTimestamp": "2026-01-01T00:00:00Z"}})
    assert await world.reconcile() == []


async def test_recreated_service_leaves_nothing_of_the_former() -> None:
    """No reconcile finds that there is none of this name: the next one exists already."""
    world = World()
    await world.settle()
    assert world.service["metadata"]["uid"] == "uid-1"
    world.kube.objects.clear()
    world.kube.put(INFERENCE_SERVICES, make_body(uid="uid-2"))
    await world.settle()
    assert world.ready == ("True", "Ready")
    found = set(texts(world.reconciler))
    assert "uid-2" in found and "uid-1" not in found


async def test_unreadable_status_is_written_again() -> None:
    world = World()
    world.kube.put(INFERENCE_SERVICES, world.service | {"status": {"fromTheFuture": 1}})
    await world.settle()
    assert world.ready == ("True", "Ready")


def test_times_are_as_kubernetes_writes_them() -> None:
    assert len(rfc3339_now()) == 20 and rfc3339_now().endswith("Z")


async def test_only_a_console_gets_explanations() -> None:
    world = World(router={"console": True})
    await world.settle()
    assert world.routers.explain is not None
    (line,) = world.routers.explain([])
    assert line == "no router answers, so nothing is known."
    await world.change(router={"console": False})
    await world.reconcile()
    assert world.routers.explain is None
