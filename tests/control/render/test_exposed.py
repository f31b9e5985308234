"""The Ingress or HTTPRoute of a service, and the status without one."""

from typing import Any

import pytest

from phalanx_api.conditions import ConditionType, find_condition
from phalanx_operator.apply.shared_objects import REJECTED_RETRY_S
from phalanx_operator.kube.client import DEPLOYMENTS, HTTP_ROUTES, INGRESSES, STATEFUL_SETS, Denied, Rejected, Retry
from phalanx_operator.render import network
from phalanx_router.settings import make_parser
from tests.control.builders import make_service
from tests.control.conftest import Check
from tests.control.render.documents import as_yaml
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
def test_golden_exposures(name: str, expose: dict[str, Any], golden: Check) -> None:
    service = make_service(router={"expose": expose})
    golden(f"objects/exposed-{name}.yaml", as_yaml(*(body for body, is_specified in network.exposures(service) if is_specified)))


@pytest.mark.parametrize(
    ("expose", "kinds"),
    [({}, []), ({"type": "Ingress"}, ["Ingress"]), ({"type": "HTTPRoute", "gateway": {"name": "a"}}, ["HTTPRoute"])],
)
def test_only_requested_routes_are_created(expose: dict[str, Any], kinds: list[str]) -> None:
    exposures = network.exposures(make_service(router={"expose": expose}))
    assert [body["kind"] for body, is_specified in exposures if is_specified] == kinds
    for body, is_specified in exposures:
        if is_specified:
            assert "annotations" not in body["metadata"] and not {"hostnames", "tls", "ingressClassName"} & set(body["spec"])


def test_a_path_is_matched_and_removed_by_gateways() -> None:
    """An Ingress cannot remove it, so routers serve both."""
    ingress, route, without = (
        next(body for body, is_specified in network.exposures(make_service(router={"expose": expose})) if is_specified)
        for expose in (INGRESS | {"path": "/team/chat"}, ROUTE | {"path": "/team/chat"}, ROUTE)
    )
    assert {rule["host"] for rule in ingress["spec"]["rules"]} == set(INGRESS["hosts"])
    for rule in ingress["spec"]["rules"]:
        assert [(path["path"], path["pathType"]) for path in rule["http"]["paths"]] == [("/team/chat", "Prefix")]
    (rule,) = route["spec"]["rules"]
    assert rule["matches"] == [{"path": {"type": "PathPrefix", "value": "/team/chat"}}]
    rewritten = {"path": {"type": "ReplacePrefixMatch", "replacePrefixMatch": "/"}}
    assert rule["filters"] == [{"type": "URLRewrite", "urlRewrite": rewritten}]
    assert without["spec"]["rules"][0]["matches"] == [{"path": {"type": "PathPrefix", "value": "/"}}]
    assert "filters" not in without["spec"]["rules"][0], "a filter that some gateways lack"


async def test_the_url_and_flags_of_routers_have_the_path() -> None:
    world = World(router={"expose": INGRESS | {"path": "/team/chat"}})
    await world.settle()
    assert world.status.url == "http://chat.team.svc/team/chat"
    (deployment,) = world.kube.of_kind(DEPLOYMENTS).values()
    args = deployment["spec"]["template"]["spec"]["containers"][0]["args"]
    assert make_parser().parse_args(args).root_path == "/team/chat"
    await world.change(router={"replicas": 1, "expose": INGRESS})
    await world.settle()
    assert world.status.url == "http://chat.team.svc"
    (deployment,) = world.kube.of_kind(DEPLOYMENTS).values()
    assert "--root-path" not in str(deployment), "without a path nothing changes"


def counts(world: World) -> list[int]:
    """Returns the numbers of Ingresses and HTTPRoutes."""
    return [len(world.kube.of_kind(kind)) for kind in (INGRESSES, HTTP_ROUTES)]


async def test_requested_route_is_created_and_deleted() -> None:
    world = World(router={"expose": INGRESS})
    world.kube.unknown.discard("httproutes")
    await world.settle()
    assert counts(world) == [1, 0] and world.ready == ("True", "Ready")
    assert world.kube.of_kind(INGRESSES)["chat"]["metadata"]["annotations"] == {NGINX: "3600"}
    assert await world.reconcile() == []
    await world.change(router={"replicas": 1, "expose": ROUTE})
    await world.settle()
    assert counts(world) == [0, 1] and world.ready == ("True", "Ready")
    await world.change(router={"replicas": 1})
    await world.settle()
    assert counts(world) == [0, 0]


async def test_missing_route_kind_is_reported_and_serving_continues() -> None:
    world = World(replicas=2, router={"expose": ROUTE})
    await world.settle()
    assert len(world.kube.of_kind(STATEFUL_SETS)) == 2 and world.condition("Available") == ("True", "Serving")
    message = "spec.router.expose: the cluster serves no HTTPRoute of gateway.networking.k8s.io/v1"
    kinds: list[ConditionType] = ["Ready", "RouterReady", "Stalled"]
    for kind in kinds:
        condition = find_condition(world.status.conditions, kind)
        assert condition and (condition.reason, condition.message) == ("Rejected", message)
    assert await world.reconcile() == [], "neither reported again nor retried yet"
    assert world.next_s is not None and world.next_s <= REJECTED_RETRY_S
    await world.change(replicas=3)
    await world.settle()
    assert len(world.kube.of_kind(STATEFUL_SETS)) == 3
    world.kube.unknown.discard("httproutes")
    world.clock += REJECTED_RETRY_S
    await world.settle()
    assert counts(world) == [0, 1] and world.ready == ("True", "Ready")
    assert find_condition(world.status.conditions, "Stalled") is None


@pytest.mark.parametrize("error", [Rejected("spec.rules[0].host: taken"), Retry("failed calling webhook"), Denied("forbidden")])
async def test_rejected_route_is_reported_and_retried(error: Exception) -> None:
    world = World(router={"expose": INGRESS})
    world.kube.failures["apply ingresses chat"] = error
    await world.settle()
    assert counts(world) == [0, 0] and world.ready == ("False", "Rejected")
    assert ("Warning", "Rejected") in world.events()
    world.clock += REJECTED_RETRY_S
    await world.settle()
    assert counts(world) == [1, 0] and world.ready == ("True", "Ready")


async def test_changed_spec_is_applied_at_once() -> None:
    world = World(router={"expose": ROUTE})
    await world.settle()
    await world.change(router={"replicas": 1, "expose": INGRESS})
    await world.settle()
    assert counts(world) == [1, 0] and world.ready == ("True", "Ready")


async def test_foreign_ingress_of_that_name_is_kept() -> None:
    world = World(router={"expose": {"type": "Ingress"}})
    foreign = world.kube.put(INGRESSES, {"metadata": {"name": "chat", "namespace": "team", "uid": "foreign"}, "spec": {}})
    await world.settle()
    assert world.kube.of_kind(INGRESSES)["chat"] == foreign and world.ready == ("False", "Rejected")
    await world.change(router={"replicas": 1})
    await world.settle()
    assert world.kube.of_kind(INGRESSES)["chat"] == foreign and world.ready == ("True", "Ready")


async def test_older_role_without_route_permission_is_harmless() -> None:
    world = World()
    world.kube.failures |= {"get ingresses chat": Denied("forbidden"), "get httproutes chat": Denied("forbidden")}
    await world.settle()
    assert world.ready == ("True", "Ready")
