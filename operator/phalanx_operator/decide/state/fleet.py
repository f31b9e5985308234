"""Merges the latest summaries of all routers of a service into one record.

Values of a router (streams, queue, traffic, latencies) are added up. Values of a group come from the router with the newest
report. They originate in other programs, so they are bounded here: a broken or lying group weighs no more than an overloaded one
could.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from phalanx_api.cost import StepModel, StepWork
from phalanx_api.summary import GroupSummary, Histogram, Hotspot, RouterSummary, Traffic, add_up

PRESSURE_BOUND = 1.5
"""Late binding keeps waiting tokens of a group below half of its pages."""
SPEED_BOUND = 4.0
MEAN_BOUND = 1e15
BACKLOG_BOUND_S = 10.0
"""Upper bound of a group's backlog, or four times the median: more is a hotspot, which more groups do not relieve."""
_BY_FRESHNESS = ("fresh", "degraded", "suspect", "dead")
_REFERENCE = StepWork(prefill_tokens=256, decodes=16, context_tokens=16 * 1024)


@dataclass(frozen=True, slots=True)
class RouterAnswer:
    """The latest summary of one router, and its age."""

    router: str
    age_s: float
    summary: RouterSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoadView:
    """One group over all routers."""

    name: str
    fresh: bool
    streams: int
    """Of all routers; the other fields are the group's own."""
    running: int
    waiting: int
    pressure: float
    backlog_s: float
    itl_s: float
    speed: float
    capacity: int
    """Tokens that fit into its pages."""
    model: StepModel | None
    tokens: int = 0
    """Tokens of running requests."""
    incarnation: int = 0
    deaths: int = 0
    """Incarnations that ended without an outside cause, at most as any router counts."""
    death: str = ""
    """Why the last incarnation died."""
    draft_lost: str = ""
    """Why it stopped speculation."""
    linked: bool = False
    """A router is connected to it."""
    model_version: str = ""
    """Version of its model's source."""
    excused: int = 0
    """Deaths caused by requests, as any one router counts: two routers may blame theirs for the same death."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """One service as its routers report it."""

    asked: int = 0
    """Routers that are polled."""
    answered: int = 0
    """Routers with a recent summary."""
    groups: Mapping[str, GroupLoadView] = field(default_factory=dict)
    traffic: Mapping[float, Traffic] = field(default_factory=dict)
    queued: int = 0
    queued_tokens: int = 0
    held: int = 0
    idle_s: float = 0.0
    """Since the last request to any router."""
    ttft: Histogram = field(default_factory=Histogram)
    itl: Histogram = field(default_factory=Histogram)
    hotspots: tuple[Hotspot, ...] = ()
    saturated: bool = False
    emptied: frozenset[str] = frozenset()
    """Groups to evacuate that have no stream of any router."""
    unknown_versions: tuple[str, ...] = ()
    """Pairs of programs with different protocol versions, as sentences."""
    is_new: bool = False
    """No router had time to answer yet."""

    @property
    def is_heard(self) -> bool:
        """Whether at least half of the routers answered recently."""
        return 0 < self.asked <= 2 * self.answered

    @property
    def all_heard(self) -> bool:
        """Whether every router answered recently."""
        return self.answered >= self.asked


def merge(heard: Iterable[RouterAnswer], asked: int, max_age_s: float) -> Fleet:
    """Returns the fleet from summaries at most `max_age_s` old."""
    young = [one for one in heard if one.age_s <= max_age_s]
    summaries = [one.summary for one in young]
    if not summaries:
        return Fleet(asked=asked)
    return Fleet(
        asked=asked,
        answered=len(summaries),
        groups=MappingProxyType(_groups(summaries)),
        traffic=MappingProxyType(_traffic(summaries)),
        queued=sum(max(one.queued, 0) for one in summaries),
        queued_tokens=sum(max(one.queued_tokens, 0) for one in summaries),
        held=sum(max(one.held, 0) for one in summaries),
        idle_s=min(one.summary.idle_s + one.age_s for one in young),
        ttft=add_up([one.ttft for one in summaries]),
        itl=add_up([one.itl for one in summaries]),
        hotspots=_hotspots(summaries),
        saturated=any(one.fleet_saturated for one in summaries),
        emptied=frozenset.intersection(*(_empty(one) for one in summaries)),
        unknown_versions=tuple(sorted({f"group {u.group}: {u.why}" for one in summaries for u in one.unknown_versions})),
    )


def _empty(summary: RouterSummary) -> frozenset[str]:
    """Returns the groups without streams of this router."""
    return frozenset(summary.emptied)


def _hotspots(summaries: Sequence[RouterSummary]) -> tuple[Hotspot, ...]:
    """Returns one hotspot per group, from the router that has observed it longest; the longest first."""
    longest: dict[str, Hotspot] = {}
    for hotspot in (hotspot for summary in summaries for hotspot in summary.hotspots):
        known = longest.get(hotspot.group)
        if known is None or hotspot.since_s > known.since_s:
            longest[hotspot.group] = hotspot
    return tuple(sorted(longest.values(), key=lambda hotspot: (-hotspot.since_s, hotspot.group)))


def _traffic(summaries: Sequence[RouterSummary]) -> dict[float, Traffic]:
    """Returns the traffic of all routers per window: counts added, means weighted by arrivals."""
    windows: dict[float, list[Traffic]] = {}
    for traffic in (traffic for summary in summaries for traffic in summary.traffic if traffic.window_s > 0):
        windows.setdefault(traffic.window_s, []).append(traffic)
    return {window_s: _added(window_s, parts) for window_s, parts in windows.items()}


def _added(window_s: float, parts: Sequence[Traffic]) -> Traffic:
    total = sum(max(part.arrivals, 0) for part in parts)

    def mean(values: Iterable[float]) -> float:
        weighted = sum(value * max(part.arrivals, 0) for value, part in zip(values, parts, strict=True))
        return min(max(weighted / total, 0.0), MEAN_BOUND) if total else 0.0

    return Traffic(
        window_s=window_s,
        arrivals=total,
        prompt=mean(part.prompt for part in parts),
        prompt_squared=mean(part.prompt_squared for part in parts),
        missed=mean(part.missed for part in parts),
        output=mean(part.output for part in parts),
        scv=mean(part.scv for part in parts) if total else 1.0,
    )


def _groups(summaries: Sequence[RouterSummary]) -> dict[str, GroupLoadView]:
    by_name: dict[str, list[GroupSummary]] = {}
    for group in (group for summary in summaries for group in summary.groups):
        by_name.setdefault(group.group, []).append(group)
    groups = {name: _seen(seen) for name, seen in by_name.items()}
    backlogs = [group.backlog_s for group in groups.values() if group.fresh]
    bound_s = max(BACKLOG_BOUND_S, 4 * statistics.median_low(backlogs)) if backlogs else BACKLOG_BOUND_S
    return {name: replace(group, backlog_s=min(group.backlog_s, bound_s)) for name, group in groups.items()}


def _seen(seen: Sequence[GroupSummary]) -> GroupLoadView:
    """Returns one group from the reports of all routers."""
    most = max(seen, key=lambda group: group.deaths)
    best = min(seen, key=lambda group: _BY_FRESHNESS.index(group.state))
    return GroupLoadView(
        name=best.group,
        fresh=best.state in ("fresh", "degraded") and best.total_pages > 0 and best.page_size > 0,
        streams=sum(max(group.streams, 0) for group in seen),
        running=max(best.running, 0),
        waiting=max(best.waiting, 0),
        pressure=min(max(best.pressure, 0.0), PRESSURE_BOUND),
        backlog_s=max(best.backlog_s, 0.0),
        itl_s=max(best.itl_s, 0.0),
        speed=min(max(best.speed, 1 / SPEED_BOUND), SPEED_BOUND),
        capacity=max(best.total_pages, 0) * max(best.page_size, 0),
        model=StepModel.told(best.step_model),
        tokens=max(best.live_tokens, 0),
        incarnation=max(max(group.incarnation for group in seen), 0),
        deaths=max(most.deaths, 0),
        death=most.death,
        draft_lost=best.draft_lost,
        linked=best.state != "dead",
        model_version=next((group.model_version for group in (best, *seen) if group.model_version), "")[:128],
        excused=min(max(0, *(group.excused for group in seen)), max(most.deaths, 0)),
    )


def middle_model(groups: Iterable[GroupLoadView]) -> StepModel | None:
    """Returns the median group's step model: of three models a wrong one is never used."""
    models = [group.model for group in groups if group.fresh and group.model is not None]
    return sorted(models, key=lambda model: model.predict(_REFERENCE))[(len(models) - 1) // 2] if models else None
