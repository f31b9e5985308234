"""What Prometheus's operator is told: only where its kinds are known, and never at the cost of serving."""

import re

from prometheus_client import CollectorRegistry

from phalanx_operator.apply.owned import APPLY_AGAIN_S
from phalanx_operator.apply.shared_objects import MONITOR_AGAIN_S
from phalanx_operator.kube.client import PROMETHEUS_RULES, SERVICE_MONITORS, STATEFUL_SETS, Denied, Retry
from phalanx_operator.render import monitoring, router, services
from phalanx_operator.render.objects import Images
from phalanx_router.metrics import RouterMetrics
from phalanx_runtime.server.http.metrics import SpeculationMetrics
from tests.control.builders import make_service
from tests.control.worlds import World

SERVICE = make_service()


def made(world: World) -> list[int]:
    return [len(world.kube.of(kind)) for kind in (SERVICE_MONITORS, PROMETHEUS_RULES)]


async def test_missing_monitoring_kinds_are_discovered_rarely() -> None:
    world = World()
    await world.settle()
    assert world.ready[0] == "True" and made(world) == [0, 0]
    world.kube.unknown = set()
    await world.look()
    assert made(world) == [0, 0]
    world.clock += APPLY_AGAIN_S + 1
    await world.look()
    assert made(world) == [1, 1], "the CRDs were installed later"


async def test_monitoring_objects_follow_their_switch() -> None:
    world = World()
    world.kube.unknown = set()
    await world.settle()
    assert made(world) == [1, 1] and await world.look() == []
    await world.change(monitoring={"serviceMonitor": "Off"})
    await world.settle()
    assert made(world) == [0, 0]


async def test_a_right_that_is_missing_stops_no_service() -> None:
    world = World()
    world.kube.unknown = set()
    world.kube.failures["apply servicemonitors chat"] = Denied("servicemonitors is forbidden")
    await world.settle()
    assert world.ready[0] == "True" and len(world.kube.of(STATEFUL_SETS)) == 1 and made(world) == [0, 1]


async def test_failing_webhook_is_retried_later_and_blocks_nothing() -> None:
    world = World()
    world.kube.unknown = set()
    world.kube.failures["apply prometheusrules chat"] = Retry("failed calling webhook: 500")
    await world.settle()
    assert world.ready[0] == "True" and len(world.kube.of(STATEFUL_SETS)) == 1 and made(world) == [1, 0]
    world.clock += MONITOR_AGAIN_S + 1
    await world.look()
    assert made(world) == [1, 1]


def test_monitor_selects_router_and_group_services_by_port() -> None:
    monitor = monitoring.objects(SERVICE)[0]["spec"]
    images = Images("runtime:1", "router:1")
    found = [
        body for body in [services.groups_service(SERVICE), *router.router_objects(SERVICE, images)] if body["kind"] == "Service"
    ]
    assert len(found) == 2
    for service in found:
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert [port["name"] for port in service["spec"]["ports"]] == [monitor["endpoints"][0]["port"]]


def test_alerts_rest_on_metrics_that_routers_and_groups_have() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry)
    SpeculationMetrics(registry, "tiny")
    known = {family.name for family in registry.collect()}
    rules = monitoring.objects(SERVICE)[1]["spec"]["groups"][0]["rules"]
    named = {
        name.removesuffix("_total") for rule in rules for name in re.findall(r"phalanx_(?:router|speculation)_\w+", rule["expr"])
    }
    assert len(rules) == 5 and len(named) == 5 and named <= known
