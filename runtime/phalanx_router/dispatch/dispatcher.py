"""Queues streams and sends each to the group that `routing.late_binding` chooses.

A full queue answers 429. Without a group a started stream waits up to `patience_s`. A new request fails immediately, so that the
client can retry, unless a group is expected (`cold_start`). A group that is being emptied gets no new requests even if it is the
only one, or it would never become empty. The queue is processed when a request arrives and when a group reports or changes.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from phalanx_api import wire
from phalanx_frontend.backend import BackendError
from phalanx_router.dispatch.cold_start import ColdStartHold
from phalanx_router.dispatch.tenants import TenantQuotas
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.choose import Choice, RoundRobin, canary_groups
from phalanx_router.routing.cost import DEFAULT_OUTPUT_TOKENS
from phalanx_router.routing.late_binding import DispatchInputs, UnstartedRequest, find_requeues, is_open, next_dispatch
from phalanx_router.routing.queue import QueuedRequest, RequestQueue, check_bounds, predict_drain_s
from phalanx_router.routing.view import GroupView, is_stale
from phalanx_router.session import FleetSettings, StreamSession
from phalanx_router.streams.stream import GroupLost

log = logging.getLogger(__name__)


class Dispatcher:
    """Assigns streams to groups. `queue`: the waiting ones."""

    def __init__(
        self,
        settings: FleetSettings,
        links: LinkPool,
        metrics: RouterMetrics,
        draw: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.burden: Callable[[GroupView], GroupView] = lambda view: view
        """Returns the view that routing uses: a group that just gave requests away does not look free immediately."""
        self.queue = RequestQueue()
        self.num_shed = 0
        """Requests refused because of overload since the start."""
        self.tenants = TenantQuotas(metrics, clock)
        self.cold_start = ColdStartHold(settings, links, metrics, clock)
        self._settings = settings
        self._links = links
        self._metrics = metrics
        self._draw = draw
        self._clock = clock
        self._runs: dict[int, StreamSession] = {}
        self._alone: set[StreamSession] = set()
        self._tickets = 0
        self._cached_views: dict[str, Sequence[GroupView]] = {}
        self._turns = RoundRobin()
        self._dispatch_inputs = DispatchInputs(self._views_of, self._hits_of, self._excluded_of, self._last_turns)
        links.load_listeners.append(self.dispatch)

    async def place(self, run: StreamSession) -> bool:
        """Returns whether the stream was sent to a group; if not, the caller may try again. Raises BackendError."""
        if run.waiting is None or run.waiting.ticket not in self._runs:
            self._enqueue(run)
        self.dispatch()
        if run.link is None and run.error is None:
            await self._wait(run, self._may_wait_s(run))
        if run.error is not None:
            raise run.error
        return run.link is not None

    def forget(self, run: StreamSession) -> None:
        """Removes a stream that ends from the queue and settles its tenant's charge."""
        if run.waiting is not None:
            self.queue.remove(run.waiting.ticket)
            self._runs.pop(run.waiting.ticket, None)
            self._show()
        self.tenants.end(run)
        self._release_hold(run)
        if run.charged:
            used = len(run.stream.journal.delivered)
            self.queue.charge(run.stream.journal.tenant, 0, used - run.charged)

    def dispatch(self) -> None:
        """Sends every queued stream that a group accepts now."""
        now = self._clock()
        while len(self.queue):
            self._cached_views.clear()
            found = next_dispatch(self.queue, self._dispatch_inputs, now, self._draw())
            if found is None:
                return
            run = self._runs[found.waiting.ticket]
            self.queue.remove(found.waiting.ticket)
            try:
                self._send(run, found.choice, now)
            except Exception as error:  # the error belongs to this request, not to the caller of `dispatch`
                run.give_up(error)
            del self._runs[found.waiting.ticket]
            self._show()

    def submit(self, run: StreamSession, key: str, link: LeaderLink, hit_tokens: int = 0) -> None:
        """Submits the stream to the group with key `key`, as a replay of its journal."""
        request = run.replay(self._clock())
        run.handle = link.submit(request, run.stream, hit_tokens=hit_tokens)
        run.link, run.group, run.model_hash = link, key, link.group_report.served.model_hash
        if request.alone:
            self._alone.add(run)
        if request.delivered or run.moves:
            self._metrics.replayed()
            log.info("stream replayed", extra={"request": request.id, "group": link.endpoint.group, "epoch": request.epoch})

    def begun(self, run: StreamSession) -> None:
        """Registers a stream that was adopted from the group that runs it."""
        if run.stream.journal.is_alone:
            self._alone.add(run)

    def requeue(self, runs: Collection[StreamSession]) -> int:
        """Takes streams without a token back from their groups if another group is much better; returns their number."""
        unstarted = {run.waiting.ticket: run for run in runs if run.waiting is not None and run.is_unstarted}
        candidates = [
            UnstartedRequest(run.waiting, run.group, run.sent_at) for run in unstarted.values() if run.waiting is not None
        ]
        self._runs.update(unstarted)
        self._cached_views.clear()
        found = find_requeues(candidates, self._views_of_all(), self._dispatch_inputs, self._clock())
        for taken in found:
            run = unstarted[taken.unstarted.waiting.ticket]
            log.debug("request taken back", extra={"request": run.stream.journal.id, "group": run.group, "why": taken.why})
            run.abort()  # later tokens of that group are dropped, so the epoch need not increase
            self._enqueue(run)
            self._metrics.requeued()
        for ticket in unstarted.keys() - {taken.unstarted.waiting.ticket for taken in found}:
            del self._runs[ticket]
        self.dispatch()
        return len(found)

    def shed(self, bands: int, retry_after_s: float, why: str) -> int:
        """Refuses all new requests in the lowest `bands` priority bands of the queue; returns their number."""
        refused = [self._runs[waiting.ticket] for waiting in self.queue.of_bands(self.queue.bands[-bands:] if bands else [])]
        for run in refused:
            self._refuse(run, BackendError(429, "overloaded", why, retry_after_s))
        return len(refused)

    def _enqueue(self, run: StreamSession) -> None:
        """Adds the stream to the queue. Raises BackendError 429 if the queue is full."""
        journal, before = run.stream.journal, run.waiting
        self._tickets += before is None
        ticket, arrived_at = (self._tickets, self._clock()) if before is None else (before.ticket, before.arrived_at)
        has_started = bool(run.group or journal.delivered or journal.epoch)
        waiting = QueuedRequest(
            ticket=ticket,
            demand=journal.demand(),
            arrived_at=arrived_at,
            tenant=journal.tenant,
            priority=journal.priority,
            has_started=has_started,
            kind=_kind(run),
        )
        if not has_started:
            self._admit(waiting)
            self.tenants.begin(run)
        run.waiting = waiting
        self._runs[ticket] = run
        self.queue.add(waiting)
        self._show()

    def _admit(self, waiting: QueuedRequest) -> None:
        """Refuses a request if the queue is full. Raises BackendError 429 if that is the new one."""
        full = check_bounds(self.queue, waiting, self._settings.queue)
        if full is None:
            return
        views = self._links.fleet_view.views(self._links.serving())
        error = BackendError(429, "queue_full", full.why, predict_drain_s(self.queue, views) or self._settings.retry_after_s)
        if full.instead is None:
            self._count_shed(error.code)
            raise error
        self._refuse(self._runs[full.instead.ticket], error)

    def _refuse(self, run: StreamSession, error: BackendError) -> None:
        """Ends the wait of a new request with an error."""
        self._count_shed(error.code)
        self.forget(run)
        if run.wait_ended is not None and not run.wait_ended.done():
            run.wait_ended.set_exception(error)

    def _count_shed(self, code: str) -> None:
        self.num_shed += 1
        self._metrics.shed(code)

    def _send(self, run: StreamSession, choice: Choice, now: float) -> None:
        """Sends a queued stream to the chosen group."""
        assert run.waiting is not None, "`dispatch` removed it from the queue"
        waiting = run.waiting
        self._metrics.chosen(choice.reason)
        if not waiting.has_started:
            self._metrics.waited(now - waiting.arrived_at)
        if not run.charged:
            run.charged = int(min(waiting.demand.output_tokens, DEFAULT_OUTPUT_TOKENS))
            self.queue.charge(waiting.tenant, waiting.demand.prompt_tokens, run.charged)
        run.sent_at, run.unassigned_since = now, None
        self._release_hold(run)
        link = self._eligible(run)[choice.key]
        self._turns.take(choice.key)
        self.submit(run, choice.key, link, self._held_tokens(run, choice, link))
        if run.wait_ended is not None and not run.wait_ended.done():
            run.wait_ended.set_result(None)

    async def _wait(self, run: StreamSession, timeout_s: float) -> None:
        """Returns when the stream was sent or after `timeout_s`. Raises BackendError if it was refused."""
        run.wait_ended = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await run.wait_ended
        except TimeoutError:
            if run.unassigned_since is not None:
                run.excluded.clear()
        finally:
            run.wait_ended = None

    def _may_wait_s(self, run: StreamSession) -> float:
        """Returns the seconds until the next look at this stream. Raises BackendError if no group will take it."""
        keys = self._eligible(run).keys()
        if keys - run.excluded:
            run.unassigned_since = None
            return self._settings.keep_alive_s
        if not keys and run.lost_group and run.stream.journal.delivered and not self._can_weights_return(run.model_hash):
            raise _weights_gone(run)
        is_silent = not keys and self._is_silent(run)
        is_leaving = not keys and not is_silent and bool(self._links.eligible(run.tokenizer))
        why = "every group is being emptied" if is_leaving else "no group is ready"
        why = f"each of {len(keys)} ready groups failed or refused this request" if keys else why
        why = "no group reports its load, and spec.router.failureMode is FailClosed" if is_silent else why
        now = self._clock()
        if run.unassigned_since is None:
            run.unassigned_since = now
        patience_s = self._settings.patience_s if run.has_started else 0.0 if keys or is_silent else self.cold_start.hold_s
        if is_leaving:  # the operator decides within this time whether another group starts
            patience_s = max(patience_s, self._settings.retry_after_s)
        left_s = run.unassigned_since + patience_s - now
        if left_s <= 0:
            raise self._no_group(run, why, patience_s)
        if not run.has_started and not run.is_held and self.cold_start.hold_s:
            self.cold_start.hold()
            run.is_held = True
        return min(self._settings.refusal_pause_s if keys else self._settings.keep_alive_s, left_s)

    def _can_weights_return(self, model_hash: str | None) -> bool:
        """Whether a group that stays has these weights or has not reported its model yet.

        If no group that stays is known, a wanted group may come with these weights.
        """
        policy = self.cold_start.policy()
        staying = [link for link in self._links.all() if not link.endpoint.leaving and link.endpoint.group not in policy.for_good]
        hashes = {link.group_report.served.model_hash for link in staying}
        return bool(hashes & {"", model_hash}) if hashes else policy.wanted

    def _is_silent(self, run: StreamSession) -> bool:
        """Whether groups would take this new request but do not report their load, and the policy fails closed."""
        links = self._links.eligible(run.tokenizer)
        is_closed = not run.has_started and not self.cold_start.policy().fails_open
        return is_closed and any(not self._links.fleet_view.is_leaving(link) for link in links.values())

    def _release_hold(self, run: StreamSession) -> None:
        if run.is_held:
            run.is_held = False
            self.cold_start.release()

    def _no_group(self, run: StreamSession, why: str, waited_s: float) -> BackendError:
        """Returns the error when no group takes the request: the last refusal by a group, if there was one."""
        why = f"{why} after {waited_s:g} s" if waited_s else why
        match run.last_setback:
            case wire.Refused(handle=_, epoch=_, status=status, code=code, message=message, retry_after_s=retry_after_s):
                return BackendError(status, code, message, retry_after_s or self._settings.retry_after_s)
            case GroupLost(lost_why):
                why = f"{why}; earlier: {lost_why}"
        return BackendError(503, "no_group_ready", why, self._settings.retry_after_s)

    def _eligible(self, run: StreamSession) -> dict[str, LeaderLink]:
        """Returns the groups that may take the stream. Groups that are being emptied or are silent take only started streams."""
        links = self._links.eligible(run.tokenizer, run.model_hash if run.stream.journal.delivered else None)
        if run.has_started:
            return links
        staying = {key: link for key, link in links.items() if not self._links.fleet_view.is_leaving(link)}
        return self._canary_share(run, self._reporting(run, staying))

    def _reporting(self, run: StreamSession, links: dict[str, LeaderLink]) -> dict[str, LeaderLink]:
        """Returns the links with a recent load report if the policy fails closed, otherwise all of `links`."""
        if self.cold_start.policy().fails_open:
            return links
        silent = {view.key for view in self._views(f"{_kind(run)} {sorted(links)}", links) if is_stale(view.state)}
        return {key: link for key, link in links.items() if key not in silent}

    def _canary_share(self, run: StreamSession, links: dict[str, LeaderLink]) -> dict[str, LeaderLink]:
        """During a canary rollout, returns the links of the revision that the request's canary draw selects.

        If all groups of that revision are busy, the other revision takes the request, or it would block the queue.
        """
        policy = self.cold_start.policy()
        if not policy.canary:
            return links
        if run.canary_draw is None:
            run.canary_draw = self._draw()
        revisions = {key: link.revision for key, link in links.items()}
        closed = {view.key for view in self._views(f"{_kind(run)} {sorted(links)}", links) if not is_open(view)}
        kept = canary_groups(
            revisions, policy.canary, policy.canary_percent, run.canary_draw, excluded=run.excluded, closed=closed
        )
        return {key: link for key, link in links.items() if key in kept}

    def _excluded_of(self, waiting: QueuedRequest) -> frozenset[str]:
        """Returns the groups that failed or refused the request.

        A request that runs alone also avoids groups with another such request of this router, so that a death of the group has
        one suspect.
        """
        run = self._runs[waiting.ticket]
        if not run.stream.journal.is_alone:
            return frozenset(run.excluded)
        self._alone = {other for other in self._alone if other.link is not None}
        return frozenset(run.excluded | {other.group for other in self._alone if other is not run})

    def _views_of(self, waiting: QueuedRequest) -> Sequence[GroupView]:
        """Returns the views of the eligible groups, computed once for all requests of one kind until the next is sent."""
        run = self._runs[waiting.ticket]
        kind = _kind(run)
        links = None
        if self._has_group_filter():
            links = self._eligible(run)
            kind = f"{kind} {sorted(links)}"
        if kind in self._cached_views:
            return self._cached_views[kind]
        return self._views(kind, self._eligible(run) if links is None else links)

    def _views(self, kind: str, links: Mapping[str, LeaderLink]) -> Sequence[GroupView]:
        """Returns the current views of the groups, computed once per kind."""
        if kind not in self._cached_views:
            self._cached_views[kind] = self._look(list(links.values()))
        return self._cached_views[kind]

    def _views_of_all(self) -> list[GroupView]:
        """Returns views of all groups that may have requests, including those that are being emptied."""
        return self._look([link for link in self._links.open_links() if link.is_serving or link.state.draining])

    def _look(self, links: Sequence[LeaderLink]) -> list[GroupView]:
        return [self.burden(view) for view in self._links.fleet_view.views(links)]

    def _hits_of(self, waiting: QueuedRequest) -> Mapping[str, int]:
        run = self._runs[waiting.ticket]
        return self._links.fleet_view.hits(run.keys, self._eligible(run)) if self._is_prefix_aware() else {}

    def _held_tokens(self, run: StreamSession, choice: Choice, link: LeaderLink) -> int:
        """Returns the prompt tokens in the prefix cache of the chosen group."""
        if self._is_prefix_aware():
            return choice.hit_tokens
        return self._links.fleet_view.hits(run.keys, {choice.key: link}).get(choice.key, 0)

    def _is_prefix_aware(self) -> bool:
        return self.cold_start.policy().routing == "PrefixAware"

    def _has_group_filter(self) -> bool:
        """Whether the eligible groups of a request depend on more than its kind."""
        policy = self.cold_start.policy()
        return bool(policy.canary) or not policy.fails_open

    def _last_turns(self) -> Mapping[str, int] | None:
        return self._turns.last if self.cold_start.policy().routing == "RoundRobin" else None

    def _show(self) -> None:
        self._metrics.show_queue(len(self.queue), self.queue.tokens)


def _weights_gone(run: StreamSession) -> BackendError:
    """Returns the error of a stream that no remaining group can continue, because its weights differ."""
    who = f"{run.lost_group}, the last group with the weights that started this stream, does not exist any more"
    return BackendError(
        503, "weights_gone", f"{who}: the stream had spec.drain.timeoutSeconds to finish there; send the request again"
    )


def _kind(run: StreamSession) -> str:
    """Returns the inputs of `_eligible` as a key: the tokenizer, the weights that sampled its tokens, and whether it has
    started."""
    return f"{run.tokenizer}/{run.model_hash if run.stream.journal.delivered else None}/{run.has_started}"
