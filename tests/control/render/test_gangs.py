"""Gangs: their choice, objects, conditions and discovery."""

from typing import Any

import pytest
import yaml

from phalanx_operator.kube.client import DEPLOYMENTS, PODS, STATEFUL_SETS, Denied, Json, KubeError, Page, Resource, Retry
from phalanx_operator.observe.api_discovery import REDISCOVER_S, RETRY_S
from phalanx_operator.render import gangs, pods
from phalanx_operator.render.gangs import KUEUE_QUEUE, NATIVE_API, VOLCANO_API
from phalanx_operator.render.objects import Images
from phalanx_operator.render.pods import GroupBuild
from tests.control.builders import make_service
from tests.control.conftest import Check
from tests.control.fake_kube import FakeKube
from tests.control.worlds import World

SEVERAL: dict[str, Any] = {"parallelism": {"tensor": 4, "gpusPerPod": 2}}
ALL = frozenset({NATIVE_API, VOLCANO_API})
POD_GROUPS = Resource(NATIVE_API, "podgroups")


@pytest.mark.parametrize(
    ("placement", "served", "kind"),
    [
        ({}, ALL, "Native"),
        ({}, frozenset(), "Fallback"),
        ({"schedulerName": "volcano"}, ALL, "Volcano"),
        ({"schedulerName": "volcano"}, frozenset({NATIVE_API}), "Fallback"),
        ({"schedulerName": "mine"}, ALL, "Fallback"),
        ({"queueName": "team"}, ALL, "Kueue"),
        ({"queueName": "team", "schedulerName": "volcano"}, ALL, "Volcano"),
        ({"gang": {"mode": "None"}}, ALL, "None"),
        ({"gang": {"mode": "Fallback"}}, ALL, "Fallback"),
        ({"gang": {"mode": "Native"}}, frozenset(), "Native"),
        ({"gang": {"mode": "Volcano"}}, frozenset(), "Volcano"),
        ({"gang": {"mode": "Kueue"}, "queueName": "team"}, frozenset(), "Kueue"),
    ],
)
def test_choose_gang(placement: dict[str, Any], served: frozenset[str], kind: str) -> None:
    assert gangs.choose_gang(make_service(**SEVERAL, placement=placement), served).kind == kind


def test_single_pod_group_needs_only_queue_admission() -> None:
    assert gangs.choose_gang(make_service(), ALL).kind == "None"
    assert gangs.choose_gang(make_service(placement={"queueName": "team"}), ALL).kind == "Kueue"


@pytest.mark.parametrize("kind", ["Native", "Volcano", "Kueue"])
def test_golden_gangs(kind: str, golden: Check) -> None:
    service = make_service(**SEVERAL, placement={"queueName": "team", "priorityClassName": "high"})
    gang = gangs.gang_of_kind(kind)
    group = pods.group(service, "chat-g-xxxxx", GroupBuild(revision="rev", images=Images("r", "o"), gang=gang))
    template = group["spec"]["template"]
    shown = {
        "labels": group["metadata"]["labels"],
        "podAnnotations": template["metadata"].get("annotations", {}),
        "podSpec": {name: template["spec"][name] for name in ("schedulerName", "schedulingGroup") if name in template["spec"]},
        "objects": gang.objects(service, "chat-g-xxxxx", "uid-9", 2),
    }
    golden(f"objects/gang-{kind.lower()}.yaml", yaml.safe_dump(shown, sort_keys=False))


@pytest.mark.parametrize("kind", ["None", "Fallback", "Native", "Volcano", "Kueue"])
def test_group_keeps_its_original_gang_kind(kind: str) -> None:
    assert gangs.gang_of_kind(kind).kind == kind


def test_group_of_an_older_version_has_no_gang() -> None:
    assert gangs.gang_of_kind("").kind == "None"


def capacity_message(world: World) -> str:
    return next(condition.message for condition in world.status.conditions if condition.type == "CapacityAvailable")


def native_world(**spec: Any) -> World:
    world = World(**SEVERAL, **spec)
    world.kube.schedulers = {NATIVE_API}
    return world


async def test_each_group_owns_a_pod_group_of_its_name() -> None:
    world = native_world(replicas=2)
    await world.settle()
    assert set(world.kube.of_kind(POD_GROUPS)) == world.groups
    for name, body in world.kube.of_kind(POD_GROUPS).items():
        assert body["metadata"]["ownerReferences"][0]["uid"] == world.kube.of_kind(STATEFUL_SETS)[name]["metadata"]["uid"]
        assert body["spec"] == {"schedulingPolicy": {"gang": {"minCount": 2}}}
    assert world.status.gang == "Native"


async def test_missing_pod_group_is_created_while_pods_wait() -> None:
    world = native_world()
    await world.reconcile()
    group = next(iter(world.groups))
    del world.kube.objects["podgroups", "team", group]
    world.cluster.start_pods(ready=False)
    pod = world.kube.objects["pods", "team", f"{group}-0"]
    pod["spec"].pop("nodeName")
    assert f"create podgroups {group}" not in await world.reconcile(), "it was created a moment ago"
    world.clock += 60.0
    assert f"create podgroups {group}" in await world.reconcile()
    world.clock += 60.0
    await world.reconcile()
    assert group in world.kube.of_kind(POD_GROUPS)


@pytest.mark.parametrize("error", [Denied("podgroups is forbidden"), Retry("failed calling webhook")])
async def test_rejected_pod_group_is_reported_and_blocks_nothing_else(error: KubeError) -> None:
    class RejectingKube(FakeKube):
        rejects = True

        async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
            if self.rejects and resource.plural == "podgroups":
                raise error
            return await super().create(resource, body, dry_run=dry_run)

    kube = RejectingKube()
    kube.schedulers = {NATIVE_API}
    world = World(kube, **SEVERAL, replicas=2)
    await world.reconcile()
    assert len(world.groups) == 2, "an error of one group does not affect others"
    world.cluster.start_pods(ready=False)
    for pod in list(kube.of_kind(PODS).values()):
        kube.put(PODS, pod | {"spec": {}})
    await world.reconcile()
    assert world.condition("CapacityAvailable") == ("False", "GangWaiting")
    message = capacity_message(world)
    assert message.startswith("PodGroup chat-g-") and message.endswith(str(error))
    kube.rejects = False
    world.clock += 60.0
    await world.reconcile()
    assert set(kube.of_kind(POD_GROUPS)) == world.groups
    await world.settle()
    assert world.condition("CapacityAvailable") == ("True", "Scheduled") and world.ready == ("True", "Ready")


async def test_pods_awaiting_queue_admission_are_reported() -> None:
    """Kueue creates pods with a scheduling gate and removes it at admission."""
    world = World(**SEVERAL, replicas=2, placement={"queueName": "team"})
    await world.reconcile()
    assert world.status.gang == "Kueue"
    assert {body["metadata"]["labels"][KUEUE_QUEUE] for body in world.kube.of_kind(STATEFUL_SETS).values()} == {"team"}
    assert len(world.groups) == 2, "Kueue admits, so no group waits in the placement queue"
    world.cluster.start_pods()
    why = "Scheduling is blocked due to non-empty scheduling gates"
    gated = {"type": "PodScheduled", "status": "False", "reason": "SchedulingGated", "message": why}
    gated_group = max(world.groups)
    for name, pod in world.kube.of_kind(PODS).items():
        if name.startswith(gated_group):
            gates = {"schedulingGates": [{"name": "kueue.x-k8s.io/admission"}]}
            world.kube.put(PODS, pod | {"spec": gates, "status": {"phase": "Pending", "conditions": [gated]}})
    await world.reconcile()
    assert world.condition("CapacityAvailable") == ("False", "GangWaiting")
    message = capacity_message(world)
    assert message == f"pod {gated_group}-0: {why}"
    assert world.status.ready_replicas == 1 and len(world.groups) == 2 and not world.deleted()
    await world.settle()
    assert world.condition("CapacityAvailable") == ("True", "Scheduled") and world.ready == ("True", "Ready")


async def test_missing_scheduler_creates_no_group_with_a_reason() -> None:
    world = World(**SEVERAL, placement={"gang": {"mode": "Native"}})
    await world.reconcile()
    assert world.groups == set()
    assert world.condition("CapacityAvailable") == ("False", "GangWaiting")
    message = capacity_message(world)
    assert message == f"spec.placement.gang: the cluster does not serve PodGroups of {NATIVE_API}"
    world.kube.schedulers = {NATIVE_API}
    world.clock += 600.0
    await world.settle()
    assert len(world.groups) == 1 and world.ready == ("True", "Ready")


class UnresponsiveKube(FakeKube):
    """Lists of PodGroups fail while `is_silent`."""

    is_silent, num_lists = True, 0

    async def list_page(self, resource: Resource, namespace: str | None, selector: str, after: str, *, fields: str = "") -> Page:
        if resource.plural == "podgroups":
            self.num_lists += 1
            if self.is_silent:
                raise Retry("the server is currently unable to handle the request")
        return await super().list_page(resource, namespace, selector, after, fields=fields)


async def test_unknown_schedulers_create_no_group_but_all_else() -> None:
    kube = UnresponsiveKube()
    world = World(kube, **SEVERAL)
    await world.reconcile()
    assert (world.groups, kube.num_lists) == (set(), 1)
    assert world.condition("CapacityAvailable") == ("False", "GangWaiting") and DEPLOYMENTS.plural in str(kube.calls)
    await world.reconcile()
    assert kube.num_lists == 1, "not at every reconcile"
    kube.is_silent = False
    world.clock += RETRY_S
    await world.settle()
    assert world.ready == ("True", "Ready") and world.status.gang == "Fallback"
    kube.is_silent = True
    world.clock += REDISCOVER_S
    before = kube.num_lists
    await world.reconcile()
    await world.reconcile()
    assert (kube.num_lists, world.status.gang) == (before + 1, "Fallback"), "the former result is kept"


async def test_service_without_gang_needs_no_discovery() -> None:
    kube = UnresponsiveKube()
    world = World(kube, replicas=2)
    await world.settle()
    assert kube.num_lists == 0 and world.ready == ("True", "Ready")


async def test_schedulers_are_discovered_every_ten_minutes() -> None:
    world = World(**SEVERAL)
    await world.settle()
    world.kube.schedulers = {NATIVE_API}
    await world.reconcile()
    assert world.status.gang == "Fallback"
    world.clock += 600.0
    await world.reconcile()
    assert world.status.gang == "Native"
    assert not world.kube.of_kind(POD_GROUPS), "existing groups keep their gang"
