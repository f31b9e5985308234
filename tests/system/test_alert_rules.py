"""Debian's promtool evaluates the rules over minutes to a day: each alert fires by its cause, and none in a healthy fleet."""

import re
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.prometheus import prometheus_folder
from tests.system.scraped_fleet import ALERTS, rule_file

pytestmark = pytest.mark.system

OWN = 'namespace="team",phalanx_dev_service="chat"'
DAY = 25 * 60
"""In samples, one per minute."""
EVENTS = "phalanx_router_objective_events_total"
RECHECKS = "phalanx_router_response_cache_rechecks_total"
WANTED = 'phalanx_service_spec_replicas{namespace="team",service="chat"}'
ERRORS_DENIED = 'phalanx_operator_reconcile_errors_total{error="Denied"}'
ERRORS_TIMEOUT = 'phalanx_operator_reconcile_errors_total{error="TimeoutError"}'
EVERY_FOUR_MINUTES = " ".join(f"{number}+0x3" for number in range(30))
"""Reconciles of one service that do not end: `RECONCILE_TIMEOUT_S`, then a minute of `backoff`."""


def of_service(name: str, labels: str = "") -> str:
    return f"{name}{{{OWN}{labels and ','}{labels}}}"


def events(objective: str, outcome: str) -> str:
    return of_service(EVENTS, f'objective="{objective}",outcome="{outcome}"')


HEALTHY: Mapping[str, str] = {
    of_service("phalanx_router_groups_known"): "2",
    of_service("phalanx_router_groups_ready"): "2",
    of_service("phalanx_router_fleet_saturated"): "0",
    of_service("phalanx_router_shed_total", 'why="queue_full"'): "0",
    of_service("phalanx_router_shed_total", 'why="quota_tokens_per_day"'): "0+60",
    of_service("phalanx_speculation_lost"): "0",
    of_service(RECHECKS, 'outcome="agreed"'): "0+1",
    of_service(RECHECKS, 'outcome="disagreed"'): "0",
    of_service("phalanx_router_response_cache_embedder_failed"): "0",
    of_service("phalanx_tls_certificate_not_before_timestamp_seconds"): "0",
    of_service("phalanx_tls_certificate_not_after_timestamp_seconds"): "1000000",
    of_service("phalanx_tls_certificate_reload_failed"): "0",
    **{events(objective, "good"): "0+10000" for objective in ("availability", "ttft", "itl")},
    **{events(objective, "bad"): "0" for objective in ("availability", "ttft", "itl")},
    'phalanx_operator_is_leader{pod="a"}': "1",
    'phalanx_operator_is_leader{pod="b"}': "0",
    ERRORS_DENIED: "0",
    'phalanx_operator_reconcile_errors_total{error="Conflict"}': "0+60",
    "phalanx_operator_queue_keys": "3",
    WANTED: "2",
    'phalanx_service_partitioned{namespace="team",service="chat"}': "0",
    'phalanx_service_disruptions_held{namespace="team",service="chat"}': "0",
}
"""A series, and its value or slope per minute."""


@dataclass(frozen=True, slots=True)
class Cause:
    """Series of a fault from its first minute; an empty value removes a series. `labels`: of the alert, beside the severity."""

    alert: str
    series: Mapping[str, str]
    fires_at: str
    silent_at: str
    labels: Mapping[str, str]


def cause(alert: str, series: Mapping[str, str], fires_at: str = "12m", silent_at: str = "5m", **labels: str) -> Cause:
    return Cause(alert, series, fires_at, silent_at, labels)


CAUSES = (
    cause("PhalanxNoReadyGroup", {of_service("phalanx_router_groups_ready"): "0", WANTED: ""}),
    cause("PhalanxNoReadyGroup", {of_service(f"phalanx_router_groups_{state}"): "0" for state in ("known", "ready")}),
    cause("PhalanxNoRouter", {of_service("phalanx_router_groups_known"): ""}),
    cause("PhalanxFleetSaturated", {of_service("phalanx_router_fleet_saturated"): "1"}),
    cause("PhalanxShedding", {of_service("phalanx_router_shed_total", 'why="queue_full"'): "0+3"}),
    cause("PhalanxSpeculationLost", {of_service("phalanx_speculation_lost"): "1"}),
    cause("PhalanxSemanticCacheDisagrees", {of_service(RECHECKS, 'outcome="disagreed"'): "0+1"}, "20m"),
    cause("PhalanxEmbedderFailed", {of_service("phalanx_router_response_cache_embedder_failed"): "1"}),
    cause("PhalanxCertificateExpiresSoon", {of_service("phalanx_tls_certificate_not_after_timestamp_seconds"): "300"}, "20m"),
    cause("PhalanxCertificateUnusable", {of_service("phalanx_tls_certificate_reload_failed"): "1"}),
    cause("PhalanxNoLeader", {'phalanx_operator_is_leader{pod="a"}': "0"}, "3m", "1m"),
    cause("PhalanxReconcileErrors", {ERRORS_DENIED: "0+1"}, "20m", error="Denied"),
    cause("PhalanxReconcileErrors", {ERRORS_TIMEOUT: EVERY_FOUR_MINUTES}, "40m", "5m", error="TimeoutError"),
    cause("PhalanxReconcileBacklog", {"phalanx_operator_queue_keys": "21"}),
    cause(
        "PhalanxControlPlanePartitioned",
        {'phalanx_service_partitioned{namespace="team",service="chat"}': "1"},
        *("4m", "1m"),
        namespace="team",
        service="chat",
    ),
    cause(
        "PhalanxDisruptionsHeld",
        {'phalanx_service_disruptions_held{namespace="team",service="chat"}': "1"},
        namespace="team",
        service="chat",
    ),
    *(
        cause("PhalanxErrorBudgetBurnsFast", {events(objective, "bad"): f"0+{bad}"}, "10m", "1m", objective=objective)
        for objective, bad in (("availability", 200), ("ttft", 30_000), ("itl", 30_000))
    ),
    *(
        cause("PhalanxErrorBudgetBurnsSlowly", {events(objective, "bad"): f"0+{bad}"}, "80m", "30m", objective=objective)
        for objective, bad in (("availability", 15), ("ttft", 700), ("itl", 700))
    ),
)


def constant(value: str, count: int) -> str:
    """Series notation of promtool: values as they are, a constant, a slope, or nothing."""
    if "x" in value:
        return value
    return f"{value}x{count}" if "+" in value else f"{value}+0x{count}" if value else f"_x{count}"


def expectation(alert: str, at: str, labels: Mapping[str, str] | None) -> dict[str, Any]:
    """The alert fires at that time with these labels, or not at all."""
    test: dict[str, Any] = {"eval_time": at, "alertname": alert, "exp_alerts": []}
    if labels is not None:
        rule = ALERTS[alert]
        texts = {
            name: re.sub(r"{{ \$labels\.(\w+) }}", lambda found: labels.get(found[1], ""), text)
            for name, text in rule["annotations"].items()
        }
        test["exp_alerts"] = [{"exp_labels": {**rule["labels"], **labels}, "exp_annotations": texts}]
    return test


def promtool(folder: Path, series: Mapping[str, str], expectations: list[dict[str, Any]]) -> None:
    """Evaluates the rules each minute; fails with promtool's report."""
    (folder / "rules.yaml").write_text(yaml.safe_dump(rule_file()))
    inputs = [{"series": name, "values": values} for name, values in series.items()]
    test = {"interval": "1m", "input_series": inputs, "alert_rule_test": expectations}
    document = {"rule_files": ["rules.yaml"], "evaluation_interval": "1m", "tests": [test]}
    (folder / "test.yaml").write_text(yaml.safe_dump(document))
    command = [str(prometheus_folder() / "promtool"), "test", "rules", "test.yaml"]
    run = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stdout + run.stderr


def test_each_alert_has_a_cause() -> None:
    assert {each.alert for each in CAUSES} == set(ALERTS)


@pytest.mark.parametrize("each", CAUSES, ids=lambda each: "-".join([each.alert, *each.labels.values()]))
def test_alert_fires_by_its_cause_and_later(each: Cause, tmp_path: Path) -> None:
    series = {name: constant(value, 120) for name, value in {**HEALTHY, **each.series}.items()}
    expected = [expectation(each.alert, each.silent_at, None), expectation(each.alert, each.fires_at, each.labels)]
    promtool(tmp_path, series, expected)


def test_service_without_wanted_groups_fires_nothing(tmp_path: Path) -> None:
    none = {WANTED: "0"} | {of_service(f"phalanx_router_groups_{state}"): "0" for state in ("known", "ready")}
    series = {name: constant(value, 40) for name, value in {**HEALTHY, **none}.items()}
    promtool(tmp_path, series, [expectation(alert, "30m", None) for alert in ALERTS])


def test_healthy_fleet_fires_no_alert(tmp_path: Path) -> None:
    """A day in which 0.05 % of the requests fail, half the budget of 99.9 %, and 2.5 % of the tokens are late."""
    bad = {events("availability", "bad"): "0+5", events("ttft", "bad"): "0+250", events("itl", "bad"): "0+250"}
    series = {name: constant(value, DAY) for name, value in {**HEALTHY, **bad}.items()}
    promtool(tmp_path, series, [expectation(alert, at, None) for alert in ALERTS for at in ("5m", "20m", "7h", "24h")])


def test_short_peak_burns_fast_within_the_hour(tmp_path: Path) -> None:
    """6 % of the requests fail for half an hour after six without errors: 30 times the budget, 2.4 times over six hours."""
    bad = events("availability", "bad")
    series = {name: constant(value, 400) for name, value in HEALTHY.items()} | {bad: "0+0x360 638+638x30"}
    alert, labels = "PhalanxErrorBudgetBurnsFast", {"objective": "availability"}
    promtool(tmp_path, series, [expectation(alert, "370m", None), expectation(alert, "390m", labels)])


def test_burst_of_failed_reconciles_fires_nothing(tmp_path: Path) -> None:
    """An API server that is away for two minutes fails the reconciles of 100 services."""
    series = {name: constant(value, 40) for name, value in HEALTHY.items()} | {ERRORS_DENIED: "0+0x10 100+100x2 300+0x27"}
    promtool(tmp_path, series, [expectation("PhalanxReconcileErrors", f"{at}m", None) for at in range(10, 40)])


def test_fast_burn_ends_after_an_outage(tmp_path: Path) -> None:
    """Two hours without errors, ten minutes of errors only, then none: the alert ends with the window of 30 minutes."""
    good, bad = events("availability", "good"), events("availability", "bad")
    series = {name: constant(value, 260) for name, value in HEALTHY.items()}
    series |= {good: "0+60x120 7200+0x10 7200+60x120", bad: "0+0x120 60+60x9 600+0x120"}
    alert, labels = "PhalanxErrorBudgetBurnsFast", {"objective": "availability"}
    times = {"119m": None, "128m": labels, "145m": labels, "165m": None}
    promtool(tmp_path, series, [expectation(alert, at, found) for at, found in times.items()])
