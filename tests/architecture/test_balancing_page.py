"""docs/balancing.md agrees with the code: thresholds, actions, metrics, reasons, policies."""

import pathlib
import re
from typing import get_args

import pytest
from prometheus_client import CollectorRegistry

from phalanx_api.summary import Routing
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_router.balancing.hotspots import LOAD_CAUSES, RULES
from phalanx_router.balancing.records import HotspotAction, RefusalCode, Rung
from phalanx_router.links.connection import LinkSettings
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.view import SUSPECT_AFTER_S
from phalanx_router.session import FleetSettings

PAGE = pathlib.Path(__file__).parents[2] / "docs" / "balancing.md"
SIGNALS = {
    "kv": "pages used, reserved or needed by waiting requests / all pages; 1 after a preemption in the last second",
    "prefill": "seconds until the prompt of a new request starts / `ttft_target_s`",
    "decode": "seconds between tokens / `itl_target_s`",
    "prefix": "share of the prompt tokens that belong to the most used prefix, if "
    f"{', '.join(f'`{cause}`' for cause in LOAD_CAUSES[:-1])} or `{LOAD_CAUSES[-1]}` reaches its *low*",
    "straggler": "step time / usual step time of groups of its shape (lower median: of two groups, the faster one)",
    "full": "seconds for two copies of a mean request / seconds until the page pool is exhausted",
}
BETWEEN = re.compile(r"(<!-- causes: .*? -->\n).*?(<!-- /causes -->)", re.S)


def causes() -> str:
    rows = ["| cause | signal | high | low | distance |", "|---|---|---|---|---|"]
    for cause, rule in RULES.items():
        rows.append(f"| `{cause}` | {SIGNALS[cause]} | {rule.high:g} | {rule.low:g} | {rule.delta or '–'} |")
    return "\n".join(rows) + "\n"


def test_the_table_of_causes_is_the_generated_one(request: pytest.FixtureRequest) -> None:
    text = PAGE.read_text()
    made = BETWEEN.sub(lambda found: found[1] + causes() + found[2], text)
    if request.config.getoption("--golden-update", default=False):
        PAGE.write_text(made)
    assert PAGE.read_text() == made, "run `make golden`"


def test_page_names_every_action_and_reason() -> None:
    named = set(re.findall(r"`(\w+)`", PAGE.read_text()))
    assert {*get_args(HotspotAction), *get_args(RefusalCode), *get_args(Rung), "router"} <= named


def test_named_metrics_exist() -> None:
    registry = CollectorRegistry()
    RouterMetrics(registry)
    known = {sample for metric in registry.collect() for sample in (metric.name, f"{metric.name}_total")}
    named = set(re.findall(r"`(phalanx_router_\w+)", PAGE.read_text())) - {"phalanx_router"}
    assert named and named <= known


def test_page_names_routing_policies_and_the_silence_bound() -> None:
    text = " ".join(PAGE.read_text().split())
    assert [policy for policy in get_args(Routing) if f"| `{policy}` |" not in text] == []
    assert f"without a load report for {SUSPECT_AFTER_S:g} s gets no new request" in text


def test_page_states_the_longest_silence_of_a_stream() -> None:
    keep_alive_s = FleetSettings(link=LinkSettings(token=ServiceToken(["token"]), router="router-0")).keep_alive_s
    text = " ".join((PAGE.parent / "installation.md").read_text().split())
    assert f"Streams send a comment when nothing else was sent for {keep_alive_s:g} to {2 * keep_alive_s:g} s" in text
