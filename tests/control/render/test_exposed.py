"""Clients from outside: the Ingress or HTTPRoute that a service asks for, and what the status says where there can be none."""

from typing import Any

import pytest

from phalanx_operator.apply.shared_objects import EXPOSE_AGAIN_S
from phalanx_operator.kube.client import HTTP_ROUTES, INGRESSES, STATEFUL_SETS, Denied, Rejected, Retry
from phalanx_operator.render import network as exposed
from tests.control.builders import make_service
from tests.control.conftest import Check
from tests.control.render.test_render import as_yaml
from tests.control.worlds import World

NGINX = "nginx.ingress.kubernetes.io/proxy-read-timeout"
INGRESS: dict[str, Any] = {
    "type": "Ingress",
    "hosts": ["chat.example.com", "llm.example.com"],
    "className": "nginx",
    "tlsSecretName": "chat-tls",
    "annotations": {NGINX: "3600"},
}
ROUTE: dict[str, Any] = {
    "type": "HTTPRoute",
    "hosts": ["chat.example.com"],
    "gateway": {"name": "public", "namespace": "gateways", "sectionName": "https"},
}


@pytest.mark.parametrize(("name", "expose"), [("ingress", INGRESS), ("route", ROUTE)])
def test_golden_doors(name: str, expose: dict[str, Any], golden: Check) -> None:
    service = make_service(router={"expose": expose})
    golden(f"objects/exposed-{name}.yaml", as_yaml(*(body for body, is_wanted in exposed.objects(service) if is_wanted)))


@pytest.mark.parametrize(
    ("expose", "wanted"),
    [({}, []), ({"type": "Ingress"}, ["Ingress"]), ({"type": "HTTPRoute", "gateway": {"name": "a"}}, ["HTTPRoute"])],
)
def test_only_requested_routes_are_created(expose: dict[str, Any], wanted: list[str]) -> None:
    found = exposed.objects(make_service(router={"expose": expose}))
    assert [body["kind"] for body, is_wanted in found if is_wanted] == wanted
    for body, is_wanted in found:
        if is_wanted:
            assert "annotations" not in body["metadata"] and not {"hostnames", "tls", "ingressClassName"} & set(body["spec"])


def made(world: World) -> list[int]:
    return [len(world.kube.of(kind)) for kind in (INGRESSES, HTTP_ROUTES)]


async def test_requested_route_is_created_and_deleted() -> None:
    world = World(router={"expose": INGRESS})
    world.kube.unknown.discard("httproutes")
    await world.settle()
    assert made(world) == [1, 0] and world.ready == ("True", "Ready")
    assert world.kube.of(INGRESSES)["chat"]["metadata"]["annotations"] == {NGINX: "3600"}
    assert await world.look() == []
    await world.change(router={"replicas": 1, "expose": ROUTE})
    await world.settle()
    assert made(world) == [0, 1] and world.ready == ("True", "Ready")
    await world.change(router={"replicas": 1})
    await world.settle()
    assert made(world) == [0, 0]


async def test_missing_route_kind_is_reported_and_serving_continues() -> None:
    world = World(replicas=2, router={"expose": ROUTE})
    await world.settle()
    assert len(world.kube.of(STATEFUL_SETS)) == 2 and world.condition("Available") == ("True", "Serving")
    words = "spec.router.expose: the cluster serves no HTTPRoute of gateway.networking.k8s.io/v1"
    for kind in ("Ready", "RouterReady", "Stalled"):
        (found,) = [one for one in world.status.conditions if one.type == kind]
        assert (found.reason, found.message) == ("Rejected", words), kind
    assert await world.look() == [], "nothing is said twice, nor tried at each look"
    assert world.next_s is not None and world.next_s <= EXPOSE_AGAIN_S
    await world.change(replicas=3)
    await world.settle()
    assert len(world.kube.of(STATEFUL_SETS)) == 3
    world.kube.unknown.discard("httproutes")
    world.clock += EXPOSE_AGAIN_S
    await world.settle()
    assert made(world) == [0, 1] and world.ready == ("True", "Ready")
    assert not [one for one in world.status.conditions if one.type == "Stalled"]


@pytest.mark.parametrize("error", [Rejected("spec.rules[0].host: taken"), Retry("failed calling webhook"), Denied("forbidden")])
async def test_refused_route_is_reported_and_retried(error: Exception) -> None:
    world = World(router={"expose": INGRESS})
    world.kube.failures["apply ingresses chat"] = error
    await world.settle()
    assert made(world) == [0, 0] and world.ready == ("False", "Rejected")
    assert ("Warning", "Rejected") in world.notes()
    world.clock += EXPOSE_AGAIN_S
    await world.settle()
    assert made(world) == [1, 0] and world.ready == ("True", "Ready")


async def test_another_spec_is_tried_at_once() -> None:
    world = World(router={"expose": ROUTE})
    await world.settle()
    await world.change(router={"replicas": 1, "expose": INGRESS})
    await world.settle()
    assert made(world) == [1, 0] and world.ready == ("True", "Ready")


async def test_foreign_ingress_of_that_name_is_kept() -> None:
    world = World(router={"expose": {"type": "Ingress"}})
    theirs = world.kube.put(INGRESSES, {"metadata": {"name": "chat", "namespace": "team", "uid": "theirs"}, "spec": {}})
    await world.settle()
    assert world.kube.of(INGRESSES)["chat"] == theirs and world.ready == ("False", "Rejected")
    await world.change(router={"replicas": 1})
    await world.settle()
    assert world.kube.of(INGRESSES)["chat"] == theirs and world.ready == ("True", "Ready")


async def test_older_role_without_route_permission_is_harmless() -> None:
    world = World()
    world.kube.failures |= {"get ingresses chat": Denied("forbidden"), "get httproutes chat": Denied("forbidden")}
    await world.settle()
    assert world.ready == ("True", "Ready")
