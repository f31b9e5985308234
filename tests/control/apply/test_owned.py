"""Shared objects: few calls, no writes to foreign objects, and no rendering without changes."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx_api.labels import MANAGER
from phalanx_operator.apply.owned import REAPPLY_S
from phalanx_operator.apply.shared_objects import STARTUP_S
from phalanx_operator.kube.client import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    INFERENCE_SERVICES,
    INGRESSES,
    NETWORK_POLICIES,
    PODS,
    RESOURCES,
    SECRETS,
    SERVICES,
    STATEFUL_SETS,
    Conflict,
    Json,
    KubeError,
    Rejected,
    Resource,
    Retry,
)
from phalanx_operator.observe.service_cache import ManifestCache
from phalanx_operator.render.objects import Images
from tests.control.fake_kube import FakeKube
from tests.control.loop.scenes import LONG_AGO
from tests.control.summaries import summary
from tests.control.worlds import World
from tests.examples import examples

KEY = ("team", "chat")
SHARED = [
    (SECRETS, "chat-token"),
    (NETWORK_POLICIES, "chat-groups"),
    (NETWORK_POLICIES, "chat-router"),
    (SERVICES, "chat-groups"),
    (SERVICES, "chat"),
    (RESOURCES["v1", "ServiceAccount"], "chat-router"),
    (RESOURCES["rbac.authorization.k8s.io/v1", "Role"], "chat-router"),
    (RESOURCES["rbac.authorization.k8s.io/v1", "RoleBinding"], "chat-router"),
    (CONFIG_MAPS, "chat-policy"),
    (DISRUPTION_BUDGETS, "chat-router"),
    (DISRUPTION_BUDGETS, "chat-groups"),
    (DEPLOYMENTS, "chat-router"),
]


def shared_calls(calls: list[str]) -> list[str]:
    """Returns the calls for shared objects."""
    plurals = {resource.plural for resource, _ in SHARED} | {"ingresses", "httproutes"}
    return [call for call in calls if call.split()[1] in plurals]


async def test_objects_of_a_new_service_take_one_call_each() -> None:
    world = World(replicas=2)
    await world.reconcile()
    assert shared_calls(world.kube.reads) == []
    created = sorted(call.partition(" ")[2] for call in shared_calls(world.kube.calls))
    assert created == sorted(f"{resource.plural} {name}" for resource, name in SHARED)


async def restart_operator() -> World:
    """Returns a settled service with a new operator that draws the longest delay."""
    former = World(replicas=2)
    former.cluster.start_router_pods()
    former.routers.summary = summary()
    await former.settle()
    world = World(former.kube, draw=1.0)
    world.routers.is_new = True
    world.kube.calls.clear()
    return world


async def test_existing_objects_are_checked_shortly_after_start() -> None:
    world = await restart_operator()
    await world.reconcile()
    assert shared_calls(world.kube.calls) == [] and (world.next_s or 0.0) <= STARTUP_S
    world.clock += STARTUP_S
    await world.reconcile()
    assert {call.split()[2] for call in shared_calls(world.kube.calls)} >= {"chat", "chat-groups", "chat-router", "chat-policy"}
    assert (world.next_s or 0.0) > STARTUP_S


async def test_new_operator_publishes_silent_routers_at_once() -> None:
    """Clients would fail during the delay of its first pass."""
    world = await restart_operator()
    world.routers.is_new, world.routers.summary = False, summary()
    pod = world.kube.of_kind(PODS)["chat-router-0"]
    world.kube.put(PODS, pod | {"spec": {"nodeName": "far"}})
    await world.reconcile()
    assert shared_calls(world.kube.calls) == []
    world.cluster.lose_node("far", LONG_AGO)
    await world.reconcile()
    assert world.kube.of_kind(SERVICES)["chat"]["spec"]["publishNotReadyAddresses"] is True


async def test_silent_routers_are_not_reported_right_after_start() -> None:
    world = await restart_operator()
    assert await world.reconcile() == []
    assert world.condition("Balanced") == ("True", "Balanced")
    world.routers.is_new = False
    await world.reconcile()
    assert world.condition("Balanced") == ("Unknown", "RoutersSilent")


@pytest.mark.parametrize("reconciles", [0, 1], ids=["before the first reconcile", "after it"])
async def test_pending_changes_are_applied_at_once_after_start(reconciles: int) -> None:
    world = await restart_operator()
    for _ in range(reconciles):
        await world.reconcile()
    body = world.service | {"spec": world.service["spec"] | {"networkPolicy": {"enabled": False}}}
    world.kube.put(INFERENCE_SERVICES, body | {"metadata": body["metadata"] | {"generation": 2}})
    await world.reconcile()
    assert world.kube.of_kind(NETWORK_POLICIES) == {}


@pytest.mark.parametrize("reconciles", [0, 1], ids=["before the first reconcile", "after it"])
async def test_missing_objects_are_created_at_once_after_start(reconciles: int) -> None:
    world = await restart_operator()
    for _ in range(reconciles):
        await world.reconcile()
    del world.kube.objects[SERVICES.plural, "team", "chat"]
    await world.reconcile()
    assert "apply services chat" in world.kube.calls


async def test_rejected_objects_are_retried_at_once_after_start() -> None:
    former = World(replicas=2)
    await former.settle()
    former.kube.put(INFERENCE_SERVICES, former.service | {"metadata": former.service["metadata"] | {"generation": 2}})
    former.kube.failures["apply networkpolicies chat-groups"] = Rejected("a webhook says no")
    former.clock += REAPPLY_S + 1
    with pytest.raises(Rejected):
        await former.reconcile()
    assert former.ready == ("False", "Rejected")
    world = World(former.kube, draw=1.0)
    await world.reconcile()
    assert "apply networkpolicies chat-groups" in world.kube.calls and world.ready[0] == "True"


async def test_own_objects_are_applied_again_by_one_call_each() -> None:
    world = World(replicas=2)
    await world.settle()
    world.kube.reads.clear()
    world.clock += REAPPLY_S + 1
    writes = shared_calls(await world.reconcile())
    assert len(writes) == len(SHARED) - 1 and all(call.startswith("apply") for call in writes)
    assert shared_calls(world.kube.reads) == ["get secrets chat-token", "get ingresses chat", "get httproutes chat"]


async def test_starting_operator_checks_the_owners_of_objects() -> None:
    await (world := World(replicas=2)).settle()
    world.kube.reads.clear()
    after = World(world.kube)
    writes = shared_calls(await after.reconcile())
    assert len(writes) == len(SHARED) - 1
    assert len(shared_calls(world.kube.reads)) == len(SHARED) + 3, "each once, with unwanted ones"


@pytest.mark.parametrize(("resource", "name"), SHARED, ids=lambda v: str(v))
async def test_foreign_object_is_never_written(resource: Resource, name: str) -> None:
    world = World(replicas=2)
    foreign = world.kube.put(resource, {"metadata": {"name": name, "namespace": "team", "uid": "foreign"}, "spec": {"a": "b"}})
    with pytest.raises(Rejected, match=f"{name} exists and the operator does not own it"):
        await world.reconcile()
    assert world.kube.of_kind(resource)[name] == foreign


@pytest.mark.parametrize(("resource", "name"), SHARED[1:], ids=lambda v: str(v))
async def test_foreign_successor_of_an_object_is_not_written(resource: Resource, name: str) -> None:
    world = World(replicas=2)
    await world.settle()
    del world.kube.objects[resource.plural, "team", name]
    foreign = world.kube.put(resource, {"metadata": {"name": name, "namespace": "team", "uid": "foreign"}, "spec": {"a": "b"}})
    world.clock += REAPPLY_S + 1
    with pytest.raises(Rejected, match=f"{name} exists and the operator does not own it"):
        await world.reconcile()
    assert world.kube.of_kind(resource)[name] == foreign


async def test_deleted_object_is_created_again_in_time() -> None:
    world = World(replicas=2)
    await world.settle()
    for resource, name in SHARED[1:]:
        del world.kube.objects[resource.plural, "team", name]
    world.clock += REAPPLY_S + 1
    await world.settle()
    assert all(name in world.kube.of_kind(resource) for resource, name in SHARED)


async def test_terminating_object_is_awaited() -> None:
    world = World(replicas=2)
    await world.settle()
    world.kube.of_kind(CONFIG_MAPS)["chat-policy"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.clock += REAPPLY_S + 1
    with pytest.raises(Retry, match="still being deleted"):
        await world.reconcile()


@pytest.mark.parametrize("error", [Conflict, Rejected])
async def test_server_without_version_precondition_gets_a_plain_create(error: type[KubeError]) -> None:
    class Strict(FakeKube):
        async def apply(self, resource: Resource, body: Json, *, subresource: str | None = None, manager: str = MANAGER) -> Json:
            if "resourceVersion" in body["metadata"]:
                raise error("metadata.resourceVersion: there is no such version")
            return await super().apply(resource, body, subresource=subresource, manager=manager)

    world = World(Strict(), replicas=2)
    await world.settle()
    assert world.ready == ("True", "Ready")
    assert all(name in world.kube.of_kind(resource) for resource, name in SHARED)


class NoCache(ManifestCache):
    """Parses at every reconcile, so that everything is rendered."""

    def parse(self, body: Json) -> Any:
        self.forget((body["metadata"]["namespace"], body["metadata"]["name"]))
        return super().parse(body)


class CountingImages(Images):
    """Counts the renderings of routers."""

    times: int = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "router":
            CountingImages.times += 1
        return super().__getattribute__(name)


STEPS = st.sampled_from(
    [
        "reconcile",
        "start",
        "routers",
        "more",
        "fewer",
        "ingress",
        "route",
        "policies",
        "scaled",
        "deleted",
        "service",
        "later",
        "known",
    ]
)


async def apply_step(world: World, step: str) -> object:
    """Applies a step. Returns the writes and the next reconcile, or the error."""
    kube, spec = world.kube, world.service["spec"]
    match step:
        case "start":
            world.cluster.start_pods()
            world.cluster.start_routers()
        case "routers":
            await world.change(router={"replicas": 3 - spec.get("router", {}).get("replicas", 2)})
        case "more" | "fewer":
            await world.change(replicas=2 if step == "more" else 1)
        case "ingress" | "route":
            expose = (
                {"type": "Ingress", "hosts": ["a.b"]} if step == "ingress" else {"type": "HTTPRoute", "gateway": {"name": "g"}}
            )
            await world.change(router={"expose": expose})
        case "policies":
            await world.change(networkPolicy={"enabled": not spec.get("networkPolicy", {}).get("enabled", True)})
        case "scaled" if deployment := kube.of_kind(DEPLOYMENTS).get("chat-router"):
            kube.put(DEPLOYMENTS, deployment | {"spec": deployment["spec"] | {"replicas": 7}})
        case "deleted" | "service":
            deleted = ("deployments", "team", "chat-router") if step == "deleted" else ("services", "team", "chat")
            kube.objects.pop(deleted, None)
        case "later":
            world.clock += 250.0
        case "known":
            kube.unknown ^= {"servicemonitors"}
    try:
        return await world.reconcile(), world.next_s
    except (Retry, Rejected) as error:
        return str(error)


@settings(max_examples=examples(30), deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, min_size=1, max_size=12))
async def test_skipped_render_would_have_changed_nothing(steps: list[str]) -> None:
    fast, slow = World(replicas=2), World(replicas=2, manifests=NoCache())
    for number, step in enumerate(["reconcile", "start", *steps]):
        for world in (fast, slow):
            world.kube.calls.clear()
            await apply_step(world, step)
        cached, rendered = ([call for call in w.kube.calls if "events" not in call] for w in (fast, slow))
        assert cached == rendered, (number, step)
    assert fast.service["status"] == slow.service["status"]


async def test_idle_service_is_rendered_every_ten_minutes() -> None:
    world = World(images=CountingImages("runtime:1", "router:1"), replicas=2)
    await world.settle()
    before = CountingImages.times
    for _ in range(3):
        await world.reconcile()
    assert CountingImages.times == before
    world.clock += REAPPLY_S + 1
    await world.reconcile()
    await world.reconcile()
    assert CountingImages.times == before + 1
    assert set(world.kube.of_kind(STATEFUL_SETS)) == world.groups and INGRESSES.plural not in {w[0] for w in world.kube.objects}


async def test_unchanged_manifest_is_parsed_once() -> None:
    manifests = ManifestCache()
    world = World(manifests=manifests)
    first = manifests.parse(world.service)
    await world.reconcile()
    assert manifests.parse(world.service) is first
    await world.change(replicas=3)
    second = manifests.parse(world.service)
    assert second is not first and manifests.parse(world.service) is second
    manifests.forget(KEY)
    assert manifests.parse(world.service) is not second and manifests.parse(world.service) == second
