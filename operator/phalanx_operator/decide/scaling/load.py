"""Derives the load of a service, its trend, and the capacity of a group from router reports.

A step in the rate raises the arrivals of the last minute for one minute. Growth over a longer span therefore counts only if its
first and last part rose too, at least a minute apart, and beyond chance.
"""

import math
import statistics
from dataclasses import dataclass, replace

from phalanx_api.summary import Traffic
from phalanx_operator.decide.scaling.demand import STEP_TOKENS, GroupCapacity, OfferedLoad
from phalanx_operator.decide.state.fleet import Fleet, GroupLoadView, median_step_model

SHORT_S, MEDIUM_S, LONG_S = 6.0, 60.0, 300.0
"""Windows of a router's summary."""
SPREAD, PANIC_SPREAD = 2.0, 1.5
"""Four and three standard deviations of the square root of a Poisson count."""
_NO_TRAFFIC = Traffic(window_s=MEDIUM_S, arrivals=0, prompt=0.0, prompt_squared=0.0, missed=0.0, output=0.0)

SPANS_S = (90.0, 120.0, 150.0, 180.0)
"""Spans over which growth is measured."""
PART_SHARE = 0.4
"""Of proportional growth, for both parts of a span."""
CHANCE = 2.0
"""Least rise of a count's square root: three standard deviations of the difference of two."""
MAX_GAP_S = 45.0
"""A longer gap between evaluations resets the trend."""
SLACK_S = 1.0
"""Tolerance of timers."""
MAX_GROWTH = 2.0
MIN_ARRIVALS = 20
"""Per minute, for a trend."""


def fresh_loads(fleet: Fleet) -> list[GroupLoadView]:
    """Returns the groups with recent reports."""
    return [load for load in fleet.loads if load.is_fresh]


def group_capacity(fleet: Fleet, step_tokens: int | None) -> GroupCapacity | None:
    """Returns the capacity of the median group with measured steps."""
    groups = fresh_loads(fleet)
    step_model = median_step_model(groups)
    if step_model is None:
        return None
    speed = statistics.median(group.speed for group in groups)
    kv_tokens = int(statistics.median(group.kv_capacity for group in groups))
    request_tokens = int(statistics.median(group.request_tokens for group in groups))
    return GroupCapacity(step_model, speed, kv_tokens, step_tokens or STEP_TOKENS, request_tokens=request_tokens)


def current_load(fleet: Fleet, capacity: GroupCapacity, growth: float = 1.0) -> OfferedLoad:
    """Returns the last minute's load times `growth`; lengths are of five minutes."""
    medium = fleet.requests.windows.get(MEDIUM_S, _NO_TRAFFIC)
    return _load(fleet, capacity, medium.arrivals / MEDIUM_S, growth)


def arrivals_only(load: OfferedLoad) -> OfferedLoad:
    """Drops pages and queues, which change with the groups."""
    return replace(load, kv_tokens=0.0, backlog_s=0.0)


def burstiness(fleet: Fleet) -> float:
    """Returns the squared coefficient of variation of interarrival times."""
    return _shape(fleet).scv


def heaviest_load(fleet: Fleet, capacity: GroupCapacity) -> OfferedLoad:
    """Returns the load of the busiest minute that occurs by chance once in hours."""
    windows = fleet.requests.windows
    medium, long = windows.get(MEDIUM_S, _NO_TRAFFIC), windows.get(LONG_S, _NO_TRAFFIC)
    expected = max(medium.arrivals, long.arrivals * MEDIUM_S / LONG_S)
    spread = SPREAD * math.sqrt(max(_shape(fleet).scv, 1.0))
    load = _load(fleet, capacity, (math.sqrt(expected) + spread) ** 2 / MEDIUM_S if expected else 0.0, 1.0)
    streams = sum(group.running for group in fresh_loads(fleet))
    return replace(load, kv_tokens=load.kv_tokens * (1 + SPREAD / math.sqrt(max(streams, 1))))


def panic_load(fleet: Fleet, capacity: GroupCapacity) -> OfferedLoad | None:
    """Returns the short window's load at the lowest rate that explains it."""
    short = fleet.requests.windows.get(SHORT_S)
    if short is None:
        return None
    spread = PANIC_SPREAD * math.sqrt(max(_shape(fleet).scv, 1.0))
    certain = max(math.sqrt(short.arrivals) - spread, 0.0) ** 2
    return _load(fleet, capacity, certain / SHORT_S, 1.0)


def _load(fleet: Fleet, capacity: GroupCapacity, rate: float, growth: float) -> OfferedLoad:
    groups, queued_tokens = fresh_loads(fleet), fleet.requests.queued_tokens
    used_tokens = sum(group.pressure * group.kv_capacity for group in groups)
    backlog_s = queued_tokens * capacity.token_s + sum(group.backlog_s for group in groups)
    return OfferedLoad(rate * growth, _shape(fleet), used_tokens * growth + queued_tokens, backlog_s)


def _shape(fleet: Fleet) -> Traffic:
    """Returns the means of the longest window with arrivals."""
    windows = (fleet.requests.windows.get(window_s, _NO_TRAFFIC) for window_s in (LONG_S, MEDIUM_S, SHORT_S))
    return next((window for window in windows if window.arrivals), _NO_TRAFFIC)


@dataclass(frozen=True, slots=True)
class ArrivalTrend:
    """Arrivals per minute."""

    minutes: tuple[tuple[float, int], ...] = ()
    """Times and arrivals, the newest last."""
    since_s: float | None = None
    """First evaluation; arrivals count a window later."""
    evaluated_s: float = 0.0


def add_minute(trend: ArrivalTrend, now_s: float, arrivals: int) -> ArrivalTrend:
    """Returns the trend after an evaluation."""
    if trend.since_s is None or not 0 <= now_s - trend.evaluated_s <= MAX_GAP_S:
        return ArrivalTrend(since_s=now_s, evaluated_s=now_s)
    if now_s - trend.since_s < MEDIUM_S - SLACK_S:
        return ArrivalTrend(since_s=trend.since_s, evaluated_s=now_s)
    longest_s = SPANS_S[-1] + MAX_GAP_S
    kept = tuple(minute for minute in trend.minutes if now_s - minute[0] <= longest_s)
    return ArrivalTrend((*kept, (now_s, arrivals)), trend.since_s, now_s)


def expected_growth(trend: ArrivalTrend, horizon_s: float, scv: float) -> float:
    """Returns the rate's growth after `horizon_s`, from 1 to `MAX_GROWTH`."""
    arrivals = trend.minutes[-1][1] if trend.minutes else 0
    if arrivals < MIN_ARRIVALS:
        return 1.0
    chance = CHANCE * math.sqrt(max(scv, 1.0))
    more = max(_rise(trend, span_s, chance) * horizon_s / span_s for span_s in SPANS_S)
    return min(1 + more / arrivals, MAX_GROWTH)


def _rise(trend: ArrivalTrend, span_s: float, chance: float) -> float:
    """Returns the growth over the span; 0 if a step or chance may explain it."""
    part_s = (span_s - MEDIUM_S) / 2
    ages = (0.0, part_s, span_s - part_s, span_s)
    last, late, early, first = (_arrivals_before(trend, age_s) for age_s in ages)
    if first is None or last is None or late is None or early is None:
        return 0.0
    part_rise = PART_SHARE * (last - first) * part_s / span_s
    is_rise = math.sqrt(last) - math.sqrt(first) > chance
    return last - first if is_rise and min(last - late, early - first) >= part_rise else 0.0


def _arrivals_before(trend: ArrivalTrend, age_s: float) -> float | None:
    """Returns the arrivals of the minute that ended `age_s` ago, interpolated."""
    at_s = trend.evaluated_s - age_s
    later = trend.minutes[-1]
    for minute in reversed(trend.minutes):
        if minute[0] <= at_s:
            between_s = later[0] - minute[0]
            return minute[1] + (later[1] - minute[1]) * (at_s - minute[0]) / between_s if between_s else float(minute[1])
        later = minute
    return float(later[1]) if later[0] - at_s <= SLACK_S else None
