"""Summaries of routers, with defaults."""

from typing import Any

from phalanx_api.summary import GroupSummary, Histogram, RouterSummary
from phalanx_operator.decide.state.fleet import Fleet, RouterReport, merge
from tests.control.simulated_service import CAPACITY_PAGES, MODEL, PAGE, SHAPE, replace_window

COEFFICIENTS = [MODEL.fixed_s, MODEL.token_s, float(MODEL.knee_tokens), MODEL.context_s, MODEL.attention_s]


def group(name: str = "a", **fields: Any) -> GroupSummary:
    defaults: dict[str, Any] = {
        "group": name, "revision": "r", "state": "fresh", "draining": False, "streams": 4, "running": 4, "waiting": 0,
        "pressure": 0.2, "backlog_s": 0.0, "itl_s": 0.03, "speed": 1.0, "live_tokens": 0, "total_pages": CAPACITY_PAGES,
        "page_size": PAGE, "step_model": COEFFICIENTS,
    }  # fmt: skip
    return GroupSummary(**defaults | fields)


def summary(*groups: GroupSummary, rate: float = 0.0, **fields: Any) -> RouterSummary:
    windows = [replace_window(SHAPE, window_s, round(rate * window_s)) for window_s in (6.0, 60.0, 300.0)]
    defaults: dict[str, Any] = {
        "router": "r", "groups": list(groups), "traffic": windows, "queued": 0, "queued_tokens": 0, "held": 0,
        "idle_s": 0.0 if rate else 1000.0, "ttft": Histogram(), "itl": Histogram(),
    }  # fmt: skip
    return RouterSummary(**defaults | fields)


def fleet_of(*summaries: RouterSummary, polled: int | None = None) -> Fleet:
    """Returns the fleet that routers with these summaries make."""
    reports = [RouterReport(f"r{i}", 0.0, summary) for i, summary in enumerate(summaries)]
    return merge(reports, len(reports) if polled is None else polled, 45.0)
