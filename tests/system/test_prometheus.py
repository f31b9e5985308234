"""Debian's Prometheus scrapes a router, two groups and an operator: every expression of dashboards and rules gives data."""

import asyncio
import re
import time
from itertools import count
from pathlib import Path

import httpx
import msgspec
import pytest

from bench.frame.programs import Program
from bench.frame.prometheus import Prometheus
from phalanx_api.summary import BalancePolicy, LatencyObjectives
from tests.control.monitoring.registered import used_series
from tests.polling import LIMIT_S, during, until
from tests.prometheus import prometheus_folder, scraped
from tests.system.runtimes import metric_of
from tests.system.scraped_fleet import RULES, ExercisedOperator, fleet, rule_file, served_metrics, targets
from tools.dashboards.build import DASHBOARDS

pytestmark = pytest.mark.system

EMPTY = {
    "phalanx_device_power_watts": "no device with NVML",
    "phalanx_device_energy_joules_total": "no device with NVML",
    "phalanx_tenant_energy_joules_total": "no device with NVML",
    "phalanx_device_memory_used_bytes": "no device with NVML",
    "phalanx_device_throttled": "no device with NVML",
    "phalanx_cache_tier_hit_rate": "no host tier or disk",
    "phalanx_router_hotspot": "no group is overloaded",
    "phalanx_router_moves_total": "no request moves",
    "phalanx_router_move_stall_seconds_bucket": "no request moves",
    "phalanx_router_shed_total": "nothing is rejected",
    "phalanx_router_response_cache_rechecks_total": "no semantic cache",
    "phalanx_router_response_cache_embedder_failed": "no semantic cache",
    "phalanx_tls_certificate_not_after_timestamp_seconds": "no HTTPS",
    "phalanx_tls_certificate_not_before_timestamp_seconds": "no HTTPS",
    "phalanx_tls_certificate_reload_failed": "no HTTPS",
}
"""Series without samples in this fleet, with the reason."""
UNCHANGED = ("changes(phalanx_operator_desired_groups", 'outcome="failed"', 'outcome="refused"')
"""Parts of expressions whose filters match nothing here: no scaling during the test, no failed and no refused request."""
FLAGS = ("--speculative-method", "ngram", "--speculative-control", "fixed")
MET = BalancePolicy(objectives=LatencyObjectives(ttft_s=600.0, itl_s=600.0))
"""Targets that every token meets."""


def concrete(expression: str) -> str:
    """Replaces Grafana's variables."""
    return re.sub(r"\$(?:namespace|service|group)\b", ".*", expression.replace("$__rate_interval", "10s"))


def expressions() -> list[str]:
    """Returns every expression of the dashboards and the rules, once. Alerts without their comparisons: their series."""
    shown = [concrete(each) for spec in DASHBOARDS for each in spec.expressions()]
    recorded = [rule["expr"] for rule in RULES if "record" in rule]
    watched = sorted(set().union(*(used_series(rule["expr"]) for rule in RULES if "alert" in rule)))
    return list(dict.fromkeys([*shown, *recorded, *watched]))


def is_empty_here(expression: str) -> bool:
    """Whether this fleet has no data for it."""
    return bool(used_series(expression) & EMPTY.keys()) or any(part in expression for part in UNCHANGED)


async def send_requests(router: Program) -> None:
    """Sends prompts with a common prefix to the router, one after another, until it is cancelled."""
    async with httpx.AsyncClient(trust_env=False, timeout=60) as http:
        for number in count():
            prompt = "one two three four " * 40 + str(number)
            body = {"model": "tiny", "prompt": prompt, "max_tokens": 200, "temperature": 0, "ignore_eos": True}
            answer = await http.post(f"{router.base_url}/v1/completions", json=body)
            assert answer.status_code == 200, answer.text


def without_data(prometheus: Prometheus, among: list[str]) -> list[str]:
    return [expression for expression in among if not prometheus.samples(expression)]


async def test_every_expression_returns_data_and_no_alert_fires(tmp_path: Path, model: Path) -> None:
    """But the one on failed reconciles, which this test causes."""
    prometheus_folder()  # before the programs start: the test may be skipped
    operator, policy = ExercisedOperator(), tmp_path / "policy.json"
    policy.write_bytes(msgspec.json.encode(MET))
    await operator.start()
    with (
        served_metrics(operator) as port,
        fleet(tmp_path, model, [FLAGS, FLAGS], ["--policy-file", str(policy)]) as (groups, router),
        scraped(tmp_path, targets(groups, router, port), rule_file("1s")) as prometheus,
    ):
        await until(lambda: metric_of(router, "phalanx_router_groups_ready") == 2)
        expected = [expression for expression in expressions() if not is_empty_here(expression)]
        missing, end_s = expected, time.monotonic() + 2 * LIMIT_S
        async with during(send_requests(router)):  # the step time of a group without requests is 0
            while missing and time.monotonic() < end_s:
                await operator.exercise()
                missing = await asyncio.to_thread(without_data, prometheus, expected)
        assert missing == []
        excused = [expression for expression in expressions() if is_empty_here(expression)]
        assert [expression for expression in excused if prometheus.samples(expression)] == [], "excused without need"
        assert len(expected) > 3 * len(excused)
        assert prometheus.unhealthy_rules() == {}
        assert prometheus.firing() <= {"PhalanxReconcileErrors"}
