"""Derives the load of a service and the capacity of one of its groups from router reports."""

import math
import statistics
from dataclasses import dataclass, replace

from phalanx_api.summary import Traffic
from phalanx_operator.decide.scaling.demand import ROOM, GroupCapacity, OfferedLoad
from phalanx_operator.decide.state.fleet import Fleet, GroupLoadView, middle_model

SHORT_S, USUAL_S, LONG_S = 6.0, 60.0, 300.0
"""Windows of a router's summary."""
SPREAD, PANIC_SPREAD = 2.0, 1.5
"""The square root of a count has a standard deviation of one half: these are four and three of them."""
_NOTHING = Traffic(window_s=USUAL_S, arrivals=0, prompt=0.0, prompt_squared=0.0, missed=0.0, output=0.0)


def fresh(fleet: Fleet) -> list[GroupLoadView]:
    """Returns the groups with recent reports."""
    return [group for group in fleet.groups.values() if group.fresh]


def ability_of(fleet: Fleet, room: int | None) -> GroupCapacity | None:
    """Returns the capacity of the median group; None while no group has measured its steps."""
    groups = fresh(fleet)
    model = middle_model(groups)
    if model is None:
        return None
    speed = statistics.median(group.speed for group in groups)
    return GroupCapacity(model, speed, int(statistics.median(group.capacity for group in groups)), room or ROOM)


def load_of(fleet: Fleet, ability: GroupCapacity, grows: float = 1.0) -> OfferedLoad:
    """Returns the load of the last minute, times `grows`. Means are of five minutes."""
    usual = fleet.traffic.get(USUAL_S, _NOTHING)
    return _load(fleet, ability, usual.arrivals / USUAL_S, grows)


def arrivals_alone(load: OfferedLoad) -> OfferedLoad:
    """Returns the part of a load that depends on arrivals only; pages and queues change with the groups."""
    return replace(load, kv_tokens=0.0, backlog_s=0.0)


def burstiness_of(fleet: Fleet) -> float:
    """Returns the squared coefficient of variation of the times between arrivals; 1 for a Poisson process."""
    return _shape(fleet).scv


def heaviest_load_of(fleet: Fleet, ability: GroupCapacity) -> OfferedLoad:
    """Returns the heaviest minute that a load like that of the last five minutes brings by chance, once in hours."""
    usual, long = fleet.traffic.get(USUAL_S, _NOTHING), fleet.traffic.get(LONG_S, _NOTHING)
    expected = max(usual.arrivals, long.arrivals * USUAL_S / LONG_S)
    spread = SPREAD * math.sqrt(max(_shape(fleet).scv, 1.0))
    load = _load(fleet, ability, (math.sqrt(expected) + spread) ** 2 / USUAL_S if expected else 0.0, 1.0)
    streams = sum(group.running for group in fresh(fleet))
    return replace(load, kv_tokens=load.kv_tokens * (1 + SPREAD / math.sqrt(max(streams, 1))))


def panic_load_of(fleet: Fleet, ability: GroupCapacity) -> OfferedLoad | None:
    """Returns the load of the last seconds at the lowest rate that explains their arrivals; None without that window."""
    short = fleet.traffic.get(SHORT_S)
    if short is None:
        return None
    spread = PANIC_SPREAD * math.sqrt(max(_shape(fleet).scv, 1.0))
    certain = max(math.sqrt(short.arrivals) - spread, 0.0) ** 2
    return _load(fleet, ability, certain / SHORT_S, 1.0)


def _load(fleet: Fleet, ability: GroupCapacity, rate: float, grows: float) -> OfferedLoad:
    shape = _shape(fleet)
    in_pages = sum(group.pressure * group.capacity for group in fresh(fleet))
    waiting_s = fleet.queued_tokens * ability.token_s + sum(group.backlog_s for group in fresh(fleet))
    return OfferedLoad(rate * grows, shape, in_pages * grows + fleet.queued_tokens, waiting_s)


def _shape(fleet: Fleet) -> Traffic:
    """Returns the means of the longest window with arrivals."""
    windows = (fleet.traffic.get(window_s, _NOTHING) for window_s in (LONG_S, USUAL_S, SHORT_S))
    return next((window for window in windows if window.arrivals), _NOTHING)


# Trend of the request rate: whether it has risen all along, and its expected value when a new group serves.
# Each evaluation records the arrivals of the last minute. After a step they rise for one minute, until the window is full. So
# growth
# counts over a longer span only if its first and last minutes rose as well, each by a good part of its share, at least a minute
# apart:
# no step does that. A rise that may be chance is no growth. More than doubling is not expected.

WINDOW_S = 60.0
"""Window of the recorded arrivals."""
SPANS_S = (90.0, 120.0, 150.0, 180.0)
"""Span over which growth is measured."""
PART_SHARE = 0.4
CHANCE = 2.0
"""Square roots of counts have a standard deviation of one half, their difference one of 0.7; this is three times that."""
GAP_S = 45.0
"""A longer pause without an evaluation resets the trend."""
SLACK_S = 1.0
"""Tolerance of timers."""
MOST = 2.0
FEWEST_ARRIVALS = 20
"""Fewer arrivals in a minute give no trend."""


@dataclass(frozen=True, slots=True)
class ArrivalTrend:
    """Arrivals per minute at these times, the newest last."""

    minutes: tuple[tuple[float, int], ...] = ()
    since_s: float | None = None
    """Start of the trend; earlier arrivals may be incomplete."""
    noted_s: float = 0.0
    """The latest evaluation."""


def followed(trend: ArrivalTrend, now_s: float, arrivals: int) -> ArrivalTrend:
    """Returns the trend after one more evaluation."""
    if trend.since_s is None or not 0 <= now_s - trend.noted_s <= GAP_S:
        return ArrivalTrend(since_s=now_s, noted_s=now_s)
    if now_s - trend.since_s < WINDOW_S - SLACK_S:
        return ArrivalTrend(since_s=trend.since_s, noted_s=now_s)
    longest_s = SPANS_S[-1] + GAP_S
    kept = tuple(minute for minute in trend.minutes if now_s - minute[0] <= longest_s)
    return ArrivalTrend((*kept, (now_s, arrivals)), trend.since_s, now_s)


def growth(trend: ArrivalTrend, horizon_s: float, scv: float) -> float:
    """Returns the expected growth factor of the rate after `horizon_s`, from 1 to 2. `scv`: burstiness of arrivals."""
    arrivals = trend.minutes[-1][1] if trend.minutes else 0
    if arrivals < FEWEST_ARRIVALS:
        return 1.0
    chance = CHANCE * math.sqrt(max(scv, 1.0))
    more = max(_rise(trend, span_s, chance) * horizon_s / span_s for span_s in SPANS_S)
    return min(1 + more / arrivals, MOST)


def _rise(trend: ArrivalTrend, span_s: float, chance: float) -> float:
    """Returns by how much a minute's arrivals rose all along this span; 0 if they did not, or perhaps by chance."""
    part_s = (span_s - WINDOW_S) / 2
    ages = (0.0, part_s, span_s - part_s, span_s)
    now, late, early, then = (_before(trend, age_s) for age_s in ages)
    if then is None or now is None or late is None or early is None:
        return 0.0
    least = PART_SHARE * (now - then) * part_s / span_s
    is_more = math.sqrt(now) - math.sqrt(then) > chance
    return now - then if is_more and min(now - late, early - then) >= least else 0.0


def _before(trend: ArrivalTrend, age_s: float) -> float | None:
    """Returns a minute's arrivals `age_s` before the latest evaluation, interpolated; None before the first record."""
    at_s = trend.noted_s - age_s
    later = trend.minutes[-1]
    for minute in reversed(trend.minutes):
        if minute[0] <= at_s:
            between_s = later[0] - minute[0]
            return minute[1] + (later[1] - minute[1]) * (at_s - minute[0]) / between_s if between_s else float(minute[1])
        later = minute
    return float(later[1]) if later[0] - at_s <= SLACK_S else None
