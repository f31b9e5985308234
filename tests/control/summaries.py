"""Summaries as routers would give them: defaults, plus what the case is about."""

from typing import Any

from phalanx_api.summary import GroupSummary, Histogram, RouterSummary
from phalanx_operator.decide.state.fleet import Fleet, RouterAnswer, merge
from tests.control.simulated_service import CAPACITY_PAGES, MODEL, PAGE, SHAPE, replace_window

NUMBERS = [MODEL.fixed_s, MODEL.token_s, float(MODEL.knee_tokens), MODEL.context_s, MODEL.attention_s]


def group(name: str = "a", **fields: Any) -> GroupSummary:
    defaults: dict[str, Any] = {
        "group": name, "revision": "r", "state": "fresh", "draining": False, "streams": 4, "running": 4, "waiting": 0,
        "pressure": 0.2, "backlog_s": 0.0, "itl_s": 0.03, "speed": 1.0, "live_tokens": 0, "total_pages": CAPACITY_PAGES,
        "page_size": PAGE, "step_model": NUMBERS,
    }  # fmt: skip
    return GroupSummary(**defaults | fields)


def summary(*groups: GroupSummary, rate: float = 0.0, **fields: Any) -> RouterSummary:
    windows = [replace_window(SHAPE, window_s, round(rate * window_s)) for window_s in (6.0, 60.0, 300.0)]
    defaults: dict[str, Any] = {
        "router": "r", "groups": list(groups), "traffic": windows, "queued": 0, "queued_tokens": 0, "held": 0,
        "idle_s": 0.0 if rate else 1000.0, "ttft": Histogram(), "itl": Histogram(),
    }  # fmt: skip
    return RouterSummary(**defaults | fields)


def fleet_of(*summaries: RouterSummary, asked: int | None = None) -> Fleet:
    """What routers that say this make together."""
    heard = [RouterAnswer(f"r{i}", 0.0, one) for i, one in enumerate(summaries)]
    return merge(heard, len(heard) if asked is None else asked, 45.0)
