"""This router's summary for the operator: its groups, its traffic, what waits, what balancing found."""

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass

from phalanx_api.summary import Freshness, GroupSummary, RouterSummary, UnknownVersion
from phalanx_router.backend import Fleet
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.view import GroupView


@dataclass(frozen=True, slots=True)
class Crossing:
    """What an operator wants to hear of at once when it changes."""

    hotspots: frozenset[tuple[str, str]]
    is_saturated: bool
    has_held: bool
    emptied: frozenset[str]
    is_leaving: bool
    unknown_versions: frozenset[str] = frozenset()
    deaths: frozenset[tuple[str, int, int]] = frozenset()
    drafts_lost: frozenset[str] = frozenset()
    linked: frozenset[str] = frozenset()


class Summing:
    """Sums a fleet up. `name` is the router's, unique among those of its service."""

    def __init__(self, fleet: Fleet, metrics: RouterMetrics, name: str, clock: Callable[[], float]) -> None:
        self._fleet = fleet
        self._metrics = metrics
        self._name = name
        self._clock = clock
        self._began = clock()

    def crossing(self) -> Crossing:
        """As of now."""
        found = self._fleet.balancing.last
        hotspots = frozenset((hotspot.group, str(hotspot.cause)) for hotspot in found.hotspots)
        has_held = self._num_held() > 0
        unknown = frozenset(one.group for one in self._unknown_versions())
        excused = self._fleet.excused
        deaths = frozenset((one.endpoint.group, one.state.deaths, excused[one.endpoint.key]) for one in self._fleet.links.all())
        lost = frozenset(link.endpoint.group for link in self._fleet.links.all() if _draft_lost(link))
        linked = frozenset(link.endpoint.group for link in self._fleet.links.all() if _is_linked(link))
        emptied, leaves = frozenset(self._emptied()), self._fleet.draining
        return Crossing(hotspots, found.is_saturated, has_held, emptied, leaves, unknown, deaths, lost, linked)

    def summary(self) -> RouterSummary:
        """As of now."""
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
        """Groups that this router shares no version of the link with."""
        links = self._fleet.links.all()
        return [UnknownVersion(link.endpoint.group, link.unknown_version) for link in links if link.unknown_version]

    def _num_held(self) -> int:
        """Requests that wait for a first group: those held, and streams that lost the last one."""
        fleet = self._fleet
        homeless = 0 if fleet.links.num_ready else sum(run.link is None and not run.is_held for run in fleet.runs)
        return fleet.placing.waking.num_held + homeless

    def _emptied(self) -> set[str]:
        streams = self._streams()
        filled = {link.endpoint.group for link in self._fleet.links.all() if streams[link.endpoint.group]}
        return set(self._fleet.balancing.policy.empty) - filled

    def _streams(self) -> Counter[str]:
        """This router's streams by group."""
        return Counter(run.link.endpoint.group for run in self._fleet.runs if run.link is not None)

    def groups(self) -> list[GroupSummary]:
        """Each group as of now."""
        links = self._fleet.links.all()
        streams = self._streams()
        views = self._fleet.links.outlook.views(links)
        excused = self._fleet.excused
        return [
            _group(link, view, streams[link.endpoint.group], excused[link.endpoint.key])
            for link, view in zip(links, views, strict=True)
        ]


def _group(link: LeaderLink, view: GroupView, streams: int, excused: int) -> GroupSummary:
    """A group that neither serves nor drains is dead to this router, whatever its last report said."""
    state: Freshness = view.state if _is_linked(link) else "dead"
    load, served = link.told.load, link.told.served
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
    """Whether the group serves, or ends what it has, as far as this router hears."""
    return link.is_open and (link.is_serving or link.state.draining)


def _draft_lost(link: LeaderLink) -> str:
    """Why the ranks of this group draft no more; empty while they can, or never were to."""
    return link.told.load.speculation.lost if link.told.load is not None else ""
