"""Phalanx: `phalanx_router.routing` chooses, `phalanx_router.balancing` moves, as they run in the router."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import count
from typing import cast

from bench.simulate.cache import PAGE
from bench.simulate.engine import Engine, Shape
from bench.simulate.jobs import Job
from bench.simulate.report import stream_of
from bench.simulate.scene import Scene, Send, Wish
from phalanx_api import wire
from phalanx_api.cost import attended
from phalanx_api.summary import BalancePolicy, GroupSummary, Histogram, RouterSummary
from phalanx_router.balancing.balancer import BalanceDecision, Balancer
from phalanx_router.balancing.records import PlannedMove, StreamView
from phalanx_router.routing.cost import RequestDemand
from phalanx_router.routing.late_binding import DispatchInputs, UnstartedRequest, find_requeues, next_dispatch
from phalanx_router.routing.ledger import SentRequest
from phalanx_router.routing.look import GroupReport, GroupViewBuilder
from phalanx_router.routing.queue import QueuedRequest, RequestQueue
from phalanx_router.routing.view import GroupView
from phalanx_router.streams.traffic import TrafficStats

OUTPUT_TOKENS = 4096
"""What requests allow at most: nobody says beforehand how long an answer will be."""


class Ours:
    """One router. `mode` as in `BalancePolicy`; `has_ledger` off forgets what was sent since the last report."""

    def __init__(self, shape: Shape, groups: int, mode: BalancePolicy, has_ledger: bool = True) -> None:
        self._served = wire.Served("model", "layout", PAGE * shape.token_bytes)
        self._told: dict[int, GroupReport] = {}
        self._lookout = GroupViewBuilder()
        self._balancer = Balancer(mode)
        self._last = BalanceDecision()
        self._has_ledger = has_ledger
        self._copy_bytes_per_s = shape.copy_bytes_per_s
        self._queue = RequestQueue()
        self._traffic = TrafficStats()
        self._handles = count(1)
        self._jobs: dict[int, Job] = {}
        self._waiting: dict[int, Job] = {}
        self._came: dict[int, float] = {}
        self._sat: dict[int, UnstartedRequest] = {}
        for group in range(groups):
            self.opened(group)

    def opened(self, group: int) -> None:
        """Its leader is linked."""
        self._told[group] = GroupReport(key=f"g{group}", group=f"g{group}", served=self._served, page_size=PAGE)

    def closed(self, group: int) -> None:
        """Its link is gone."""
        del self._told[group]

    def follow(self, policy: BalancePolicy) -> None:
        """Newcomers go elsewhere than to the groups that it names."""
        self._balancer.policy = policy
        for told in self._told.values():
            told.draining = told.group in policy.empty

    def crossing(self, streams: Callable[[int], int]) -> Hashable:
        """Hotspots, saturation, and what is emptied."""
        hotspots = frozenset((hotspot.group, hotspot.cause) for hotspot in self._last.hotspots)
        return hotspots, self._last.is_saturated, frozenset(self._emptied(streams))

    def summary(self, streams: Callable[[int], int], now: float) -> RouterSummary:
        """As the router sums itself up."""
        views = zip(self._told, self._look(now), strict=True)
        return RouterSummary(
            router="router",
            groups=[self._group(self._told[group], view, streams(group)) for group, view in views],
            traffic=self._traffic.windows(now),
            queued=len(self._waiting),
            queued_tokens=sum(job.tokens for job in self._waiting.values()),
            held=0,
            idle_s=0.0 if self._jobs else now - (self._traffic.last_s or 0.0),
            ttft=self._traffic.ttft(now),
            itl=Histogram(),
            hotspots=self._last.hotspots,
            fleet_saturated=self._last.is_saturated,
            policy=self._balancer.policy.number,
            emptied=sorted(self._emptied(streams)),
        )

    def _emptied(self, streams: Callable[[int], int]) -> set[str]:
        filled = {told.group for group, told in self._told.items() if streams(group)}
        return set(self._balancer.policy.empty) - filled

    @staticmethod
    def _group(told: GroupReport, view: GroupView, streams: int) -> GroupSummary:
        return GroupSummary(
            group=view.group,
            revision=view.revision,
            state=view.state,
            draining=view.draining,
            streams=streams,
            running=view.running,
            waiting=view.waiting,
            pressure=view.pressure,
            backlog_s=view.backlog_s,
            itl_s=view.itl_s if view.running else 0.0,
            speed=view.speed,
            live_tokens=view.context_tokens,
            total_pages=view.total_pages,
            page_size=view.page_size,
            step_model=told.load.step_model if told.load is not None else [],
        )

    def arrived(self, job: Job, scene: Scene) -> list[Send]:
        """Into the queue, from which `route.dispatch` takes what can go."""
        if job.number not in self._came:
            self._came[job.number] = scene.now
            self._traffic.begin(job.prompt_tokens, scene.now)
        self._jobs[job.number] = self._waiting[job.number] = job
        demand = RequestDemand(job.tokens, OUTPUT_TOKENS)
        self._queue.add(
            QueuedRequest(
                ticket=job.number, demand=demand, arrived_at=self._came[job.number], has_started=job.first_s is not None
            )
        )
        return self.woken(scene)

    def woken(self, scene: Scene) -> list[Send]:
        """What leaves the queue now."""
        sends: list[Send] = []
        while len(self._queue):
            one = next_dispatch(self._queue, self._known(scene, self._views(scene)), scene.now, scene.chance.random())
            if one is None:
                break
            self._queue.remove(one.waiting.ticket)
            del self._waiting[one.waiting.ticket]
            job, group = self._jobs[one.waiting.ticket], int(one.choice.key[1:])
            job.handle = next(self._handles)
            if job.first_s is None:
                self._sat[job.number] = UnstartedRequest(one.waiting, one.choice.key, scene.now)
            if self._has_ledger:
                self._enter(job, group, one.choice.hit_tokens, scene.now)
            sends.append(Send(job, group))
        return sends

    def taken_back(self, scene: Scene) -> list[tuple[Job, int]]:
        """What `route.dispatch` would rather have elsewhere."""
        views = self._views(scene)
        found = find_requeues(list(self._sat.values()), views, self._known(scene, views), scene.now)
        return [(self._jobs[one.unstarted.waiting.ticket], int(one.unstarted.key[1:])) for one in found]

    def _known(self, scene: Scene, views: Sequence[GroupView]) -> DispatchInputs:
        def hits(waiting: QueuedRequest) -> dict[str, int]:
            return {f"g{i}": tokens for i, tokens in enumerate(scene.hits_of(self._jobs[waiting.ticket])) if tokens}

        return DispatchInputs(lambda waiting: views, hits, lambda waiting: frozenset())

    def _views(self, scene: Scene) -> list[GroupView]:
        return [self._balancer.guard.with_departed_load(view, scene.now) for view in self._look(scene.now)]

    def _look(self, now: float) -> list[GroupView]:
        return self._lookout.build(list(self._told.values()), now)

    def _roads(self, now: float) -> list[GroupView]:
        """The views with what transfers reach between these groups."""
        return [replace(view, copy_bytes_per_s=self._copy_bytes_per_s) for view in self._look(now)]

    def _enter(self, job: Job, group: int, hit_tokens: int, now: float) -> None:
        missing = max(1, job.tokens - hit_tokens)
        behind = attended(job.tokens, job.tokens - missing)
        sent = SentRequest(
            prompt_tokens=missing,
            context_tokens=job.tokens,
            pages=-(-missing // PAGE),
            output_tokens=OUTPUT_TOKENS - job.generated,
            attended=behind,
        )
        self._told[group].ledger.dispatch(job.handle, sent, now)

    def started(self, job: Job, group: int, now: float) -> None:
        """It is not taken back any more."""
        self._sat.pop(job.number, None)
        self._traffic.started(now - job.at_s, job.missed, now)

    def reported(self, group: int, load: wire.Load, now: float) -> None:
        """Into the view."""
        self._told[group].report(load, now)

    def ended(self, job: Job, group: int, now: float) -> None:
        """Out of the ledger."""
        self._sat.pop(job.number, None)
        if group in self._told:
            self._told[group].ledger.ended(job.handle)
        if job.ended_s is not None:
            del self._jobs[job.number]
            self._traffic.ended(job.output_tokens, now)

    def tick(self, now: float, engines: Sequence[Engine]) -> list[Wish]:
        """What `balance` proposes."""
        views = self._roads(now)

        def streams(key: str) -> list[StreamView]:
            engine = engines[int(key[1:])]
            return [stream_of(job, key, engine.context_of(job)) for job in engine.decodes.values()]

        self._last = self._balancer.tick(views, streams, now)
        return [self._wish(proposal, engines) for proposal in self._last.proposals]

    def rescue(self, job: Job, group: int, now: float, engines: Sequence[Engine]) -> Wish | None:
        """Where `balance` would take it."""
        key = f"g{group}"
        stream = stream_of(job, key, engines[group].context_of(job))
        answer = self._balancer.rescue(key, stream, self._roads(now), now)
        return self._wish(answer, engines) if isinstance(answer, PlannedMove) else None

    def _wish(self, proposal: PlannedMove, engines: Sequence[Engine]) -> Wish:
        source, target = int(proposal.source[1:]), int(proposal.target[1:])
        job = engines[source].decodes[int(proposal.stream)]
        return Wish(job, source, target, proposal.way, proposal.bytes_per_s, proposal)

    def moved(self, wish: Wish, is_moved: bool, now: float) -> None:
        """Tells `balance` how its proposal ended."""
        self._balancer.ended(cast(PlannedMove, wish.tag), is_moved, now)
        if is_moved and self._has_ledger:
            wish.job.handle = next(self._handles)
            self._enter(wish.job, wish.target, wish.job.tokens if wish.way != "recompute" else 0, now)
