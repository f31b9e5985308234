"""Invalid specs, rejected objects, quotas and failed calls: each is reported, and stops nothing else."""

from itertools import pairwise

import pytest

from phalanx_api.conditions import ConditionType, find_condition
from phalanx_api.labels import MANAGER
from phalanx_operator.apply.owned import REAPPLY_S
from phalanx_operator.decide.plan import RESYNC_S
from phalanx_operator.kube.client import (
    DEPLOYMENTS,
    SERVICES,
    STATEFUL_SETS,
    Denied,
    Json,
    KubeError,
    Rejected,
    Resource,
    Retry,
)
from tests.control.fake_kube import FakeKube
from tests.control.kstatus import kstatus
from tests.control.loop.scenes import LONG_AGO, make_unready, settled_world
from tests.control.worlds import World


async def test_invalid_spec_stalls_with_field_and_reason() -> None:
    world = World()
    await world.settle()
    groups = world.groups
    await world.change(parallelism={"tensor": 4, "gpusPerPod": 3})
    await world.reconcile()
    stalled = find_condition(world.status.conditions, "Stalled")
    assert stalled and stalled.reason == "SpecInvalid"
    assert "gpusPerPod 3 does not divide" in stalled.message
    assert world.groups == groups
    assert ("Warning", "SpecInvalid") in world.events()
    await world.change(parallelism={"tensor": 4})
    await world.settle()
    assert world.ready == ("True", "Ready")


async def test_rejected_group_is_reported_with_the_api_servers_message() -> None:
    world = World()
    name = next(call for call in await World().reconcile() if "statefulsets" in call)
    world.kube.failures[name] = Rejected('strict decoding error: unknown field "spec.template.spec.tolerance"')
    with pytest.raises(Rejected):
        await world.reconcile()
    condition = find_condition(world.status.conditions, "Ready")
    assert condition and condition.reason == "Rejected" and "tolerance" in condition.message
    gauges = [(sample.name, sample.value) for metric in world.metrics.registry.collect() for sample in metric.samples]
    assert ("phalanx_service_spec_replicas", 1.0) in gauges and ("phalanx_service_groups", 0.0) in gauges


async def test_overlay_of_routers_rolls_their_deployment_alone() -> None:
    world = World(replicas=1)
    await world.settle()
    await world.change(router={"podTemplate": {"spec": {"priorityClassName": "high"}}})
    writes = [call for call in await world.reconcile() if "events" not in call and "inferenceservices" not in call]
    assert writes == ["apply deployments chat-router"]
    (deployment,) = world.kube.of_kind(DEPLOYMENTS).values()
    assert deployment["spec"]["template"]["spec"]["priorityClassName"] == "high"


async def test_rejected_overlay_keeps_the_former_routers() -> None:
    """Groups are managed meanwhile: they are scaled here. The overlay is tried again once a minute, and at its correction."""

    class Strict(FakeKube):
        async def apply(self, resource: Resource, body: Json, *, subresource: str | None = None, manager: str = MANAGER) -> Json:
            if resource is DEPLOYMENTS and "tolerance" in body["spec"]["template"]["spec"]:
                attempts.append(world.clock)
                raise (Rejected, Denied)[len(attempts) % 2]("(team/chat-router; Kind=Deployment): .spec.template.spec.tolerance")
            return await super().apply(resource, body, subresource=subresource, manager=manager)

    attempts = list[float]()
    world = World(Strict(), replicas=1)
    await world.settle()
    former = world.kube.of_kind(DEPLOYMENTS)["chat-router"]["spec"]
    began = world.clock
    await world.change(replicas=3, router={"podTemplate": {"spec": {"tolerance": 5}}})
    await world.reconcile()
    assert world.condition("RouterReady") == ("False", "Rejected") and len(world.groups) == 3
    await world.settle()
    condition = find_condition(world.status.conditions, "Ready")
    assert condition and condition.reason == "Rejected" and condition.message.startswith("spec.router: (team/chat-router")
    assert world.kube.of_kind(DEPLOYMENTS)["chat-router"]["spec"] == former and world.condition("Available")[0] == "True"
    assert ("Warning", "Rejected") in world.events() and world.next_s is not None and world.next_s <= 60.0
    world.clock += 61.0
    await world.reconcile()
    assert attempts == [began, began + 61.0]
    await world.change(router={"podTemplate": {"spec": {"priorityClassName": "high"}}})
    await world.settle()
    assert world.ready == ("True", "Ready") and world.kube.of_kind(DEPLOYMENTS)["chat-router"]["spec"] != former


async def test_rejected_successor_keeps_the_old_group() -> None:
    class Strict(FakeKube):
        async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
            if "tolerance" in body.get("spec", {}).get("template", {}).get("spec", {}):
                raise Rejected("unknown field")
            return await super().create(resource, body, dry_run=dry_run)

    world = World(Strict(), replicas=1)
    await world.settle()
    groups = world.kube.of_kind(STATEFUL_SETS)
    await world.change(podTemplate={"spec": {"tolerance": 5}})
    with pytest.raises(Rejected):
        await world.reconcile()
    assert world.kube.of_kind(STATEFUL_SETS) == groups
    assert not any("deletionTimestamp" in group["metadata"] for group in groups.values())
    available = find_condition(world.status.conditions, "Available")
    assert available and available.status == "True"


async def test_quota_equal_to_replicas_permits_replacement() -> None:
    class Full(FakeKube):
        async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
            if resource is STATEFUL_SETS and len(self.of_kind(STATEFUL_SETS)) >= 2:
                raise Rejected("exceeded quota: groups, requested: count/statefulsets.apps=1")
            return await super().create(resource, body, dry_run=dry_run)

    world = World(Full(), replicas=2)
    await world.settle()
    before = world.groups
    await world.change(engine={"maxModelLen": 512})
    for _ in range(12):
        await world.reconcile()
        await world.reconcile()
        assert world.ready[1] not in ("Rejected", "QuotaExceeded"), "the terminating group makes room"
        world.cluster.start_pods()
    await world.settle()
    assert not world.groups & before and world.ready == ("True", "Ready")
    await world.change(replicas=3)
    with pytest.raises(Rejected):
        await world.reconcile()
    assert world.condition("CapacityAvailable") == ("False", "QuotaExceeded"), "no deletion makes room"
    assert world.ready == ("False", "QuotaExceeded") and world.condition("Available") == ("True", "Serving")
    assert ("Warning", "QuotaExceeded") in world.events()


async def test_creations_back_off_while_a_quota_is_full() -> None:
    """A group terminates for minutes, and something else fills the quota; the end of the group is tried at once."""

    class Full(FakeKube):
        is_full = False
        report_s = 0

        async def apply(self, resource: Resource, body: Json, *, subresource: str | None = None, manager: str = MANAGER) -> Json:
            world.clock += self.report_s if subresource else 0
            return await super().apply(resource, body, subresource=subresource, manager=manager)

        async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
            created = await super().create(resource, body, dry_run=dry_run)
            if resource is STATEFUL_SETS and not dry_run and self.is_full:
                del self.objects[resource.plural, body["metadata"]["namespace"], body["metadata"]["name"]]
                raise Rejected("exceeded quota: groups, requested: count/statefulsets.apps=1")
            return created

    kube = Full()
    world = World(kube, replicas=2)
    await world.settle()
    await world.change(replicas=1)
    kube.is_full = True
    while not world.deleted():
        await world.reconcile()
    await world.change(replicas=2)
    tried = list[float]()
    for _ in range(150):
        tried += [world.clock] * sum(write.startswith("create statefulsets") for write in await world.reconcile())
        world.clock += 2
    assert [round(later - at) for at, later in pairwise(tried)] == [2, 4, 8, 16, 32, 60, 60, 60]
    assert world.next_s is not None and world.next_s <= 60
    await world.change(replicas=1)
    world.clock += 60
    await world.reconcile()
    assert world.next_s is not None and world.next_s < RESYNC_S, "no group waits: the token is due next"
    await world.change(replicas=2)
    kube.report_s = 2
    writes = await world.reconcile()
    assert sum(write.startswith("create statefulsets") for write in writes) == 2, "the first wait again, over before the report"
    kube.is_full = False
    world.cluster.start_pods()
    await world.reconcile()
    assert len(world.groups) == 2


POLICY = "apply networkpolicies chat-groups"
WEBHOOK_DOWN = '500 failed calling webhook "policies.example"'


async def fail_for(world: World, seconds: float, call: str) -> list[str]:
    """Reconciles twice, with this time between, while a call fails. Returns the writes of the second reconcile."""
    for pause_s in (0.0, seconds):
        world.clock += pause_s
        before = len(world.kube.calls)
        world.kube.failures[call] = Retry(WEBHOOK_DOWN)
        with pytest.raises(Retry):
            await world.reconcile()
    return world.kube.calls[before:]


async def test_calls_that_keep_failing_are_reported_once() -> None:
    world, call = World(), "apply networkpolicies chat-groups"
    await fail_for(world, 9.0, call)
    assert world.service.get("status") is None, "most failures are short"
    await fail_for(world, 1.0, call)
    assert world.condition("Reconciling") == ("True", "Retrying") and world.ready == ("False", "GroupsNotReady")
    assert WEBHOOK_DOWN in [condition.message for condition in world.status.conditions]
    assert kstatus(world.service) == "InProgress"
    assert not any("status" in write for write in await fail_for(world, 60.0, call)), "the same status is not written again"
    await world.settle()
    assert world.ready == ("True", "Ready") and find_condition(world.status.conditions, "Reconciling") is None


async def test_status_follows_groups_while_calls_fail() -> None:
    """Shared objects are applied before groups are judged, and a webhook may be down for hours."""
    world = await settled_world()
    world.clock += 1000.0  # shared objects are due
    make_unready(world, LONG_AGO)
    await fail_for(world, 10.0, "apply deployments chat-router")
    assert world.ready == ("False", "GroupsNotReady") and world.status.ready_replicas == 0


@pytest.mark.parametrize("error", [Rejected("a webhook says no"), Denied("forbidden"), Retry(WEBHOOK_DOWN)])
async def test_lost_group_is_replaced_beside_failing_shared_object(error: KubeError) -> None:
    world = await settled_world(replicas=2)
    lost = min(world.groups)
    world.clock += REAPPLY_S + 1.0
    del world.kube.objects[STATEFUL_SETS.plural, "team", lost]
    world.kube.failures[POLICY] = error
    with pytest.raises(type(error)):
        await world.reconcile()
    assert POLICY in world.kube.calls and len(world.groups) == 2
    world.cluster.start_pods()
    for pause_s in (0.0, 10.0):
        world.clock += pause_s
        world.kube.failures[POLICY] = error
        with pytest.raises(type(error)):
            await world.reconcile()
    kind: ConditionType = "Reconciling" if isinstance(error, Retry) else "Stalled"
    assert world.condition(kind) == ("True", "Retrying" if kind == "Reconciling" else "Rejected")
    assert str(error) in str(world.status.conditions)
    assert world.status.ready_replicas == 2 and world.condition("Available") == ("True", "Serving")
    await world.settle()
    assert world.ready == ("True", "Ready")


RENEWED = "apply secrets chat-group-tls"


@pytest.mark.parametrize(
    ("security", "call"),
    [({"tokenRotationId": "1"}, "merge secrets chat-token"), ({"tls": "Internal"}, RENEWED)],
    ids=["rotation", "renewal"],
)
@pytest.mark.parametrize("error", [Rejected("a webhook says no"), Retry(WEBHOOK_DOWN)])
async def test_lost_group_is_replaced_while_secrets_stay_old(security: Json, call: str, error: KubeError) -> None:
    world = await settled_world(replicas=2, security={key: value for key, value in security.items() if key == "tls"})
    lost = min(world.groups)
    await world.change(security=security)
    world.clock, world.now = world.clock + REAPPLY_S + 1.0, "2026-01-06T03:04:05Z"
    del world.kube.objects[STATEFUL_SETS.plural, "team", lost]
    world.kube.failures[call] = error
    with pytest.raises(type(error)):
        await world.reconcile()
    assert call in world.kube.calls and len(world.groups) == 2
    await world.settle()
    assert world.ready == ("True", "Ready")


async def test_successor_waits_for_the_deleted_token() -> None:
    world = await settled_world(replicas=2)
    world.clock += REAPPLY_S + 1.0
    for plural, name in ((STATEFUL_SETS.plural, min(world.groups)), ("secrets", "chat-token")):
        del world.kube.objects[plural, "team", name]
    world.kube.failures["create secrets chat-token"] = Rejected("a webhook says no")
    with pytest.raises(Rejected):
        await world.reconcile()
    assert len(world.groups) == 1, "it could not start"


@pytest.mark.parametrize("call", [POLICY, "apply services chat-groups"])
async def test_new_groups_wait_for_their_first_shared_objects(call: str) -> None:
    """Without the policy they are open to all pods, without the Service no worker finds its leader."""
    world = World()
    world.kube.failures[call] = Rejected("a webhook says no")
    with pytest.raises(Rejected):
        await world.reconcile()
    assert world.groups == set() and world.ready == ("False", "Rejected")


async def test_successor_waits_for_the_deleted_service_of_groups() -> None:
    world = await settled_world(replicas=2)
    lost = min(world.groups)
    del world.kube.objects[STATEFUL_SETS.plural, "team", lost]
    del world.kube.objects[SERVICES.plural, "team", "chat-groups"]
    world.kube.failures["apply services chat-groups"] = Rejected("a webhook says no")
    with pytest.raises(Rejected):
        await world.reconcile()
    assert len(world.groups) == 1


async def test_a_failed_call_leaves_the_rest_for_later() -> None:
    world = World()
    world.kube.failures["apply deployments chat-router"] = Retry("busy")
    with pytest.raises(Retry):
        await world.reconcile()
    await world.settle()
    assert world.ready == ("True", "Ready")
