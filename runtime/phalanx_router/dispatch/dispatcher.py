"""Queues streams and sends each to the group that `routing.late_binding` chooses.

The queue is processed when a request arrives and when a group reports or changes. A full queue answers 429.
"""

import asyncio
import logging
from collections.abc import Callable, Collection
from typing import Protocol

from phalanx_api.summary import BalancePolicy
from phalanx_frontend.backend import BackendError
from phalanx_router.decisions import DecisionRecorder
from phalanx_router.dispatch.adapters import FleetAdapters
from phalanx_router.dispatch.candidates import CandidateGroups, kind_of
from phalanx_router.dispatch.limits import ColdStartHold, TenantQuotas, WaitLimit
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.choose import Choice
from phalanx_router.routing.cost import DEFAULT_OUTPUT_TOKENS
from phalanx_router.routing.late_binding import DispatchInputs, UnstartedRequest, find_requeues, next_dispatch
from phalanx_router.routing.queue import QueuedRequest, RequestQueue, check_bounds, predict_drain_s
from phalanx_router.routing.view import GroupView
from phalanx_router.session import FleetSettings, StreamSession

log = logging.getLogger(__name__)


class Pulls(Protocol):
    """Copies pages of a prompt from another group. Implemented by `migration.puller.Puller`."""

    def start(self, session: StreamSession, link: LeaderLink, on_end: Callable[[str, int], None]) -> bool:
        """Whether the request waits for pages; `on_end` then starts it with a move and the number of tokens at its group."""
        ...

    def cancel(self, session: StreamSession) -> None:
        """Ends the wait of a stream that ended, if it waits."""
        ...


class Dispatcher:
    """Assigns streams to groups. `adjust_view` returns the view for routing."""

    def __init__(
        self,
        settings: FleetSettings,
        links: LinkPool,
        metrics: RouterMetrics,
        *,
        sessions: Collection[StreamSession],
        policy: Callable[[], BalancePolicy],
        adjust_view: Callable[[GroupView], GroupView],
        pulls: Pulls,
        decisions: DecisionRecorder,
        draw: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.queue = RequestQueue()
        self.quotas = TenantQuotas(metrics, clock)
        self.cold_start = ColdStartHold(settings, links, metrics, policy, clock)
        self._settings = settings
        self._links = links
        self._metrics = metrics
        self._pulls = pulls
        self._decisions = decisions
        self._draw = draw
        self._clock = clock
        self.adapters = FleetAdapters(settings, links, self.cold_start, policy, clock, check_room=self._check_room)
        self._candidates = CandidateGroups(links, sessions, policy, adjust_view, draw)
        self._wait_limit = WaitLimit(settings, self._candidates, self.cold_start, self.adapters.order, clock)
        self._sessions: dict[int, StreamSession] = {}  # by ticket
        self._last_ticket = 0
        self._inputs = DispatchInputs(
            lambda queued: self._candidates.views(self._sessions[queued.ticket]),
            lambda queued: self._candidates.hits(self._sessions[queued.ticket]),
            lambda queued: self._candidates.excluded(self._sessions[queued.ticket]),
            self._candidates.last_turns,
        )
        links.load_listeners.append(self.dispatch)

    async def place(self, session: StreamSession) -> bool:
        """Returns whether the stream was sent to a group. Raises BackendError."""
        wait = session.wait
        is_queued = wait.queued is not None and wait.queued.ticket in self._sessions
        if not is_queued and not session.moves.open_pull:
            self._enqueue(session)
        self.dispatch()
        if session.assignment is None and wait.error is None:
            is_pulling = bool(session.moves.open_pull)
            await self._wait(session, self._settings.keep_alive_s if is_pulling else self._wait_limit.next_check_s(session))
        if wait.error is not None:
            raise wait.error
        return session.assignment is not None

    def forget(self, session: StreamSession) -> None:
        """Removes an ending stream and settles its charges."""
        self._pulls.cancel(session)
        if session.wait.queued is not None:
            self.queue.remove(session.wait.queued.ticket)
            self._sessions.pop(session.wait.queued.ticket, None)
            self._show_queue()
        self.quotas.settle(session)
        self._wait_limit.release_hold(session)
        if session.charge.output_tokens:
            journal = session.stream.journal
            self.queue.charge(journal.tenant, 0, len(journal.delivered) - session.charge.output_tokens)

    def dispatch(self) -> None:
        """Sends every queued stream that a group accepts now."""
        now = self._clock()
        while len(self.queue):
            self._candidates.refresh()
            found = next_dispatch(self.queue, self._inputs, now, self._draw())
            if found is None:
                return
            session = self._sessions[found.queued.ticket]
            self.queue.remove(found.queued.ticket)
            try:
                self._send(session, found.queued, found.choice, now)
            except Exception as error:  # the error belongs to this request, not to the caller of `dispatch`
                session.give_up(error)
            del self._sessions[found.queued.ticket]
            self._show_queue()

    def submit(self, session: StreamSession, key: str, link: LeaderLink, hit_tokens: int = 0, move: str = "") -> None:
        """Submits a replay of the stream to group `key`, which has `hit_tokens` of it, those of pull `move` included."""
        request = session.replay(self._clock())
        session.assign(link, key, link.submit(request, session.stream, move, hit_tokens))
        session.stream.trace.sent(link.endpoint.group, request.epoch)
        session.model_hash = link.group_report.served.model_hash
        if request.delivered or session.failures.num_departures:
            self._metrics.replayed()
            fields = {"request": request.id, "group": link.endpoint.group, "epoch": request.epoch}
            log.info("stream replayed", extra=fields | session.stream.trace.log_fields)

    def requeue(self, sessions: Collection[StreamSession]) -> int:
        """Takes streams without a token back for a much better group; returns their number."""
        unstarted = {
            session.wait.queued.ticket: session
            for session in sessions
            if session.wait.queued is not None and session.is_unstarted
        }
        requests = [
            UnstartedRequest(session.wait.queued, session.last_key, session.wait.sent_at)
            for session in unstarted.values()
            if session.wait.queued is not None
        ]
        self._sessions.update(unstarted)
        self._candidates.refresh()
        requeues = find_requeues(requests, self._candidates.assigned_views(), self._inputs, self._clock()) if requests else []
        for requeue in requeues:
            session = unstarted[requeue.unstarted.queued.ticket]
            fields = {"request": session.stream.journal.id, "group": session.last_key, "why": requeue.why}
            log.debug("request taken back", extra=fields)
            session.abort()  # later tokens of that group are dropped, so the epoch need not increase
            self._enqueue(session)
            self._metrics.requeued()
        for ticket in unstarted.keys() - {requeue.unstarted.queued.ticket for requeue in requeues}:
            del self._sessions[ticket]
        self.dispatch()
        return len(requeues)

    def shed(self, bands: int, retry_after_s: float, why: str) -> int:
        """Refuses new requests in the lowest `bands` bands; returns their number."""
        queued = self.queue.in_bands(self.queue.bands[-bands:] if bands else [])
        for session in [self._sessions[request.ticket] for request in queued]:
            self._refuse(session, BackendError(429, "overloaded", why, retry_after_s))
        return len(queued)

    def _enqueue(self, session: StreamSession) -> None:
        """Adds the stream at its earlier position, if any. Raises BackendError 429."""
        journal, before = session.stream.journal, session.wait.queued
        self._last_ticket += before is None
        ticket, arrived_at = (self._last_ticket, self._clock()) if before is None else (before.ticket, before.arrived_at)
        queued = QueuedRequest(
            ticket=ticket,
            demand=journal.demand(),
            arrived_at=arrived_at,
            tenant=journal.tenant,
            priority=journal.priority,
            has_started=bool(session.last_key or journal.delivered or journal.epoch) and not session.charge.is_due,
            kind=kind_of(session),
        )
        if not queued.has_started:
            self._check_bounds(queued)
            self.quotas.charge(session)
        session.wait.queued, session.wait.unassigned_since = queued, None
        session.stream.trace.queued()
        self._sessions[ticket] = session
        self.queue.add(queued)
        self._show_queue()

    def _check_bounds(self, queued: QueuedRequest) -> None:
        """Refuses a request if the queue is full. Raises BackendError 429 for the new one."""
        full = check_bounds(self.queue, queued, self._settings.queue)
        if full is None:
            return
        views = self._links.fleet_view.views(self._links.serving())
        error = BackendError(429, "queue_full", full.why, predict_drain_s(self.queue, views) or self._settings.retry_after_s)
        if full.displaced is None:
            self._metrics.shed(error.code)
            raise error
        self._refuse(self._sessions[full.displaced.ticket], error)

    def _check_room(self, num_waiting: int) -> None:
        """Refuses one more request that waits for an adapter, if these and the queue are full. Raises BackendError 429."""
        if num_waiting + self.queue.num_unstarted >= self._settings.queue.max_requests:
            self._metrics.shed("queue_full")
            why = f"{num_waiting} requests wait for adapters, and {self.queue.num_unstarted} are queued"
            raise BackendError(429, "queue_full", why, self._settings.retry_after_s)

    def _refuse(self, session: StreamSession, error: BackendError) -> None:
        self._metrics.shed(error.code)
        self.forget(session)
        completion = session.wait.completion
        if completion is not None and not completion.done():
            completion.set_exception(error)

    def _send(self, session: StreamSession, queued: QueuedRequest, choice: Choice, now: float) -> None:
        wait, charge = session.wait, session.charge
        self._metrics.chosen(choice.reason)
        journal, waited_s = session.stream.journal, now - queued.arrived_at
        self._decisions.dispatched(journal.id, choice, prompt_tokens=queued.demand.prompt_tokens, waited_s=waited_s)
        if not queued.has_started:
            self._metrics.waited(waited_s)
            if session.meter is not None:
                session.meter.dispatch(waited_s, now)
        if not charge.output_tokens:
            charge.output_tokens = int(min(queued.demand.output_tokens, DEFAULT_OUTPUT_TOKENS))
            self.queue.charge(queued.tenant, queued.demand.prompt_tokens, charge.output_tokens)
        wait.sent_at, wait.unassigned_since = now, None
        self._wait_limit.release_hold(session)
        link = self._candidates.eligible(session)[choice.key]
        self._candidates.record_turn(link)
        hit_tokens = self._candidates.hit_tokens(session, choice, link)
        session.stream.trace.chosen(link.endpoint.group, choice.reason)

        def start(move: str, num_cached: int) -> None:
            self._start_pulled(session, choice.key, link, move, max(hit_tokens, num_cached))

        if not self._pulls.start(session, link, start):
            self.submit(session, choice.key, link, hit_tokens)
            wait.end()
        else:
            session.stream.trace.pulling()

    def _start_pulled(self, session: StreamSession, key: str, link: LeaderLink, move: str, hit_tokens: int) -> None:
        """Sends a stream that has waited for pages, unless its group accepts no more requests: then it is queued again."""
        try:
            if self._candidates.eligible(session).get(key) is link:
                self.submit(session, key, link, hit_tokens, move)
        except Exception as error:  # the error belongs to this request, not to the pull
            session.give_up(error)
        session.wait.end()

    async def _wait(self, session: StreamSession, timeout_s: float) -> None:
        """Waits until the stream was sent or `timeout_s`. Raises BackendError."""
        wait = session.wait
        wait.completion = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await wait.completion
        except TimeoutError:
            if wait.unassigned_since is not None:
                session.failures.excluded.clear()
        finally:
            wait.completion = None

    def _show_queue(self) -> None:
        self._metrics.show_queue(len(self.queue), self.queue.prompt_tokens)
