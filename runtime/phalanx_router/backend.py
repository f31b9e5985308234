"""Backend of the API server over all groups: runs each stream from submission to end, in another group after a setback.

    place -> deltas -> end
      ^        |
      +-- setback: the group was lost, or refused the stream

The loss of a group ends the epoch: prompt and delivered tokens go to another group. A refused request keeps its epoch.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set

from phalanx_api import wire
from phalanx_api.summary import StreamList
from phalanx_frontend.backend import BackendError, Delta, KeepAlive, ResumableStream
from phalanx_frontend.tracing.tracer import Tracer
from phalanx_router.decisions import DecisionRecorder
from phalanx_router.dispatch.coalescing import Coalescing
from phalanx_router.dispatch.dispatcher import Dispatcher
from phalanx_router.links.endpoints import LeaderSource
from phalanx_router.links.holders import HolderLinks
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.metrics import RouterMetrics
from phalanx_router.migration.balance_loop import BalanceLoop
from phalanx_router.migration.mover import Mover
from phalanx_router.migration.puller import Puller
from phalanx_router.request_log import RequestLog
from phalanx_router.resume.registry import NO_REPLICATION, StreamRegistry
from phalanx_router.routing.prefixes import prompt_keys
from phalanx_router.session import FleetSettings, StreamEnd, StreamSession, end_of, list_streams
from phalanx_router.streams.stream import GroupLost, Setback, Stream
from phalanx_router.streams.stream_trace import StreamTrace
from phalanx_router.streams.traffic import TrafficStats

ALONE_AFTER = 2
"""Group deaths under a request after which it runs alone."""


class RouterBackend:
    """Implements `phalanx_frontend.backend.Backend`. Bound to one event loop."""

    def __init__(
        self,
        settings: FleetSettings,
        metrics: RouterMetrics,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
        tracer: Tracer | None = None,
    ) -> None:
        self._tracer = tracer
        self.is_draining = False
        self.sessions = dict[StreamSession, None]()  # open streams, in an order that a replayed seed repeats
        self.excused: Counter[str] = Counter()  # group deaths caused by a request, by leader key
        self._blamed: set[tuple[str, str]] = set()  # their leader and group keys
        self.traffic = TrafficStats()
        self.links = LinkPool(settings.link, settings.served_names, metrics, draw)
        self.decisions = DecisionRecorder(settings.recorder, self.links.group_of, clock, settings.link.token.current.encode())
        self.mover = Mover(self.links, self.sessions, settings.link.router, metrics, clock=clock, decisions=self.decisions)
        self.balancing = BalanceLoop(
            self.links, self.sessions, self.mover, metrics.balance, settings, decisions=self.decisions, clock=clock
        )
        self.holders = HolderLinks(self.links.fleet_view, settings.link, settings.holders, draw)
        self.puller = Puller(self.links, self.balancing, settings.link.router, metrics.pulls, clock=clock, holders=self.holders)
        self.dispatcher = Dispatcher(
            settings,
            self.links,
            metrics,
            sessions=self.sessions,
            policy=lambda: self.balancing.policy,
            adjust_view=lambda view: self.puller.with_pulls(self.balancing.with_departed_load(view)),
            pulls=self.puller,
            decisions=self.decisions,
            draw=draw,
            clock=clock,
        )
        self.adapters = self.dispatcher.adapters
        self.balancing.order_adapter = self.adapters.order
        self.dispatcher.cold_start.held_listeners.append(self.balancing.wake)  # requests that have no session yet
        self.balancing.policy_listeners.append(self.adapters.sync)
        self.coalescing = Coalescing(self.dispatcher.quotas, metrics, lambda: self.balancing.policy.coalesce_requests)
        self.balancing.tick_listeners.append(self._apply_decision)
        self.stream_registry = StreamRegistry(self.links, settings, clock)
        self.request_log: RequestLog | None = None  # for a console
        self._by_request: dict[int, StreamSession] = {}  # by identity: clients may repeat ids
        self._settings = settings
        self._metrics = metrics
        self._clock = clock
        self._refuses = False
        self._is_closing = False

    async def generate(self, request: wire.Request, is_exempt: bool = False) -> AsyncIterator[Delta | KeepAlive]:
        """Yields deltas in order, each index once. Closing the iterator aborts the request. Raises BackendError.

        `is_exempt`: the request is the router's own, which counts in no quota and is no arrival for the autoscaler.
        """
        session = self._open_session(request)
        session.charge.is_exempt = is_exempt
        self.sessions[session] = None
        self.balancing.wake()
        self._by_request[id(request)] = session
        if request.can_resume:
            self.stream_registry.opened(session)
        self._metrics.show_streams(len(self.sessions))
        replication = self.stream_registry.replication if request.can_resume else NO_REPLICATION
        end = StreamEnd()
        try:
            self.coalescing.open(session, request)
            if session.is_computing and not is_exempt:
                session.meter = self.traffic.start_request(len(request.prompt), self._clock())
            while end.finish is None:
                item = await self._next(session)
                if isinstance(item, Delta):
                    end.finish = item.finish
                    replication.extended(session)
                yield item
        except Exception as error:
            end.error = error
            raise
        finally:
            del self._by_request[id(request)]
            self._close_session(session, request.can_resume, end)

    async def _next(self, session: StreamSession) -> Delta | KeepAlive:
        """Runs the stream until there is news for its client. Can be cancelled and called again. Raises BackendError."""
        while True:
            if self._is_closing:
                raise self._shutdown_error("the router shuts down before the stream has ended: resume it")
            if session.wait.error is not None:
                raise session.wait.error
            if session.is_waiting and session.stream.is_running and not await self._place(session):
                return KeepAlive()
            await session.stream.wait()
            match session.stream.take():
                case Delta() as delta:
                    now = self._clock()
                    if delta.tokens and session.first_token_at is None:
                        session.first_token_at = now
                    if session.meter is not None:
                        session.meter.record(len(delta.tokens), delta.cached_tokens, now)
                    return delta
                case None:
                    if self.coalescing.is_stalled(session):
                        self.coalescing.leave(session)
                    return KeepAlive()
                case setback:
                    reason = session.stream.journal.finish_reason()
                    if reason is not None:  # all tokens arrived and only the Finished was lost
                        return Delta(index=len(session.stream.journal.delivered), tokens=[], finish=reason)
                    self._handle_setback(session, setback)

    async def _place(self, session: StreamSession) -> bool:
        """Returns whether a group or an equal request computes the stream. Raises BackendError."""
        if session.wait.queued is None:  # its computation has failed
            self.coalescing.enter(session)
        return not session.is_waiting or await self.dispatcher.place(session)

    async def _continue(self, session: StreamSession) -> wire.FinishReason:
        """Computes for the joined sessions of a session that has lost its client. Raises BackendError."""
        while True:
            item = await self._next(session)
            if isinstance(item, Delta) and item.finish is not None:
                return item.finish

    def _open_session(self, request: wire.Request) -> StreamSession:
        """Session of a new, resumed or adopted stream. Raises BackendError."""
        if self._refuses:
            raise self._shutdown_error("the router shuts down and accepts no requests: retry")
        adoption = self.stream_registry.claim(request)
        session = StreamSession(
            stream=Stream(request) if adoption is None else adoption.stream,
            tokenizer=self.links.tokenizer(),
            keys=prompt_keys(request),
            arrived_at=self._clock(),
        )
        journal, failures = session.stream.journal, session.failures
        failures.num_deaths = ALONE_AFTER if journal.is_alone else 0  # a leader does not report the number
        trace = None if self._tracer is None else self._tracer.find(request.trace)
        if trace is not None:
            session.stream.trace = StreamTrace(trace, self._clock)
        if self.request_log is not None:
            session.stream.trace = self.request_log.opened(session, session.stream.trace)
        if adoption is not None:
            journal.attach_pixels(request)
            session.assign(adoption.link, adoption.key, adoption.handle)
            session.stream.trace.adopted(adoption.link.endpoint.group, request.epoch, adoption.num_delivered)
        if request.can_resume and (adoption is not None or request.epoch):
            copy = self.stream_registry.stored_copy(request.id)
            session.charge.is_due = adoption is None and copy is None
            if not session.charge.is_due:
                self.dispatcher.quotas.resume(session)
            if copy is not None:
                session.model_hash, failures.num_deaths = copy.model_hash or None, max(failures.num_deaths, copy.deaths)
                journal.is_alone = failures.num_deaths >= ALONE_AFTER
        return session

    def _close_session(self, session: StreamSession, can_resume: bool, end: StreamEnd) -> None:
        """Ends the stream of a client. Its computation continues if others have joined it and it has not ended."""
        self.coalescing.leave(session)
        if can_resume:
            may_resume = not isinstance(end.error, BackendError) or end.error.can_resume
            self.stream_registry.closed(session, end.finish, may_resume)
        self._metrics.request_ended(end.outcome(session))
        if end.is_by_client and session.sharing.joined and not self._is_closing:
            self.dispatcher.quotas.settle(session)
            session.sharing.background = asyncio.create_task(self._continue(session))
            session.sharing.background.add_done_callback(lambda task: self._end_session(session, end_of(task)))
        else:
            self._end_session(session, end)

    def _end_session(self, session: StreamSession, end: StreamEnd) -> None:
        """Ends the computation of a stream."""
        error = end.error.code if isinstance(end.error, BackendError) else ""
        session.stream.trace.ended(len(session.stream.journal.delivered), error)
        if session.meter is not None:
            session.meter.end(self._clock())
        self.decisions.request_ended(session)
        self.sessions.pop(session, None)
        self.mover.stream_ended(session, "the stream ended")
        if self.request_log is not None:
            self.request_log.closed(session, end.finish or error or ("closed" if end.is_by_client else "failed"))
        if self._is_closing:
            session.detach()
        session.abort()
        self.dispatcher.forget(session)
        self.coalescing.ended(session, end.finish, end.error)
        self._metrics.show_streams(len(self.sessions))

    def _shutdown_error(self, why: str) -> BackendError:
        return BackendError(503, "router_leaving", why, self._settings.retry_after_s, can_resume=True)

    def check_quota(self, tenant: str, prompt_tokens: int) -> None:
        """See `Backend`."""
        self.dispatcher.quotas.check(tenant, prompt_tokens)

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        """Resumable streams of `tenant`. Raises BackendError."""
        if self._refuses:
            raise self._shutdown_error("the router shuts down and accepts no requests: retry")
        return await self.stream_registry.find(ids, tenant)

    def revision_of(self, request: wire.Request) -> str:
        """Identity of the revision that computes the open stream of this very object; empty if unknown."""
        session = self._by_request.get(id(request))
        return "" if session is None else session.computing.revision

    def forget_revisions(self) -> None:
        """Makes the revisions of all present computations unknown."""
        for session in self.sessions:
            session.revision = ""

    def list_streams(self) -> StreamList:
        """Returns open streams, without prompts and outputs."""
        return list_streams(self.sessions, self.mover.board.open(), self.links.group_of, self._clock())

    def refuse(self) -> None:
        """Refuses new requests; open streams continue."""
        self._refuses = True

    def close(self) -> None:
        """Ends open streams with an error that permits a resume."""
        self._refuses = True
        self._is_closing = True
        for session in self.sessions:
            session.stream.wake()
            session.wait.end()

    async def wait_for_assets(self, name: str = "") -> None:
        """Waits for a first group, if requests are held, and for one that holds the adapter `name`. Raises BackendError."""
        await self.dispatcher.cold_start.wait_for_model()
        await self.adapters.wait_for(name)

    def assets(self) -> wire.Assets:
        """Assets of the newest ready group, or the last ones. Raises BackendError 503 before the first."""
        assets = self.links.assets()
        if assets is None:
            raise BackendError(503, "no_group_ready", "no group has reported its model yet: retry", self._settings.retry_after_s)
        return self.adapters.with_adapters(assets)

    def not_ready(self) -> str | None:
        """Why this router should get no clients. Without a ready group it answers 503 with Retry-After itself."""
        if self.is_draining:
            return "the router is shutting down"
        return None if self.links.has_list else "the router has no list of leaders yet"

    async def run(self, source: LeaderSource) -> None:
        """Links to each leader of `source` until cancelled."""
        await self.links.run(source, self._wake_silent(), self.balancing.run(), self.holders.run())

    def _handle_setback(self, session: StreamSession, setback: Setback) -> None:
        """Detaches the stream. Raises BackendError if it may not go to another group."""
        failures = session.failures
        was_running = not session.stream.journal.is_fresh
        self.mover.stream_ended(session, "the stream lost its group")
        link = session.assignment.link if session.assignment is not None else None
        group = link.endpoint.group if link is not None else ""
        failures.lost_group = group if group in self.balancing.policy.without_successor else ""
        session.abort()
        _trace_setback(session.stream.trace, setback, len(session.stream.journal.delivered))
        failures.excluded.add(session.last_key)
        failures.last_setback = setback
        if isinstance(setback, wire.Refused) and not _is_of_group(setback):
            raise BackendError(setback.status, setback.code, setback.message, setback.retry_after_s)
        if isinstance(setback, wire.Refused) and not was_running:
            return
        session.stream.journal.next_epoch()
        self._count_departure(session, setback, link)
        for other in (session, *session.sharing.joined):  # a request may kill each group before its next token
            if other.stream.journal.can_resume:
                self.stream_registry.replication.extended(other)

    def _count_departure(self, session: StreamSession, setback: Setback, link: LeaderLink | None) -> None:
        failures = session.failures
        why, is_drain = (setback.why, setback.is_drain) if isinstance(setback, GroupLost) else (setback.message, False)
        failures.num_departures += 1
        failures.num_losses += not is_drain
        if isinstance(setback, GroupLost) and not is_drain:
            self._count_death(session, setback, link)
        if failures.num_losses > self._settings.max_replays:
            message = f"the stream lost its group {failures.num_losses} times; last: {why}"
            raise BackendError(503, "too_many_replays", message)
        if failures.num_departures > self._settings.max_departures:
            raise BackendError(503, "too_many_moves", f"the stream moved {failures.num_departures} times; last: {why}")

    def _count_death(self, session: StreamSession, lost: GroupLost, link: LeaderLink | None) -> None:
        """Counts a death that the request may have caused; the third one ends the request and excuses all groups.

        If all deaths hit one leader, possibly due to its hardware, no group is excused. A surviving leader that ran only this
        request excuses itself.
        """
        failures, journal = session.failures, session.stream.journal
        was_alone = lost.cause == "alone" and journal.is_alone
        failures.num_deaths += lost.cause == "" or was_alone
        if link is not None and (lost.cause == "" or (was_alone and not link.is_open)):
            failures.blamed_incarnations.add((link.endpoint.key, session.last_key))
        journal.is_alone = failures.num_deaths >= ALONE_AFTER
        if failures.num_deaths > ALONE_AFTER:
            self._excuse(failures.blamed_incarnations)
            groups = f"{failures.num_deaths} groups died while they computed this request"
            raise BackendError(500, "groups_died", f"{groups}, the last one without other requests: {lost.why}")

    def _excuse(self, incarnations: Set[tuple[str, str]]) -> None:
        if len({leader for leader, _ in incarnations}) > 1:
            known = {link.endpoint.key for link in self.links.all()}
            self._blamed = {(leader, incarnation) for leader, incarnation in self._blamed | incarnations if leader in known}
            self.excused = Counter(leader for leader, _ in self._blamed)

    def _apply_decision(self) -> None:
        """Applies the result of a balancing tick to the queue."""
        policy, shed = self.balancing.policy, self.balancing.decision.shed
        self._metrics.show_prefix_keys(self.links.fleet_view.prefixes.num_keys)
        self._metrics.show_states(Counter(view.state for view in self.balancing.views()))
        self.dispatcher.dispatch()  # a silent group becomes open after a while, without an event
        self.dispatcher.quotas.num_routers = max(1, policy.routers)
        if policy.mode in ("Requeue", "Migrate"):
            self.dispatcher.requeue(self.sessions)
        if shed is not None:
            self.decisions.shed(self.dispatcher.shed(shed.bands, shed.retry_after_s, shed.why), shed.why)

    async def _wake_silent(self) -> None:
        """Wakes silent streams to send a KeepAlive, with one timer for all."""
        before: dict[StreamSession, int] = {}
        while True:
            await asyncio.sleep(self._settings.keep_alive_s)
            counts = {session: len(session.stream.journal.delivered) for session in self.sessions}
            for session, count in counts.items():
                if before.get(session) == count:
                    session.stream.wake()
            before = counts


def _is_of_group(refused: wire.Refused) -> bool:
    """Whether another group may accept the stream: this one is full, restarts, or has unloaded the adapter."""
    return refused.status in (429, 503) or refused.code == "model_not_found"


def _trace_setback(trace: StreamTrace, setback: Setback, num_delivered: int) -> None:
    if isinstance(setback, GroupLost):
        trace.lost(setback.why, num_delivered, is_planned=setback.is_drain)
    else:
        trace.refused(setback.message, num_delivered)
