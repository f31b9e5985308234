"""Phalanx: `phalanx_router.routing` chooses and `phalanx_router.balancing` moves, as in the router."""

from collections.abc import Callable, Hashable, Sequence
from dataclasses import replace
from itertools import count
from typing import cast

from bench.simulate.cache import PAGE
from bench.simulate.engine import Engine, Shape
from bench.simulate.jobs import Job
from bench.simulate.load_reports import stream_of
from bench.simulate.policy import MoveOrder, RouterState, Send
from phalanx_api import wire
from phalanx_api.cost import attention_work
from phalanx_api.summary import BalancePolicy, GroupSummary, Histogram, RouterSummary
from phalanx_router.balancing.balancer import BalanceDecision, Balancer
from phalanx_router.balancing.records import PlannedMove, StreamView
from phalanx_router.routing.cost import RequestDemand
from phalanx_router.routing.late_binding import Dispatch, DispatchInputs, UnstartedRequest, find_requeues, next_dispatch
from phalanx_router.routing.ledger import SentRequest
from phalanx_router.routing.queue import QueuedRequest, RequestQueue
from phalanx_router.routing.view import GroupView
from phalanx_router.routing.view_builder import GroupReport, GroupViewBuilder
from phalanx_router.streams.traffic import TrafficStats

OUTPUT_TOKENS = 4096
"""`max_tokens` of requests, because output lengths are unknown in advance."""


class Ours:
    """One router. Without `has_ledger` it ignores what it sent since the last report."""

    def __init__(self, shape: Shape, groups: int, mode: BalancePolicy, has_ledger: bool = True) -> None:
        self._served = wire.Served("model", "layout", PAGE * shape.token_bytes)
        self._reports: dict[int, GroupReport] = {}
        self._view_builder = GroupViewBuilder()
        self._balancer = Balancer(mode)
        self._decision = BalanceDecision()
        self._has_ledger = has_ledger
        self._copy_bytes_per_s = shape.copy_bytes_per_s
        self._queue = RequestQueue()
        self._traffic = TrafficStats()
        self._handles = count(1)
        self._jobs: dict[int, Job] = {}
        self._waiting: dict[int, Job] = {}
        self._arrived_s: dict[int, float] = {}
        self._unstarted: dict[int, UnstartedRequest] = {}
        for group in range(groups):
            self.add_group(group)

    def add_group(self, group: int) -> None:
        self._reports[group] = GroupReport(key=f"g{group}", group=f"g{group}", served=self._served, page_size=PAGE)

    def remove_group(self, group: int) -> None:
        del self._reports[group]

    def apply_policy(self, policy: BalancePolicy) -> None:
        self._balancer.policy = policy
        for report in self._reports.values():
            report.is_draining = report.group in policy.evacuate

    def urgent_state(self, streams: Callable[[int], int]) -> Hashable:
        hotspots = frozenset((hotspot.group, hotspot.cause) for hotspot in self._decision.hotspots)
        return hotspots, self._decision.is_saturated, frozenset(self._drained(streams))

    def summary(self, streams: Callable[[int], int], now: float) -> RouterSummary:
        views = zip(self._reports, self._build_views(now), strict=True)
        return RouterSummary(
            router="router",
            groups=[self._group(self._reports[group], view, streams(group)) for group, view in views],
            traffic=self._traffic.windows(now),
            queued=len(self._waiting),
            queued_tokens=sum(job.tokens for job in self._waiting.values()),
            held=0,
            idle_s=0.0 if self._jobs else now - (self._traffic.last_active_at or 0.0),
            ttft=self._traffic.ttft(now),
            itl=Histogram(),
            hotspots=self._decision.hotspots,
            fleet_saturated=self._decision.is_saturated,
            policy=self._balancer.policy.number,
            evacuated=sorted(self._drained(streams)),
        )

    def _drained(self, streams: Callable[[int], int]) -> set[str]:
        occupied = {report.group for group, report in self._reports.items() if streams(group)}
        return set(self._balancer.policy.evacuate) - occupied

    @staticmethod
    def _group(report: GroupReport, view: GroupView, streams: int) -> GroupSummary:
        return GroupSummary(
            group=view.group,
            revision=view.revision,
            state=view.state,
            draining=view.is_draining,
            streams=streams,
            running=view.load.running,
            waiting=view.load.waiting,
            pressure=view.pressure,
            backlog_s=view.backlog_s,
            itl_s=view.itl_s if view.load.running else 0.0,
            speed=view.speed,
            live_tokens=view.load.context_tokens,
            total_pages=view.capacity.total_pages,
            page_size=view.capacity.page_size,
            step_model=report.load.step_model if report.load is not None else [],
            max_num_seqs=view.capacity.max_num_seqs,
            max_num_batched_tokens=view.capacity.max_num_batched_tokens,
            prompt_tokens_per_step=view.load.prompt_tokens_per_step,
            preemptions=report.load.preemptions if report.load is not None else 0,
            page_bytes=view.capacity.page_bytes,
        )

    def job_arrived(self, job: Job, state: RouterState) -> list[Send]:
        if job.number not in self._arrived_s:
            self._arrived_s[job.number] = state.now
            self._traffic.start_request(job.prompt_tokens, state.now)
        self._jobs[job.number] = self._waiting[job.number] = job
        demand = RequestDemand(job.tokens, OUTPUT_TOKENS)
        self._queue.add(
            QueuedRequest(
                ticket=job.number, demand=demand, arrived_at=self._arrived_s[job.number], has_started=job.first_s is not None
            )
        )
        return self.dispatch(state)

    def dispatch(self, state: RouterState) -> list[Send]:
        sends: list[Send] = []
        while len(self._queue):
            dispatch = next_dispatch(self._queue, self._dispatch_inputs(state, self._views(state)), state.now, state.rng.random())
            if dispatch is None:
                break
            self.decided(dispatch, state.now)
            self._queue.remove(dispatch.queued.ticket)
            del self._waiting[dispatch.queued.ticket]
            job, group = self._jobs[dispatch.queued.ticket], int(dispatch.choice.key[1:])
            job.handle = next(self._handles)
            if job.first_s is None:
                self._unstarted[job.number] = UnstartedRequest(dispatch.queued, dispatch.choice.key, state.now)
            if self._has_ledger:
                self._record_in_ledger(job, group, dispatch.choice.hit_tokens, state.now)
            sends.append(Send(job, group))
        return sends

    def decided(self, dispatch: Dispatch, now: float) -> None:
        """Does nothing; for records."""

    def requeues(self, state: RouterState) -> list[tuple[Job, int]]:
        views = self._views(state)
        requeues = find_requeues(list(self._unstarted.values()), views, self._dispatch_inputs(state, views), state.now)
        return [(self._jobs[requeue.unstarted.queued.ticket], int(requeue.unstarted.key[1:])) for requeue in requeues]

    def _dispatch_inputs(self, state: RouterState, views: Sequence[GroupView]) -> DispatchInputs:
        def hits(waiting: QueuedRequest) -> dict[str, int]:
            return {f"g{i}": tokens for i, tokens in enumerate(state.hits_of(self._jobs[waiting.ticket])) if tokens}

        return DispatchInputs(lambda waiting: views, hits, lambda waiting: frozenset())

    def _views(self, state: RouterState) -> list[GroupView]:
        return [self._balancer.attraction.with_departed_load(view, state.now) for view in self._build_views(state.now)]

    def _build_views(self, now: float) -> list[GroupView]:
        return self._view_builder.build(list(self._reports.values()), now)

    def _transfer_views(self, now: float) -> list[GroupView]:
        return [replace(view, copy_bytes_per_s=self._copy_bytes_per_s) for view in self._build_views(now)]

    def _record_in_ledger(self, job: Job, group: int, hit_tokens: int, now: float) -> None:
        missing = max(1, job.tokens - hit_tokens)
        attention = attention_work(job.tokens, job.tokens - missing)
        sent = SentRequest(
            prompt_tokens=missing,
            context_tokens=job.tokens,
            pages=-(-missing // PAGE),
            attention=attention,
        )
        self._reports[group].ledger.dispatch(job.handle, sent, now)

    def first_token(self, job: Job, group: int, now: float) -> None:
        self._unstarted.pop(job.number, None)
        self._traffic.record_first_tokens(now - job.at_s, job.missed, now)

    def load_reported(self, group: int, load: wire.Load, now: float) -> None:
        self._reports[group].record(load, now)

    def job_left(self, job: Job, group: int, now: float) -> None:
        self._unstarted.pop(job.number, None)
        if group in self._reports:
            self._reports[group].ledger.end(job.handle)
        if job.ended_s is not None:
            del self._jobs[job.number]
            self._traffic.record_end(job.output_tokens, now)

    def tick(self, now: float, engines: Sequence[Engine]) -> list[MoveOrder]:
        views = self._transfer_views(now)

        def streams(key: str) -> list[StreamView]:
            engine = engines[int(key[1:])]
            return [stream_of(job, key, engine.context_of(job)) for job in engine.decodes.values()]

        self._decision = self._balancer.tick(views, streams, now)
        return [self._to_order(planned, engines) for planned in self._decision.moves]

    def rescue(self, job: Job, group: int, now: float, engines: Sequence[Engine]) -> MoveOrder | None:
        key = f"g{group}"
        stream = stream_of(job, key, engines[group].context_of(job))
        answer = self._balancer.rescue(key, stream, self._transfer_views(now), now)
        return self._to_order(answer, engines) if isinstance(answer, PlannedMove) else None

    def _to_order(self, planned: PlannedMove, engines: Sequence[Engine]) -> MoveOrder:
        source, target = int(planned.source[1:]), int(planned.target[1:])
        job = engines[source].decodes[int(planned.stream)]
        return MoveOrder(job, source, target, planned.transfer, planned.bytes_per_s, planned)

    def move_ended(self, order: MoveOrder, is_moved: bool, now: float) -> None:
        self._balancer.record_end(cast(PlannedMove, order.tag), is_moved, now)
        if is_moved and self._has_ledger:
            order.job.handle = next(self._handles)
            self._record_in_ledger(order.job, order.target, order.job.tokens if order.mode != "recompute" else 0, now)
