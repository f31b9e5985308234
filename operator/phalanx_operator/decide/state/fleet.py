"""Merges the summaries of all routers of a service.

Values of routers are summed; values of a group come from the freshest report. They originate in other programs, so they are
clamped: a faulty group weighs no more than an overloaded one.
"""

import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from phalanx_api.cache_curve import NO_CURVE, CacheCurve, merge_curves
from phalanx_api.cost import StepModel, StepWork
from phalanx_api.summary import BalancePolicy, GroupSummary, Hotspot, RouterSummary, Traffic, sum_traffic
from phalanx_api.wire import DeviceProblem, RefusedAdapter

PRESSURE_BOUND = 1.5
"""Late binding keeps waiting tokens below half of the pages."""
SPEED_BOUND = 4.0
BACKLOG_BOUND_S = 10.0
"""Or four times the median: more is a hotspot, which more groups do not relieve."""
MAX_DEVICES = 64
"""Problems of devices of a group."""
MAX_REFUSED = 128
"""Refused adapters of a group."""
IN_TIME = ("fresh", "degraded")
"""States of a linked group whose load reports arrive in time."""
_BY_FRESHNESS = ("fresh", "degraded", "suspect", "dead")
_REFERENCE = StepWork(prefill_tokens=256, decodes=16, context_tokens=16 * 1024)


@dataclass(frozen=True, slots=True)
class RouterReport:
    """The latest summary of one router, and its age."""

    router: str
    age_s: float
    summary: RouterSummary


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupLoadView:
    """Load of a group."""

    is_fresh: bool
    """The report is recent and complete."""
    streams: int
    """Streams of all routers."""
    running: int
    waiting: int
    pressure: float
    """Share of pages that running and waiting requests need."""
    backlog_s: float
    itl_s: float
    speed: float
    """Factor on `step_model`."""
    kv_capacity: int
    """Tokens that fit into its pages."""
    step_model: StepModel | None
    kv_tokens: int = 0
    """KV tokens of running requests."""
    request_tokens: int = 0
    """Most tokens whose pages a request holds; 0: all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineHealth:
    """Health of a group's engine."""

    incarnation: int = 0
    deaths: int = 0
    """Without external cause; the highest count of a router."""
    last_death: str = ""
    """Why the last incarnation died."""
    excused: int = 0
    """Caused by requests; the highest count: routers may each blame their own."""
    draft_loss: str = ""
    """Reason why speculation stopped; empty while it runs."""
    model_version: str = ""
    devices: tuple[DeviceProblem, ...] = ()
    """Present problems of its devices."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupCache:
    """Prefix cache of a group."""

    pages: int = 0
    page_bytes: int = 0
    """0 if unknown."""
    curve: CacheCurve = NO_CURVE


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupAdapters:
    """Adapters of a group."""

    loaded: frozenset[str] = frozenset()
    refused: Mapping[str, RefusedAdapter] = field(default_factory=dict)
    """By name."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupReport:
    """A group over all routers."""

    name: str
    is_linked: bool
    """A router is connected."""
    load: GroupLoadView
    engine: EngineHealth = EngineHealth()
    cache: GroupCache = GroupCache()
    adapters: GroupAdapters | None = None
    """Null: the group loads none."""
    load_age_s: float | None = None
    """Age of the latest report of a router that receives the group's load in time; none if no router does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestLoad:
    """Requests of all routers."""

    windows: Mapping[float, Traffic] = field(default_factory=dict)
    """Traffic by window length in seconds."""
    queued: int = 0
    queued_tokens: int = 0
    held: int = 0
    """During a cold start."""
    idle_s: float = 0.0
    """Since the last request."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """One service as its routers report it."""

    polled: int = 0
    answered: int = 0
    """Routers with recent summaries."""
    answered_by: frozenset[str] = frozenset()
    """Their UIDs."""
    is_new: bool = False
    """No router had time to answer."""
    unanswered: int = 0
    """Routers on silent nodes that do not answer; not in `polled`."""
    unreachable: frozenset[str] = frozenset()
    """UIDs of routers on silent nodes to which no connection succeeds."""
    groups: Mapping[str, GroupReport] = field(default_factory=dict)
    requests: RequestLoad = field(default_factory=RequestLoad)
    hotspots: tuple[Hotspot, ...] = ()
    saturated: bool = False
    evacuated: frozenset[str] = frozenset()
    """Evacuated groups without streams."""
    unknown_versions: tuple[str, ...] = ()
    """Incompatible programs, as sentences."""
    policy_number: int = 0
    """Highest number of a policy in effect at a router."""
    drain_requests: Mapping[str, float] = field(default_factory=dict)
    """Age in seconds of the latest request of users of a console to drain a group, by its name."""

    @property
    def has_quorum(self) -> bool:
        """Whether half of the routers answered recently."""
        return 0 < self.polled <= 2 * self.answered

    @property
    def is_complete(self) -> bool:
        """Whether every router answered recently."""
        return self.answered >= self.polled

    @property
    def is_silent(self) -> bool:
        """Whether no polled router answered recently."""
        return self.polled > 0 and self.answered == 0

    @property
    def loads(self) -> list[GroupLoadView]:
        """Loads of all groups."""
        return [group.load for group in self.groups.values()]


def evacuation_numbers(former: Mapping[str, int], policy: BalancePolicy) -> dict[str, int]:
    """Returns the number of the policy that began the evacuation of each group. `former`: result for the policy before."""
    return {group: former.get(group, policy.number) for group in policy.evacuate}


def merge(reports: Iterable[RouterReport], polled: int, max_age_s: float, evacuations: Mapping[str, int] | None = None) -> Fleet:
    """Returns the fleet from reports at most `max_age_s` old.

    `evacuations`: see `evacuation_numbers`; null: every report counts. A group that drains for the second time may be without
    streams in a report about the first time.
    """
    recent = [report for report in reports if report.age_s <= max_age_s]
    summaries = [report.summary for report in recent]
    if not summaries:
        return Fleet(polled=polled)
    return Fleet(
        polled=polled,
        answered=len(summaries),
        answered_by=frozenset(report.router for report in recent),
        groups=MappingProxyType(_merge_groups(recent)),
        requests=RequestLoad(
            windows=MappingProxyType(_merge_traffic(summaries)),
            queued=sum(max(summary.queued, 0) for summary in summaries),
            queued_tokens=sum(max(summary.queued_tokens, 0) for summary in summaries),
            held=sum(max(summary.held, 0) for summary in summaries),
            idle_s=min(report.summary.idle_s + report.age_s for report in recent),
        ),
        hotspots=_merge_hotspots(summaries),
        saturated=any(summary.fleet_saturated for summary in summaries),
        evacuated=frozenset.intersection(*(_evacuated(summary, evacuations) for summary in summaries)),
        policy_number=max(summary.policy for summary in summaries),
        drain_requests=MappingProxyType(_merge_drain_requests(recent)),
        unknown_versions=tuple(sorted({f"group {u.group}: {u.why}" for summary in summaries for u in summary.unknown_versions})),
    )


def _evacuated(summary: RouterSummary, evacuations: Mapping[str, int] | None) -> frozenset[str]:
    if evacuations is None:
        return frozenset(summary.evacuated)
    return frozenset(group for group in summary.evacuated if group in evacuations and summary.policy >= evacuations[group])


def _merge_drain_requests(reports: Sequence[RouterReport]) -> dict[str, float]:
    ages: dict[str, float] = {}
    for report in reports:
        for request in report.summary.drain_requests:
            age_s = max(request.age_s, 0.0) + report.age_s
            ages[request.group] = min(age_s, ages.get(request.group, age_s))
    return ages


def _merge_hotspots(summaries: Sequence[RouterSummary]) -> tuple[Hotspot, ...]:
    """Returns the longest hotspot of each group."""
    longest: dict[str, Hotspot] = {}
    for hotspot in (hotspot for summary in summaries for hotspot in summary.hotspots):
        former = longest.get(hotspot.group)
        if former is None or hotspot.since_s > former.since_s:
            longest[hotspot.group] = hotspot
    return tuple(sorted(longest.values(), key=lambda hotspot: (-hotspot.since_s, hotspot.group)))


def _merge_traffic(summaries: Sequence[RouterSummary]) -> dict[float, Traffic]:
    """Sums counts, and weights means by arrivals."""
    windows: dict[float, list[Traffic]] = {}
    for traffic in (traffic for summary in summaries for traffic in summary.traffic if traffic.window_s > 0):
        windows.setdefault(traffic.window_s, []).append(traffic)
    return {window_s: sum_traffic(window_s, parts) for window_s, parts in windows.items()}


def _merge_groups(reports: Sequence[RouterReport]) -> dict[str, GroupReport]:
    by_name: dict[str, list[GroupSummary]] = {}
    load_ages: dict[str, float] = {}
    for report in reports:
        for group in report.summary.groups:
            by_name.setdefault(group.group, []).append(group)
            if group.state in IN_TIME:
                load_ages[group.group] = min(report.age_s, load_ages.get(group.group, report.age_s))
    groups = {name: _merge_group(summaries, load_ages.get(name)) for name, summaries in by_name.items()}
    backlogs = [group.load.backlog_s for group in groups.values() if group.load.is_fresh]
    bound_s = max(BACKLOG_BOUND_S, 4 * statistics.median_low(backlogs)) if backlogs else BACKLOG_BOUND_S
    return {
        name: replace(group, load=replace(group.load, backlog_s=min(group.load.backlog_s, bound_s)))
        for name, group in groups.items()
    }


def _merge_group(reports: Sequence[GroupSummary], load_age_s: float | None) -> GroupReport:
    deadliest = max(reports, key=lambda group: group.deaths)
    freshest = min(reports, key=lambda group: _BY_FRESHNESS.index(group.state))
    load = GroupLoadView(
        is_fresh=freshest.state in IN_TIME and freshest.total_pages > 0 and freshest.page_size > 0,
        streams=sum(max(group.streams, 0) for group in reports),
        running=max(freshest.running, 0),
        waiting=max(freshest.waiting, 0),
        pressure=min(max(freshest.pressure, 0.0), PRESSURE_BOUND),
        backlog_s=max(freshest.backlog_s, 0.0),
        itl_s=max(freshest.itl_s, 0.0),
        speed=min(max(freshest.speed, 1 / SPEED_BOUND), SPEED_BOUND),
        kv_capacity=max(freshest.total_pages, 0) * max(freshest.page_size, 0),
        step_model=StepModel.from_coefficients(freshest.step_model),
        kv_tokens=max(freshest.live_tokens, 0),
        request_tokens=max(freshest.max_request_pages, 0) * max(freshest.page_size, 0),
    )
    engine = EngineHealth(
        incarnation=max(max(group.incarnation for group in reports), 0),
        deaths=max(deadliest.deaths, 0),
        last_death=deadliest.death,
        excused=min(max(0, *(group.excused for group in reports)), max(deadliest.deaths, 0)),
        draft_loss=freshest.draft_lost,
        devices=tuple(freshest.devices[:MAX_DEVICES]),
        model_version=next((group.model_version for group in (freshest, *reports) if group.model_version), "")[:128],
    )
    cache = GroupCache(
        pages=max(freshest.total_pages, 0), page_bytes=max(freshest.page_bytes, 0), curve=merge_curves([freshest.cache_curve])
    )
    return GroupReport(
        name=freshest.group,
        is_linked=freshest.state != "dead",
        load=load,
        engine=engine,
        cache=cache,
        adapters=_adapters(freshest),
        load_age_s=load_age_s,
    )


def _adapters(report: GroupSummary) -> GroupAdapters | None:
    if report.adapters is None or report.state == "dead":
        return None
    refused = {refused.name: refused for refused in report.refused_adapters[:MAX_REFUSED]}
    return GroupAdapters(loaded=frozenset(report.adapters), refused=MappingProxyType(refused))


def median_step_model(groups: Iterable[GroupLoadView]) -> StepModel | None:
    """Returns the median group's step model: of three, never a faulty one."""
    models = [group.step_model for group in groups if group.is_fresh and group.step_model is not None]
    return sorted(models, key=lambda model: model.predict(_REFERENCE))[(len(models) - 1) // 2] if models else None
