"""Rules that watch `spec.slo`: burn rates, and alerts over two windows each.

The error budget of an objective is the share of events that may be bad, for example 5 % of the first tokens later than
`ttftP95Ms`. Its burn rate is the share of bad events divided by the budget: at 1 the budget lasts exactly `PERIOD`. An alert
fires while the rate is high over a long window, which ignores short peaks, and over a short one, so that it ends soon after its
cause (Google's SRE workbook, "Alerting on SLOs").
"""

from collections.abc import Sequence
from dataclasses import dataclass

from phalanx_api.spec.observability import Slo
from phalanx_operator.render.objects import Object

PERIOD = "30 days"
LATENCY_BUDGET = 0.05
"""Share of the events above a 95th percentile."""
RECORD = "phalanx:objective_burn_rate:"
"""Prefix of the recorded burn rates; the window follows."""
EVENTS = "phalanx_router_objective_events_total"
WINDOWS = ("5m", "30m", "1h", "6h", "3d")


@dataclass(frozen=True, slots=True)
class Burn:
    """A burn rate that must hold over both windows."""

    rate: float
    long: str
    short: str


FAST = (Burn(14.4, "1h", "5m"), Burn(6, "6h", "30m"))
"""2 % of the budget in an hour, or 5 % in six."""
SLOW = (Burn(1, "3d", "6h"),)
"""10 % of the budget in three days. The usual rate of 3 over 1d and 2h implies it."""


def budgets(slo: Slo) -> dict[str, float]:
    """Returns the error budget of each objective, as a share of its events."""
    found = {"availability": None if slo.availability is None else round(1 - slo.availability / 100, 10)}
    found |= {
        "ttft": None if slo.ttft_p95_ms is None else LATENCY_BUDGET,
        "itl": None if slo.itl_p95_ms is None else LATENCY_BUDGET,
    }
    return {objective: budget for objective, budget in found.items() if budget is not None}


def recordings(slo: Slo, own_labels: str) -> list[Object]:
    """Returns the recording rules: one series per objective and window."""
    return [
        {
            "record": f"{RECORD}{window}",
            "expr": f"{_bad_share(objective, own_labels, window)} / {budget}",
            "labels": {"objective": objective},
        }
        for objective, budget in budgets(slo).items()
        for window in WINDOWS
    ]


def _bad_share(objective: str, own_labels: str, window: str) -> str:
    """The share of bad events; without events there is no result."""
    selector = f'{own_labels},objective="{objective}"'
    bad, every = (f"sum(rate({EVENTS}{{{found}}}[{window}]))" for found in (f'{selector},outcome="bad"', selector))
    return f"{bad} / ({every} > 0)"


def burn_expression(burns: Sequence[Burn], own_labels: str) -> str:
    """Returns the expression of the objectives that burn at one of the rates over both of its windows."""

    def exceeds(window: str, rate: float) -> str:
        return f"max by (objective) ({RECORD}{window}{{{own_labels}}}) > {rate:g}"

    return " or ".join(f"({exceeds(burn.long, burn.rate)} and {exceeds(burn.short, burn.rate)})" for burn in burns)
