"""What all groups share: few calls, nobody else's objects, and nothing rendered where nothing changed."""

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from phalanx_operator.apply.owned import APPLY_AGAIN_S
from phalanx_operator.apply.shared_objects import START_S
from phalanx_operator.kube.client import (
    CONFIG_MAPS,
    DEPLOYMENTS,
    DISRUPTION_BUDGETS,
    INGRESSES,
    NETWORK_POLICIES,
    RESOURCES,
    SECRETS,
    SERVICES,
    SERVICES_OF_OURS,
    STATEFUL_SETS,
    Conflict,
    Json,
    KubeError,
    Rejected,
    Resource,
    Retry,
)
from phalanx_operator.observe.service_cache import Manifests
from phalanx_operator.render.objects import Images
from tests.control.fake_kube import FakeKube
from tests.control.summaries import summary
from tests.control.worlds import World

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


def of_shared(calls: list[str]) -> list[str]:
    """Calls for what groups share."""
    plurals = {resource.plural for resource, _ in SHARED} | {"ingresses", "httproutes"}
    return [call for call in calls if call.split()[1] in plurals]


async def test_objects_of_a_new_service_take_one_call_each() -> None:
    world = World(replicas=2)
    await world.look()
    assert of_shared(world.kube.reads) == []
    made = sorted(call.partition(" ")[2] for call in of_shared(world.kube.calls))
    assert made == sorted(f"{resource.plural} {name}" for resource, name in SHARED)


async def started_again() -> World:
    """A service that has all it needs, and another operator, which has begun just now and draws the longest wait."""
    former = World(replicas=2)
    former.cluster.start_router_pods()
    former.routers.says = summary()
    await former.settle()
    world = World(former.kube, draw=1.0)
    world.routers.is_new = True
    world.kube.calls.clear()
    return world


async def test_existing_objects_are_checked_shortly_after_start() -> None:
    world = await started_again()
    await world.look()
    assert of_shared(world.kube.calls) == [] and (world.next_s or 0.0) <= START_S
    world.clock += START_S
    await world.look()
    assert {call.split()[2] for call in of_shared(world.kube.calls)} >= {"chat", "chat-groups", "chat-router", "chat-policy"}
    assert (world.next_s or 0.0) > START_S


async def test_silent_routers_are_not_reported_right_after_start() -> None:
    world = await started_again()
    assert await world.look() == []
    assert world.condition("Balanced") == ("True", "Balanced")
    world.routers.is_new = False
    await world.look()
    assert world.condition("Balanced") == ("Unknown", "RoutersSilent")


@pytest.mark.parametrize("looks", [0, 1], ids=["before the first look", "after it"])
async def test_pending_changes_are_applied_at_once_after_start(looks: int) -> None:
    world = await started_again()
    for _ in range(looks):
        await world.look()
    body = world.service | {"spec": world.service["spec"] | {"networkPolicy": {"enabled": False}}}
    world.kube.put(SERVICES_OF_OURS, body | {"metadata": body["metadata"] | {"generation": 2}})
    await world.look()
    assert world.kube.of(NETWORK_POLICIES) == {}


@pytest.mark.parametrize("looks", [0, 1], ids=["before the first look", "after it"])
async def test_missing_objects_are_created_at_once_after_start(looks: int) -> None:
    world = await started_again()
    for _ in range(looks):
        await world.look()
    del world.kube.objects[SERVICES.plural, "team", "chat"]
    await world.look()
    assert "apply services chat" in world.kube.calls


async def test_refused_objects_are_retried_at_once_after_start() -> None:
    former = World(replicas=2)
    await former.settle()
    former.kube.put(SERVICES_OF_OURS, former.service | {"metadata": former.service["metadata"] | {"generation": 2}})
    former.kube.failures["apply networkpolicies chat-groups"] = Rejected("a webhook says no")
    former.clock += APPLY_AGAIN_S + 1
    with pytest.raises(Rejected):
        await former.look()
    assert former.ready == ("False", "Rejected")
    world = World(former.kube, draw=1.0)
    await world.look()
    assert "apply networkpolicies chat-groups" in world.kube.calls and world.ready[0] == "True"


async def test_own_objects_are_applied_again_by_one_call_each() -> None:
    world = World(replicas=2)
    await world.settle()
    world.kube.reads.clear()
    world.clock += APPLY_AGAIN_S + 1
    writes = of_shared(await world.look())
    assert len(writes) == len(SHARED) - 1 and all(call.startswith("apply") for call in writes)
    assert of_shared(world.kube.reads) == ["get secrets chat-token", "get ingresses chat", "get httproutes chat"]


async def test_starting_operator_checks_the_owners_of_objects() -> None:
    await (world := World(replicas=2)).settle()
    world.kube.reads.clear()
    after = World(world.kube)
    writes = of_shared(await after.look())
    assert len(writes) == len(SHARED) - 1
    assert len(of_shared(world.kube.reads)) == len(SHARED) + 2, "each once, and what is not wanted"


@pytest.mark.parametrize(("resource", "name"), SHARED, ids=lambda v: str(v))
async def test_foreign_object_is_never_written(resource: Resource, name: str) -> None:
    world = World(replicas=2)
    theirs = world.kube.put(resource, {"metadata": {"name": name, "namespace": "team", "uid": "theirs"}, "spec": {"a": "b"}})
    with pytest.raises(Rejected, match=f"{name} exists and the operator does not own it"):
        await world.look()
    assert world.kube.of(resource)[name] == theirs


@pytest.mark.parametrize(("resource", "name"), SHARED[1:], ids=lambda v: str(v))
async def test_nor_is_one_that_took_the_place_of_ours(resource: Resource, name: str) -> None:
    world = World(replicas=2)
    await world.settle()
    del world.kube.objects[resource.plural, "team", name]
    theirs = world.kube.put(resource, {"metadata": {"name": name, "namespace": "team", "uid": "theirs"}, "spec": {"a": "b"}})
    world.clock += APPLY_AGAIN_S + 1
    with pytest.raises(Rejected, match=f"{name} exists and the operator does not own it"):
        await world.look()
    assert world.kube.of(resource)[name] == theirs


async def test_deleted_object_is_created_again_in_time() -> None:
    world = World(replicas=2)
    await world.settle()
    for resource, name in SHARED[1:]:
        del world.kube.objects[resource.plural, "team", name]
    world.clock += APPLY_AGAIN_S + 1
    await world.settle()
    assert all(name in world.kube.of(resource) for resource, name in SHARED)


async def test_terminating_object_is_awaited() -> None:
    world = World(replicas=2)
    await world.settle()
    world.kube.of(CONFIG_MAPS)["chat-policy"]["metadata"]["deletionTimestamp"] = "2026-01-01T00:00:00Z"
    world.clock += APPLY_AGAIN_S + 1
    with pytest.raises(Retry, match="still being deleted"):
        await world.look()


@pytest.mark.parametrize("refusal", [Conflict, Rejected])
async def test_server_without_version_precondition_gets_a_plain_create(refusal: type[KubeError]) -> None:
    class Strict(FakeKube):
        async def apply(self, resource: Resource, body: Json, *, subresource: str | None = None) -> Json:
            if "resourceVersion" in body["metadata"]:
                raise refusal("metadata.resourceVersion: there is no such version")
            return await super().apply(resource, body, subresource=subresource)

    world = World(Strict(), replicas=2)
    await world.settle()
    assert world.ready == ("True", "Ready")
    assert all(name in world.kube.of(resource) for resource, name in SHARED)


class Anew(Manifests):
    """Reads a manifest at every look: what is read is never the same object, so everything is rendered."""

    def read(self, body: Json) -> Any:
        self.forget((body["metadata"]["namespace"], body["metadata"]["name"]))
        return super().read(body)


class Counted(Images):
    """How often routers were rendered."""

    times: int = 0

    def __getattribute__(self, name: str) -> Any:
        if name == "router":
            Counted.times += 1
        return super().__getattribute__(name)


STEPS = st.sampled_from(
    ["look", "tell", "routers", "more", "fewer", "expose", "hide", "policies", "scaled", "deleted", "service", "later", "known"]
)


async def _step(world: World, step: str) -> object:
    """What one step does, and what comes of it."""
    kube, spec = world.kube, world.service["spec"]
    match step:
        case "tell":
            world.cluster.start_pods()
            world.cluster.start_routers()
        case "routers":
            await world.change(router={"replicas": 3 - spec.get("router", {}).get("replicas", 2)})
        case "more" | "fewer":
            await world.change(replicas=2 if step == "more" else 1)
        case "expose" | "hide":
            expose = (
                {"type": "Ingress", "hosts": ["a.b"]} if step == "expose" else {"type": "HTTPRoute", "gateway": {"name": "g"}}
            )
            await world.change(router={"expose": expose})
        case "policies":
            await world.change(networkPolicy={"enabled": not spec.get("networkPolicy", {}).get("enabled", True)})
        case "scaled" if door := kube.of(DEPLOYMENTS).get("chat-router"):
            kube.put(DEPLOYMENTS, door | {"spec": door["spec"] | {"replicas": 7}})
        case "deleted" | "service":
            gone = ("deployments", "team", "chat-router") if step == "deleted" else ("services", "team", "chat")
            kube.objects.pop(gone, None)
        case "later":
            world.clock += 250.0
        case "known":
            kube.unknown ^= {"servicemonitors"}
    try:
        return await world.look(), world.next_s
    except (Retry, Rejected) as error:
        return str(error)


@settings(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(st.lists(STEPS, min_size=1, max_size=12))
async def test_skipped_render_would_have_changed_nothing(steps: list[str]) -> None:
    fast, slow = World(replicas=2), World(replicas=2, manifests=Anew())
    for number, step in enumerate(["look", "tell", *steps]):
        for world in (fast, slow):
            world.kube.calls.clear()
            await _step(world, step)
        ours, theirs = ([call for call in w.kube.calls if "events" not in call] for w in (fast, slow))
        assert ours == theirs, (number, step)
    assert fast.service["status"] == slow.service["status"]


async def test_idle_service_is_rendered_every_ten_minutes() -> None:
    world = World(images=Counted("runtime:1", "router:1"), replicas=2)
    await world.settle()
    before = Counted.times
    for _ in range(3):
        await world.look()
    assert Counted.times == before
    world.clock += APPLY_AGAIN_S + 1
    await world.look()
    await world.look()
    assert Counted.times == before + 1
    assert set(world.kube.of(STATEFUL_SETS)) == world.groups and INGRESSES.plural not in {w[0] for w in world.kube.objects}


async def test_a_manifest_that_stays_the_same_is_read_once() -> None:
    manifests = Manifests()
    world = World(manifests=manifests)
    first = manifests.read(world.service)
    await world.look()
    assert manifests.read(world.service) is first
    await world.change(replicas=3)
    second = manifests.read(world.service)
    assert second is not first and manifests.read(world.service) is second
    manifests.forget(KEY)
    assert manifests.read(world.service) is not second and manifests.read(world.service) == second
