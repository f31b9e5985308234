"""Objects of the Prometheus operator, in clusters with and without its CRDs."""

import re
from pathlib import Path

import pytest

from phalanx_operator.apply.owned import REAPPLY_S
from phalanx_operator.apply.shared_objects import MONITOR_RETRY_S
from phalanx_operator.kube.client import PROMETHEUS_RULES, SERVICE_MONITORS, STATEFUL_SETS, Denied, Retry
from phalanx_operator.render import monitoring, router, services
from phalanx_operator.render.burn_rates import FAST, SLOW, WINDOWS
from phalanx_operator.render.objects import Images
from tests.control.builders import make_service
from tests.control.monitoring.registered import registered_series, rules_of_service, used_series
from tests.control.worlds import World

ROOT = Path(__file__).resolve().parents[3]
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
    rules = rules_of_service()
    used = set().union(*(used_series(rule["expr"]) for rule in rules))
    assert len(rules) == 26 and len(used) == 17 and used <= registered_series()


def test_each_alert_has_a_runbook() -> None:
    """In the manifests, in the chart, and of each service."""
    page = (ROOT / "docs/runbooks.md").read_text()
    found = {rule["alert"]: rule["annotations"]["runbook"] for rule in rules_of_service() if "alert" in rule}
    for path in ("manifests/components/monitoring/monitors.yaml", "manifests/chart/templates/monitors.yaml"):
        text = (ROOT / path).read_text()
        alerts, runbooks = re.findall(r"- alert: (\w+)", text), re.findall(r"runbook: (\S+)", text)
        assert len(alerts) == len(runbooks) == 5
        found |= dict(zip(alerts, runbooks, strict=True))
    assert {alert: f"docs/runbooks.md#{alert.lower()}" for alert in found} == found
    assert set(re.findall(r"^## (\w+)$", page, re.MULTILINE)) == set(found)


def test_pages_read_whole_logs_of_selected_pods() -> None:
    """With a selector `kubectl logs` prints the last 10 lines of each pod unless `--tail` says otherwise."""
    pages = [page.read_text() for page in (ROOT / "docs").glob("*.md")]
    calls = [call for page in pages for call in re.findall(r"kubectl(?: -n \S+)? logs -l [^`\n|]*", page)]
    assert len(calls) >= 2 and [call for call in calls if "--tail=" not in call] == []


def test_services_without_objectives_record_nothing() -> None:
    rules = monitoring.objects(SERVICE)[1]["spec"]["groups"][0]["rules"]
    assert [rule for rule in rules if "record" in rule] == [] and len(rules) == 7


@pytest.mark.parametrize(
    ("slo", "expected"),
    [
        ({"availability": 99.9}, {"availability": "0.001"}),
        ({"availability": 99.99, "ttftP95Ms": 500}, {"availability": "0.0001", "ttft": "0.05"}),
        ({"itlP95Ms": 60}, {"itl": "0.05"}),
    ],
)
def test_each_objective_has_its_budget(slo: dict[str, float], expected: dict[str, str]) -> None:
    rules = monitoring.objects(make_service(slo=slo))[1]["spec"]["groups"][0]["rules"]
    recorded = [rule for rule in rules if "record" in rule]
    assert {rule["labels"]["objective"]: rule["expr"].rpartition(" / ")[2] for rule in recorded} == expected
    assert len(recorded) == len(expected) * len(WINDOWS)
    assert {burn for burns in (FAST, SLOW) for rate in burns for burn in (rate.long, rate.short)} == set(WINDOWS)


def test_alerts_of_two_services_differ_in_their_labels() -> None:
    """Alertmanager identifies an alert by its labels."""
    rules = [monitoring.objects(make_service())[1], monitoring.objects(make_service(name="other"))[1]]
    labels = [[rule["labels"] for rule in found["spec"]["groups"][0]["rules"]] for found in rules]
    assert all(a != b for a, b in zip(*labels, strict=True))
