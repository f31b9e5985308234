"""From what the routers say to the load of a service and the ability of one of its groups."""

import math
import statistics
from dataclasses import dataclass, replace

from phalanx_api.summary import Traffic
from phalanx_operator.decide.scaling.demand import ROOM, GroupCapacity, OfferedLoad
from phalanx_operator.decide.state.fleet import Fleet, GroupLoadView, middle_model

SHORT_S, USUAL_S, LONG_S = 6.0, 60.0, 300.0
"""The windows of a router's summary."""
SPREAD, PANIC_SPREAD = 2.0, 1.5
"""Square roots of counts vary by a half, whatever the count: these are four and three standard deviations of it."""
_NOTHING = Traffic(USUAL_S, 0, prompt=0.0, prompt_squared=0.0, missed=0.0, output=0.0)


def fresh(fleet: Fleet) -> list[GroupLoadView]:
    """The groups whose numbers may be believed."""
    return [group for group in fleet.groups.values() if group.fresh]


def ability_of(fleet: Fleet, room: int | None) -> GroupCapacity | None:
    """What one group can do: the middle of all. None while no group has measured its steps."""
    groups = fresh(fleet)
    model = middle_model(groups)
    if model is None:
        return None
    speed = statistics.median(group.speed for group in groups)
    return GroupCapacity(model, speed, int(statistics.median(group.capacity for group in groups)), room or ROOM)


def load_of(fleet: Fleet, ability: GroupCapacity, grows: float = 1.0) -> OfferedLoad:
    """The load of the last minute, or what it becomes when it grows so many times. Means are of five minutes."""
    usual = fleet.traffic.get(USUAL_S, _NOTHING)
    return _load(fleet, ability, usual.arrivals / USUAL_S, grows)


def arrivals_alone(load: OfferedLoad) -> OfferedLoad:
    """What of a load follows from arrivals: not pages and queues, which change with the groups."""
    return replace(load, kv_tokens=0.0, backlog_s=0.0)


def burstiness_of(fleet: Fleet) -> float:
    """How bursty arrivals are: the squared coefficient of variation of the times between them, 1 as by chance."""
    return _shape(fleet).scv


def heaviest_load_of(fleet: Fleet, ability: GroupCapacity) -> OfferedLoad:
    """The heaviest minute that a load like that of the last five minutes brings by chance, once in hours."""
    usual, long = fleet.traffic.get(USUAL_S, _NOTHING), fleet.traffic.get(LONG_S, _NOTHING)
    expected = max(usual.arrivals, long.arrivals * USUAL_S / LONG_S)
    spread = SPREAD * math.sqrt(max(_shape(fleet).scv, 1.0))
    load = _load(fleet, ability, (math.sqrt(expected) + spread) ** 2 / USUAL_S if expected else 0.0, 1.0)
    streams = sum(group.running for group in fresh(fleet))
    return replace(load, kv_tokens=load.kv_tokens * (1 + SPREAD / math.sqrt(max(streams, 1))))


def panic_load_of(fleet: Fleet, ability: GroupCapacity) -> OfferedLoad | None:
    """The load of the last seconds, by the lowest rate that explains their arrivals; None without that window."""
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
    """Means of the longest window in which anything came."""
    windows = (fleet.traffic.get(window_s, _NOTHING) for window_s in (LONG_S, USUAL_S, SHORT_S))
    return next((window for window in windows if window.arrivals), _NOTHING)


# Where the rate of requests is going: whether it has risen all along, and what it comes to by the time that a group serves.
# A minute's arrivals are noted at each evaluation. After a step they rise for one minute, which is how long their window
# takes to fill. So growth is believed of a span longer than that when its first part and its last one rose as well, each by a
# good part of its share, where these lie a minute apart: no step does that. What may be chance is no growth. More than
# doubling is not believed.

WINDOW_S = 60.0
"""Arrivals are those of the last minute."""
SPANS_S = (90.0, 120.0, 150.0, 180.0)
"""Over how long growth is looked for."""
PART_SHARE = 0.4
CHANCE = 2.0
"""Square roots of counts vary by a half, whatever the count: the difference of two by 0.7, and this is three times that."""
GAP_S = 45.0
"""After a longer time without an evaluation all begins anew."""
SLACK_S = 1.0
"""Evaluations come by timers."""
MOST = 2.0
FEWEST_ARRIVALS = 20
"""A minute with fewer says nothing of a trend."""


@dataclass(frozen=True, slots=True)
class ArrivalTrend:
    """The arrivals of the minutes that ended at these times, the newest last. since_s: when it began, before which perhaps nobody
    counted; noted_s: the latest evaluation."""

    minutes: tuple[tuple[float, int], ...] = ()
    since_s: float | None = None
    noted_s: float = 0.0


def followed(trend: ArrivalTrend, now_s: float, arrivals: int) -> ArrivalTrend:
    """The trend after one more evaluation, with the arrivals of the last minute."""
    if trend.since_s is None or not 0 <= now_s - trend.noted_s <= GAP_S:
        return ArrivalTrend(since_s=now_s, noted_s=now_s)
    if now_s - trend.since_s < WINDOW_S - SLACK_S:
        return ArrivalTrend(since_s=trend.since_s, noted_s=now_s)
    longest_s = SPANS_S[-1] + GAP_S
    kept = tuple(minute for minute in trend.minutes if now_s - minute[0] <= longest_s)
    return ArrivalTrend((*kept, (now_s, arrivals)), trend.since_s, now_s)


def growth(trend: ArrivalTrend, horizon_s: float, scv: float) -> float:
    """How many times the present rate is expected after so long: from 1 to 2. `scv`: how bursty arrivals are, 1 as by chance."""
    arrivals = trend.minutes[-1][1] if trend.minutes else 0
    if arrivals < FEWEST_ARRIVALS:
        return 1.0
    chance = CHANCE * math.sqrt(max(scv, 1.0))
    more = max(_rise(trend, span_s, chance) * horizon_s / span_s for span_s in SPANS_S)
    return min(1 + more / arrivals, MOST)


def _rise(trend: ArrivalTrend, span_s: float, chance: float) -> float:
    """By how much a minute's arrivals rose over this span all along; 0 when they did not, or perhaps by chance."""
    part_s = (span_s - WINDOW_S) / 2
    ages = (0.0, part_s, span_s - part_s, span_s)
    now, late, early, then = (_before(trend, age_s) for age_s in ages)
    if then is None or now is None or late is None or early is None:
        return 0.0
    least = PART_SHARE * (now - then) * part_s / span_s
    is_more = math.sqrt(now) - math.sqrt(then) > chance
    return now - then if is_more and min(now - late, early - then) >= least else 0.0


def _before(trend: ArrivalTrend, age_s: float) -> float | None:
    """A minute's arrivals so long before the latest evaluation, between two that were noted; None before the first of them."""
    at_s = trend.noted_s - age_s
    later = trend.minutes[-1]
    for minute in reversed(trend.minutes):
        if minute[0] <= at_s:
            between_s = later[0] - minute[0]
            return minute[1] + (later[1] - minute[1]) * (at_s - minute[0]) / between_s if between_s else float(minute[1])
        later = minute
    return float(later[1]) if later[0] - at_s <= SLACK_S else None
