"""Where the rate of requests is going: Holt's double smoothing, one step for each evaluation of 15 s.

A sudden step fills the window of 60 s within four evaluations, and so looks like growth for as long; growth counts from the sixth
evaluation in a row that saw more, and not in the first minutes. Less than a tenth over the horizon is noise. More than doubling
is never believed.
"""

from dataclasses import dataclass

LEVEL_SHARE, TREND_SHARE = 0.5, 0.3
RISING = 6
YOUNG = 20
"""Evaluations before a trend is believed."""
NOISE = 0.1
MOST = 2.0
FEWEST_ARRIVALS = 20
"""A minute with fewer says nothing of a trend."""


@dataclass(frozen=True, slots=True)
class Trend:
    """Level and slope of the rate, per evaluation. `rising`: evaluations in a row that each saw more than the one before."""

    level: float | None = None
    slope: float = 0.0
    latest: float = 0.0
    rising: int = 0
    seen: int = 0


def followed(trend: Trend, rate: float) -> Trend:
    """The trend after one more evaluation."""
    if trend.level is None:
        return Trend(rate, 0.0, rate, 0, 1)
    level = LEVEL_SHARE * rate + (1 - LEVEL_SHARE) * (trend.level + trend.slope)
    slope = TREND_SHARE * (level - trend.level) + (1 - TREND_SHARE) * trend.slope
    return Trend(level, slope, rate, trend.rising + 1 if rate > trend.latest else 0, trend.seen + 1)


def growth(trend: Trend, steps: float, arrivals: int) -> float:
    """How many times the present rate is expected after so many evaluations: from 1 to 2."""
    if min(trend.seen - YOUNG, trend.rising - RISING, arrivals - FEWEST_ARRIVALS) < 0 or trend.latest <= 0:
        return 1.0
    grows = 1 + trend.slope * steps / trend.latest
    return min(grows, MOST) if grows > 1 + NOISE else 1.0
