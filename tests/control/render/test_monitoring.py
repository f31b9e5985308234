"""Objects of the Prometheus operator, in clusters with and without its CRDs."""

import re

from prometheus_client import CollectorRegistry

from phalanx_operator.apply.owned import REAPPLY_S
from phalanx_operator.apply.shared_objects import MONITOR_RETRY_S
from phalanx_operator.kube.client import PROMETHEUS_RULES, SERVICE_MONITORS, STATEFUL_SETS, Denied, Retry
from phalanx_operator.render import monitoring, router, services
from phalanx_operator.render.objects import Images
from phalanx_router.metrics import RouterMetrics
from phalanx_router.responses.metrics import ResponseCacheMetrics
from phalanx_runtime.server.http.metrics import SpeculationMetrics
from tests.control.builders import make_service
from tests.control.worlds import World

SERVICE = make_service()


def counts(world: World) -> list[int]:
    """Returns the numbers of ServiceMonitors and PrometheusRules."""
    return [len(world.kube.of_kind(kind)) for kind in (SERVICE_MONITORS, PROMETHEUS_RULES)]


async def test_missing_monitoring_kinds_are_discovered_rarely() -> None:
    world = World()
    await world.settle()
    assert world.ready[0] == "True" and counts(world) == [0, 0]
    world.kube.unknown = set()
    await world.reconcile()
    assert counts(world) == [0, 0]
    world.clock += REAPPLY_S + 1
    await world.reconcile()
    assert counts(world) == [1, 1], "the CRDs were installed later"


async def test_monitoring_objects_follow_their_switch() -> None:
    world = World()
    world.kube.unknown = set()
    await world.settle()
    assert counts(world) == [1, 1] and await world.reconcile() == []
    await world.change(monitoring={"serviceMonitor": "Off"})
    await world.settle()
    assert counts(world) == [0, 0]


async def test_missing_permission_blocks_nothing() -> None:
    world = World()
    world.kube.unknown = set()
    world.kube.failures["apply servicemonitors chat"] = Denied("servicemonitors is forbidden")
    await world.settle()
    assert world.ready[0] == "True" and len(world.kube.of_kind(STATEFUL_SETS)) == 1 and counts(world) == [0, 1]


async def test_failing_webhook_is_retried_later_and_blocks_nothing() -> None:
    world = World()
    world.kube.unknown = set()
    world.kube.failures["apply prometheusrules chat"] = Retry("failed calling webhook: 500")
    await world.settle()
    assert world.ready[0] == "True" and len(world.kube.of_kind(STATEFUL_SETS)) == 1 and counts(world) == [1, 0]
    world.clock += MONITOR_RETRY_S + 1
    await world.reconcile()
    assert counts(world) == [1, 1]


def test_monitor_selects_router_and_group_services_by_port() -> None:
    monitor = monitoring.objects(SERVICE)[0]["spec"]
    images = Images("runtime:1", "router:1")
    objects = [services.groups_service(SERVICE), *router.router_objects(SERVICE, images)]
    selected = [body for body in objects if body["kind"] == "Service"]
    assert len(selected) == 2
    for service in selected:
        assert monitor["selector"]["matchLabels"].items() <= service["metadata"]["labels"].items()
        assert [port["name"] for port in service["spec"]["ports"]] == [monitor["endpoints"][0]["port"]]


def test_alerts_use_existing_metrics_of_routers_and_groups() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry)
    SpeculationMetrics(registry, "tiny")
    ResponseCacheMetrics(registry)
    metrics = {family.name for family in registry.collect()}
    rules = monitoring.objects(SERVICE)[1]["spec"]["groups"][0]["rules"]
    pattern = r"phalanx_(?:router|speculation)_\w+"
    used = {name.removesuffix("_total") for rule in rules for name in re.findall(pattern, rule["expr"])}
    assert len(rules) == 7 and len(used) == 7 and used <= metrics
