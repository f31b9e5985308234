"""From what the routers say to the load of a service and the ability of one of its groups."""

import math
import statistics
from dataclasses import replace

from phalanx_api.summary import Traffic
from phalanx_operator.decide.scaling.demand import ROOM, Ability, Load
from phalanx_operator.decide.state.fleet import Fleet, SeenGroup, middle_model

SHORT_S, USUAL_S, LONG_S = 6.0, 60.0, 300.0
"""The windows of a router's summary."""
SPREAD, PANIC_SPREAD = 2.0, 1.5
"""Square roots of counts vary by a half, whatever the count: these are four and three standard deviations of it."""
_NOTHING = Traffic(USUAL_S, 0, 0.0, 0.0, 0.0, 0.0)


def fresh(fleet: Fleet) -> list[SeenGroup]:
    """The groups whose numbers may be believed."""
    return [group for group in fleet.groups.values() if group.fresh]


def ability_of(fleet: Fleet, room: int | None) -> Ability | None:
    """What one group can do: the middle of all. None while no group has measured its steps."""
    groups = fresh(fleet)
    model = middle_model(groups)
    if model is None:
        return None
    speed = statistics.median(group.speed for group in groups)
    return Ability(model, speed, int(statistics.median(group.capacity for group in groups)), room or ROOM)


def load_of(fleet: Fleet, ability: Ability, grows: float = 1.0) -> Load:
    """The load of the last minute, or what it becomes when it grows so many times. Means are of five minutes."""
    usual = fleet.traffic.get(USUAL_S, _NOTHING)
    return _load(fleet, ability, usual.arrivals / USUAL_S, grows)


def arrivals_alone(load: Load) -> Load:
    """What of a load follows from arrivals: not pages and queues, which change with the groups."""
    return replace(load, kv_tokens=0.0, backlog_s=0.0)


def burstiness_of(fleet: Fleet) -> float:
    """How bursty arrivals are: the squared coefficient of variation of the times between them, 1 as by chance."""
    return _shape(fleet).scv


def heaviest_load_of(fleet: Fleet, ability: Ability) -> Load:
    """The heaviest minute that a load like that of the last five minutes brings by chance, once in hours."""
    usual, long = fleet.traffic.get(USUAL_S, _NOTHING), fleet.traffic.get(LONG_S, _NOTHING)
    expected = max(usual.arrivals, long.arrivals * USUAL_S / LONG_S)
    spread = SPREAD * math.sqrt(max(_shape(fleet).scv, 1.0))
    load = _load(fleet, ability, (math.sqrt(expected) + spread) ** 2 / USUAL_S if expected else 0.0, 1.0)
    streams = sum(group.running for group in fresh(fleet))
    return replace(load, kv_tokens=load.kv_tokens * (1 + SPREAD / math.sqrt(max(streams, 1))))


def panic_load_of(fleet: Fleet, ability: Ability) -> Load | None:
    """The load of the last seconds, by the lowest rate that explains their arrivals; None without that window."""
    short = fleet.traffic.get(SHORT_S)
    if short is None:
        return None
    spread = PANIC_SPREAD * math.sqrt(max(_shape(fleet).scv, 1.0))
    certain = max(math.sqrt(short.arrivals) - spread, 0.0) ** 2
    return _load(fleet, ability, certain / SHORT_S, 1.0)


def _load(fleet: Fleet, ability: Ability, rate: float, grows: float) -> Load:
    shape = _shape(fleet)
    in_pages = sum(group.pressure * group.capacity for group in fresh(fleet))
    waiting_s = fleet.queued_tokens * ability.token_s + sum(group.backlog_s for group in fresh(fleet))
    return Load(rate * grows, shape, in_pages * grows + fleet.queued_tokens, waiting_s)


def _shape(fleet: Fleet) -> Traffic:
    """Means of the longest window in which anything came."""
    windows = (fleet.traffic.get(window_s, _NOTHING) for window_s in (LONG_S, USUAL_S, SHORT_S))
    return next((window for window in windows if window.arrivals), _NOTHING)
