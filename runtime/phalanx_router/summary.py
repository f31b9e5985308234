"""Builds the summary for the operator: groups, traffic, queue, results of balancing."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from phalanx_api.summary import Freshness, GroupSummary, RouterSummary, UnknownVersion
from phalanx_router.backend import RouterBackend
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.view import GroupView


@dataclass(frozen=True, slots=True, kw_only=True)
class UrgentChange:
    """State that, when it changes, ends the operator's long poll at once."""

    hotspots: frozenset[tuple[str, str]]
    is_saturated: bool
    has_held: bool
    emptied: frozenset[str]
    is_leaving: bool
    unknown_versions: frozenset[str] = frozenset()
    deaths: frozenset[tuple[str, int, int]] = frozenset()
    drafts_lost: frozenset[str] = frozenset()
    linked: frozenset[str] = frozenset()


class SummaryBuilder:
    """Builds summaries of a router. `name` is unique among the routers of the service."""

    def __init__(self, fleet: RouterBackend, metrics: RouterMetrics, name: str, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._name = name
        self._clock = clock
        self._began = clock()

    def urgent_state(self) -> UrgentChange:
        """Returns the present state."""
        found = self._fleet.balancing.last
        hotspots = frozenset((hotspot.group, str(hotspot.cause)) for hotspot in found.hotspots)
        has_held = self._num_held() > 0
        unknown = frozenset(one.group for one in self._unknown_versions())
        excused = self._fleet.excused
        deaths = frozenset((one.endpoint.group, one.state.deaths, excused[one.endpoint.key]) for one in self._fleet.links.all())
        lost = frozenset(link.endpoint.group for link in self._fleet.links.all() if _draft_lost(link))
        linked = frozenset(link.endpoint.group for link in self._fleet.links.all() if _is_linked(link))
        emptied, leaves = frozenset(self._emptied()), self._fleet.draining
        return UrgentChange(
            hotspots=hotspots,
            is_saturated=found.is_saturated,
            has_held=has_held,
            emptied=emptied,
            is_leaving=leaves,
            unknown_versions=unknown,
            deaths=deaths,
            drafts_lost=lost,
            linked=linked,
        )

    def summary(self) -> RouterSummary:
        """Returns the summary as of now."""
        fleet, now = self._fleet, self._clock()
        balancing, traffic = fleet.balancing, fleet.traffic
        waiting = [run for run in fleet.runs if run.link is None]
        return RouterSummary(
            router=self._name,
            groups=self.groups(),
            traffic=traffic.windows(now),
            queued=len(waiting),
            queued_tokens=sum(run.stream.journal.num_tokens for run in waiting),
            held=self._num_held(),
            idle_s=0.0 if fleet.runs or self._num_held() else now - max(self._began, traffic.last_s or self._began),
            ttft=traffic.ttft(now),
            itl=traffic.itl(now),
            hotspots=balancing.last.hotspots,
            fleet_saturated=balancing.last.is_saturated,
            moves_total=balancing.count.moved,
            moves_failed_total=balancing.count.failed,
            pingpong_total=balancing.balancer.pingpong.total,
            shed_total=self._metrics.num_shed,
            policy=balancing.policy.number,
            emptied=sorted(self._emptied()),
            unknown_versions=self._unknown_versions(),
        )

    def _unknown_versions(self) -> list[UnknownVersion]:
        """Returns the groups without a common link version."""
        links = self._fleet.links.all()
        return [UnknownVersion(link.endpoint.group, link.unknown_version) for link in links if link.unknown_version]

    def _num_held(self) -> int:
        """Returns the number of requests that wait for a first group: held ones, and streams that lost the last group."""
        fleet = self._fleet
        unassigned = 0 if fleet.links.num_ready else sum(run.link is None and not run.is_held for run in fleet.runs)
        return fleet.dispatcher.cold_start.num_held + unassigned

    def _emptied(self) -> set[str]:
        streams = self._streams()
        filled = {link.endpoint.group for link in self._fleet.links.all() if streams[link.endpoint.group]}
        return set(self._fleet.balancing.policy.empty) - filled

    def _streams(self) -> Counter[str]:
        """Counts this router's streams by group."""
        return Counter(run.link.endpoint.group for run in self._fleet.runs if run.link is not None)

    def groups(self) -> list[GroupSummary]:
        """Returns the summary of each group as of now."""
        links = self._fleet.links.all()
        streams = self._streams()
        views = self._fleet.links.fleet_view.views(links)
        excused = self._fleet.excused
        return [
            _group(link, view, streams[link.endpoint.group], excused[link.endpoint.key])
            for link, view in zip(links, views, strict=True)
        ]


def _group(link: LeaderLink, view: GroupView, streams: int, excused: int) -> GroupSummary:
    """Returns the summary of one group; a group that neither serves nor drains counts as dead despite a recent report."""
    state: Freshness = view.state if _is_linked(link) else "dead"
    load, served = link.group_report.load, link.group_report.served
    return GroupSummary(
        group=link.endpoint.group,
        revision=view.revision,
        state=state,
        draining=view.draining,
        streams=streams,
        running=view.running,
        waiting=view.waiting,
        pressure=view.pressure,
        backlog_s=view.backlog_s,
        itl_s=view.step_s if view.running else 0.0,
        speed=view.speed,
        live_tokens=view.context_tokens,
        total_pages=view.total_pages,
        page_size=view.page_size,
        step_model=load.step_model if load is not None else [],
        incarnation=link.state.incarnation,
        model_hash=served.model_hash,
        deaths=link.state.deaths,
        death=link.state.death[:300],
        draft_lost=_draft_lost(link)[:300],
        model_version=served.version[:128],
        excused=excused,
    )


def _is_linked(link: LeaderLink) -> bool:
    """Returns whether the link is open and the group serves or drains."""
    return link.is_open and (link.is_serving or link.state.draining)


def _draft_lost(link: LeaderLink) -> str:
    """Returns why the group lost its draft model; empty if it has one or was configured without."""
    return link.group_report.load.speculation.lost if link.group_report.load is not None else ""
