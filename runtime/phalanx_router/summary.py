"""Builds the summary for the operator."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from phalanx_api import wire
from phalanx_api.cache_curve import NO_CURVE, NO_USE
from phalanx_api.speculation import SpeculationCounts
from phalanx_api.summary import DrainRequest, Freshness, GroupSummary, RouterSummary, UnknownVersion
from phalanx_router.backend import RouterBackend
from phalanx_router.drain_requests import DrainRequests
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.view import GroupView

MAX_ADAPTERS = 128
"""Listed adapters of a group."""
MAX_DEVICES = 64
"""Listed problems of devices of a group."""


@dataclass(frozen=True, slots=True, kw_only=True)
class UrgentState:
    """State that ends the operator's long poll when it changes."""

    hotspots: frozenset[tuple[str, str]]
    is_saturated: bool
    has_held: bool
    evacuated: frozenset[str]
    is_leaving: bool
    unknown_versions: frozenset[str] = frozenset()
    deaths: frozenset[tuple[str, int, int]] = frozenset()
    drafts_lost: frozenset[str] = frozenset()
    linked: frozenset[str] = frozenset()
    devices: frozenset[tuple[str, str]] = frozenset()
    drain_requests: frozenset[str] = frozenset()
    refused_adapters: frozenset[tuple[str, str]] = frozenset()
    """Group and adapter."""


class CpuMeter:
    """Share of a core that this process uses, since one to two periods of `PERIOD_S` ago."""

    PERIOD_S = 10.0

    def __init__(self, cpu_clock: Callable[[], float], now: float) -> None:
        self._cpu_clock = cpu_clock
        self._before = self._last = (now, cpu_clock())

    def share(self, now: float) -> float:
        """Returns the share; 0 before any time has passed."""
        used_s = self._cpu_clock()
        if now - self._last[0] >= self.PERIOD_S:
            self._before, self._last = self._last, (now, used_s)
        elapsed_s = now - self._before[0]
        return max(0.0, (used_s - self._before[1]) / elapsed_s) if elapsed_s > 0 else 0.0


class SummaryBuilder:
    """Builds summaries of a router."""

    def __init__(
        self,
        backend: RouterBackend,
        metrics: RouterMetrics,
        name: str,
        clock: Callable[[], float],
        cpu_clock: Callable[[], float] = time.process_time,
    ) -> None:
        self._backend = backend
        self._metrics = metrics
        self._name = name
        self._clock = clock
        self._started_at = clock()
        self._cpu = CpuMeter(cpu_clock, self._started_at)
        self.drains = DrainRequests(clock)

    def urgent_state(self) -> UrgentState:
        """Returns the present urgent state."""
        decision, links, excused = self._backend.balancing.decision, self._backend.links.all(), self._backend.excused
        named = [(link, link.endpoint.group) for link in links]
        return UrgentState(
            hotspots=frozenset((hotspot.group, str(hotspot.cause)) for hotspot in decision.hotspots),
            is_saturated=decision.is_saturated,
            has_held=self._num_held() > 0,
            evacuated=frozenset(self._evacuated()),
            is_leaving=self._backend.is_draining,
            unknown_versions=frozenset(unknown.group for unknown in self._unknown_versions()),
            deaths=frozenset([(group, link.state.deaths, excused[link.endpoint.key]) for link, group in named]),
            drafts_lost=frozenset([group for link, group in named if _draft_failure(link)]),
            devices=frozenset([(group, str(problem)) for link, group in named for problem in link.state.devices]),
            linked=frozenset([group for link, group in named if _is_linked(link)]),
            drain_requests=frozenset(request.group for request in self.drain_requests()),
            refused_adapters=frozenset([(group, refused.name) for link, group in named for refused in _refused(link)]),
        )

    def summary(self) -> RouterSummary:
        """Returns the present summary."""
        backend, now = self._backend, self._clock()
        balancing, traffic = backend.balancing, backend.traffic
        waiting = [session for session in backend.sessions if session.is_waiting]
        return RouterSummary(
            router=self._name,
            groups=self.groups(),
            traffic=traffic.windows(now),
            queued=len(waiting),
            queued_tokens=sum(session.stream.journal.num_tokens for session in waiting),
            held=self._num_held(),
            idle_s=self._idle_s(now),
            ttft=traffic.ttft(now),
            itl=traffic.itl(now),
            hotspots=balancing.decision.hotspots,
            fleet_saturated=balancing.decision.is_saturated,
            moves_total=balancing.counts.moved,
            moves_failed_total=balancing.counts.failed,
            pingpong_total=balancing.balancer.pingpong.num_returns,
            shed_total=self._metrics.num_shed,
            policy=balancing.policy.number,
            evacuated=sorted(self._evacuated()),
            unknown_versions=self._unknown_versions(),
            wait=traffic.wait(now),
            cpu_share=self._cpu.share(now),
            drain_requests=self.drain_requests(),
        )

    def drain_requests(self) -> list[DrainRequest]:
        """Groups that users of the console want to drain and that do not drain yet."""
        fleet_view, links = self._backend.links.fleet_view, self._backend.links.all()
        return self.drains.open({link.endpoint.group: fleet_view.is_leaving(link) for link in links}) if self.drains else []

    def _unknown_versions(self) -> list[UnknownVersion]:
        links = self._backend.links.all()
        return [UnknownVersion(link.endpoint.group, link.version_error) for link in links if link.version_error]

    def _idle_s(self, now: float) -> float:
        """A request has no session yet while it is held or waits for its adapter, and while its model is then loaded."""
        backend = self._backend
        adapters, cold_start = backend.adapters, backend.dispatcher.cold_start
        if backend.sessions or self._num_held() or adapters.num_waiting:
            return 0.0
        last = (backend.traffic.last_active_at, cold_start.changed_at, adapters.waited_at)
        return now - max([self._started_at, *(at for at in last if at is not None)])

    def _num_held(self) -> int:
        """Held requests, and streams that lost the last group."""
        num_held = self._backend.dispatcher.cold_start.num_held
        if self._backend.links.num_ready:
            return num_held
        return num_held + sum(session.is_waiting and not session.wait.is_held for session in self._backend.sessions)

    def _evacuated(self) -> set[str]:
        """Groups of `policy.evacuate` without streams. A waiting stream counts for the lost group that alone has its weights."""
        evacuate = set(self._backend.balancing.policy.evacuate)
        if not evacuate:
            return evacuate
        waiting = (session for session in self._backend.sessions if session.is_waiting and session.stream.journal.delivered)
        return evacuate - self._streams().keys() - {session.failures.lost_group for session in waiting}

    def _streams(self) -> Counter[str]:
        return Counter(
            session.assignment.link.endpoint.group for session in self._backend.sessions if session.assignment is not None
        )

    def groups(self) -> list[GroupSummary]:
        """Summary of each group."""
        links = self._backend.links.all()
        streams = self._streams()
        views = self._backend.links.fleet_view.views(links)
        excused = self._backend.excused
        return [
            _group(link, view, streams[link.endpoint.group], excused[link.endpoint.key], self._backend.links.adapters_of(link))
            for link, view in zip(links, views, strict=True)
        ]


def _live_tokens(view: GroupView) -> int:
    """Tokens in pages of running requests; at most, if these drop pages."""
    load, capacity = view.load, view.capacity
    if not capacity.max_request_pages:
        return load.context_tokens
    return min(load.context_tokens, load.running * capacity.max_request_pages * capacity.page_size)


def _group(link: LeaderLink, view: GroupView, streams: int, excused: int, adapters: Sequence[wire.Adapter]) -> GroupSummary:
    """Summary of one group; dead, despite a recent report, unless it serves or drains."""
    state: Freshness = view.state if _is_linked(link) else "dead"
    load, served = link.group_report.load, link.group_report.served
    return GroupSummary(
        group=link.endpoint.group,
        revision=view.revision,
        state=state,
        draining=view.is_draining,
        streams=streams,
        running=view.load.running,
        waiting=view.load.waiting,
        pressure=view.pressure,
        backlog_s=view.backlog_s,
        itl_s=view.step_s if view.load.running else 0.0,
        speed=view.speed,
        live_tokens=_live_tokens(view),
        total_pages=view.capacity.total_pages,
        page_size=view.capacity.page_size,
        step_model=load.step_model if load is not None else [],
        incarnation=link.state.incarnation,
        model_hash=served.model_hash,
        deaths=link.state.deaths,
        death=link.state.death[:300],
        draft_lost=_draft_failure(link)[:300],
        model_version=served.version[:128],
        excused=excused,
        devices=link.state.devices[:MAX_DEVICES],
        device_busy=load.device_busy if load is not None else 0.0,
        bandwidth_utilization=load.bandwidth_utilization if load is not None else 0.0,
        flop_utilization=load.flop_utilization if load is not None else 0.0,
        page_bytes=served.page_bytes,
        max_request_pages=view.capacity.max_request_pages,
        cache_curve=load.cache_curve if load is not None else NO_CURVE,
        cache_use=load.cache_use if load is not None else NO_USE,
        max_num_seqs=view.capacity.max_num_seqs,
        max_num_batched_tokens=view.capacity.max_num_batched_tokens if load is not None else 0,
        prompt_tokens_per_step=view.load.prompt_tokens_per_step,
        preemptions=load.preemptions if load is not None else 0,
        speedup=view.load.speedup,
        speculation=load.speculation if load is not None else SpeculationCounts(),
        link_s=link.group_report.delay.value_s,
        tenants=load.tenants if load is not None else [],
        power=link.state.power,
        adapters=None if link.state.adapters is None else sorted(adapter.name for adapter in adapters)[:MAX_ADAPTERS],
        refused_adapters=list(_refused(link)[:MAX_ADAPTERS]),
    )


def _refused(link: LeaderLink) -> Sequence[wire.RefusedAdapter]:
    return link.state.adapters.refused if link.state.adapters is not None else ()


def _is_linked(link: LeaderLink) -> bool:
    return link.is_open and (link.is_serving or link.state.draining)


def _draft_failure(link: LeaderLink) -> str:
    return link.group_report.load.speculation.draft_failure if link.group_report.load is not None else ""
