"""Where a stream goes, and when: it waits in the queue until `route.dispatch` gives it to a group.

A full queue answers 429. With no group at all a running stream waits up to `patience_s`; a request that no group ever took is
answered at once, so that the client can retry, unless a group is to come: then it is held (`waking`). A group that is being
emptied takes no newcomers, even if it is the only one: it would never be empty. The queue is looked at when a request comes, when
a group reports or changes.
"""

import asyncio
import logging
from collections.abc import Callable, Collection, Mapping, Sequence

from phalanx_api import wire
from phalanx_frontend.backend import BackendError
from phalanx_router.dispatch.cold_start import Waking
from phalanx_router.dispatch.tenants import Tenants
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import Links
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.choose import Choice, Turns, share
from phalanx_router.routing.cost import UNKNOWN_OUTPUT
from phalanx_router.routing.late_binding import Known, Sat, is_open, next_dispatch, requeues
from phalanx_router.routing.queue import RequestQueue, Waiting, drain_s, refusal
from phalanx_router.routing.view import GroupView, is_stale
from phalanx_router.session import FleetSettings, Run
from phalanx_router.streams.stream import Lost

log = logging.getLogger(__name__)


class Placing:
    """Gives streams to groups. `queue`: those that wait."""

    def __init__(
        self,
        settings: FleetSettings,
        links: Links,
        metrics: RouterMetrics,
        draw: Callable[[], float],
        clock: Callable[[], float],
    ) -> None:
        self.burden: Callable[[GroupView], GroupView] = lambda view: view
        """How a group should look to newcomers: a group that just gave requests away does not look free at once."""
        self.queue = RequestQueue()
        self.num_shed = 0
        """Requests refused here for want of room, since the start."""
        self.tenants = Tenants(metrics, clock)
        self.waking = Waking(settings, links, metrics, clock)
        self._settings = settings
        self._links = links
        self._metrics = metrics
        self._draw = draw
        self._clock = clock
        self._runs: dict[int, Run] = {}
        self._alone: set[Run] = set()
        self._tickets = 0
        self._seen: dict[str, Sequence[GroupView]] = {}
        self._turns = Turns()
        self._known = Known(self._views_of, self._hits_of, self._excluded_of, self._turns_of)
        links.heard.append(self.dispatch)

    async def place(self, run: Run) -> bool:
        """Whether the stream went to a group. If not, some time has passed and it may be tried again. Raises BackendError."""
        if run.waiting is None or run.waiting.ticket not in self._runs:
            self._enqueue(run)
        self.dispatch()
        if run.link is None and run.broken is None:
            await self._wait(run, self._may_wait_s(run))
        if run.broken is not None:
            raise run.broken
        return run.link is not None

    def forget(self, run: Run) -> None:
        """Takes a stream that ends out of the queue, and settles what its tenant was charged."""
        if run.waiting is not None:
            self.queue.remove(run.waiting.ticket)
            self._runs.pop(run.waiting.ticket, None)
            self._show()
        self.tenants.end(run)
        self._let_go(run)
        if run.charged:
            used = len(run.stream.journal.delivered)
            self.queue.charge(run.stream.journal.tenant, 0, used - run.charged)

    def dispatch(self) -> None:
        """Sends what can be sent now."""
        now = self._clock()
        while len(self.queue):
            self._seen.clear()
            found = next_dispatch(self.queue, self._known, now, self._draw())
            if found is None:
                return
            run = self._runs[found.waiting.ticket]
            self.queue.remove(found.waiting.ticket)
            try:
                self._send(run, found.choice, now)
            except Exception as error:  # a request that cannot be sent: whoever asked for this look must not suffer for it
                run.give_up(error)
            del self._runs[found.waiting.ticket]
            self._show()

    def submit(self, run: Run, key: str, link: LeaderLink, hit_tokens: int = 0) -> None:
        """Gives the stream to the group of this key, from what its journal holds."""
        request = run.replay(self._clock())
        run.handle = link.submit(request, run.stream, hit_tokens=hit_tokens)
        run.link, run.group, run.model_hash = link, key, link.told.served.model_hash
        if request.alone:
            self._alone.add(run)
        if request.delivered or run.moves:
            self._metrics.replayed()
            log.info("stream goes on", extra={"request": request.id, "group": link.endpoint.group, "epoch": request.epoch})

    def begun(self, run: Run) -> None:
        """Notes a stream that a group has already: it was adopted there."""
        if run.stream.journal.is_alone:
            self._alone.add(run)

    def requeue(self, runs: Collection[Run]) -> int:
        """How many of these streams were taken back from their groups, before a token, for another group is much better."""
        sat = {run.waiting.ticket: run for run in runs if run.waiting is not None and run.is_unstarted}
        sats = [Sat(run.waiting, run.group, run.sent_at) for run in sat.values() if run.waiting is not None]
        self._runs.update(sat)
        self._seen.clear()
        found = requeues(sats, self._views_of_all(), self._known, self._clock())
        for taken in found:
            run = sat[taken.sat.waiting.ticket]
            log.debug("request taken back", extra={"request": run.stream.journal.id, "group": run.group, "why": taken.why})
            run.leave()  # its group's tokens reach nobody from now on: the epoch may stay
            self._enqueue(run)
            self._metrics.requeued()
        for ticket in sat.keys() - {taken.sat.waiting.ticket for taken in found}:
            del self._runs[ticket]
        self.dispatch()
        return len(found)

    def shed(self, bands: int, retry_after_s: float, why: str) -> int:
        """How many newcomers were refused: all that wait in so many bands, the least urgent ones."""
        refused = [self._runs[waiting.ticket] for waiting in self.queue.of_bands(self.queue.bands[-bands:] if bands else [])]
        for run in refused:
            self._refuse(run, BackendError(429, "overloaded", why, retry_after_s))
        return len(refused)

    def _enqueue(self, run: Run) -> None:
        """Gives the stream its place in the queue. Raises BackendError 429 when there is none for it."""
        journal, before = run.stream.journal, run.waiting
        self._tickets += before is None
        ticket, arrived_at = (self._tickets, self._clock()) if before is None else (before.ticket, before.arrived_at)
        has_begun = bool(run.group or journal.delivered or journal.epoch)
        waiting = Waiting(ticket, journal.newcomer(), arrived_at, journal.tenant, journal.priority, has_begun, _kind(run))
        if not has_begun:
            self._admit(waiting)
            self.tenants.begin(run)
        run.waiting = waiting
        self._runs[ticket] = run
        self.queue.add(waiting)
        self._show()

    def _admit(self, waiting: Waiting) -> None:
        """Refuses whoever has to be refused for this newcomer to wait. Raises BackendError 429 when it is the newcomer."""
        full = refusal(self.queue, waiting, self._settings.queue)
        if full is None:
            return
        views = self._links.outlook.views(self._links.serving())
        error = BackendError(429, "queue_full", full.why, drain_s(self.queue, views) or self._settings.retry_after_s)
        if full.instead is None:
            self._count_shed(error.code)
            raise error
        self._refuse(self._runs[full.instead.ticket], error)

    def _refuse(self, run: Run, error: BackendError) -> None:
        """Ends the wait of a newcomer."""
        self._count_shed(error.code)
        self.forget(run)
        if run.came is not None and not run.came.done():
            run.came.set_exception(error)

    def _count_shed(self, code: str) -> None:
        self.num_shed += 1
        self._metrics.shed(code)

    def _send(self, run: Run, choice: Choice, now: float) -> None:
        """Gives a stream that waited to the group that was chosen."""
        assert run.waiting is not None, "it left the queue just now"
        waiting = run.waiting
        self._metrics.chosen(choice.reason)
        if not waiting.has_begun:
            self._metrics.waited(now - waiting.arrived_at)
        if not run.charged:
            run.charged = int(min(waiting.newcomer.output_tokens, UNKNOWN_OUTPUT))
            self.queue.charge(waiting.tenant, waiting.newcomer.prompt_tokens, run.charged)
        run.sent_at, run.homeless_since = now, None
        self._let_go(run)
        link = self._eligible(run)[choice.key]
        self._turns.take(choice.key)
        self.submit(run, choice.key, link, self._held_tokens(run, choice, link))
        if run.came is not None and not run.came.done():
            run.came.set_result(None)

    async def _wait(self, run: Run, timeout_s: float) -> None:
        """Returns when the stream was sent, or after this time. Raises BackendError when it was refused meanwhile."""
        run.came = asyncio.get_running_loop().create_future()
        try:
            async with asyncio.timeout(timeout_s):
                await run.came
        except TimeoutError:
            if run.homeless_since is not None:
                run.excluded.clear()
        finally:
            run.came = None

    def _may_wait_s(self, run: Run) -> float:
        """How long the stream waits before it is looked at again. Raises BackendError when no group will take it."""
        keys = self._eligible(run).keys()
        if keys - run.excluded:
            run.homeless_since = None
            return self._settings.keep_alive_s
        if not keys and run.widowed_by and run.stream.journal.delivered and not self._may_come(run.model_hash):
            raise _weights_gone(run)
        is_silent = not keys and self._is_silent(run)
        is_leaving = not keys and not is_silent and bool(self._links.eligible(run.tokenizer))
        why = "every group is being emptied" if is_leaving else "no group is ready"
        why = f"each of {len(keys)} ready groups failed or refused this request" if keys else why
        why = "no group tells its load, and the service fails closed" if is_silent else why
        now = self._clock()
        if run.homeless_since is None:
            run.homeless_since = now
        patience_s = self._settings.patience_s if run.has_started else 0.0 if keys or is_silent else self.waking.hold_s
        if is_leaving:  # the operator is about to say whether another group comes
            patience_s = max(patience_s, self._settings.retry_after_s)
        left_s = run.homeless_since + patience_s - now
        if left_s <= 0:
            raise self._no_group(run, why, patience_s)
        if not run.has_started and not run.is_held and self.waking.hold_s:
            self.waking.hold()
            run.is_held = True
        return min(self._settings.refusal_pause_s if keys else self._settings.keep_alive_s, left_s)

    def _may_come(self, model_hash: str | None) -> bool:
        """Whether a group that stays has these weights, or has not told yet which it has.

        Where no group is known that stays, one of these weights may come if any is wanted: nobody has told of others.
        """
        policy = self.waking.policy()
        staying = [link for link in self._links.all() if not link.endpoint.leaving and link.endpoint.group not in policy.for_good]
        told = {link.told.served.model_hash for link in staying}
        return bool(told & {"", model_hash}) if told else policy.wanted

    def _is_silent(self, run: Run) -> bool:
        """Whether groups would take this newcomer, but tell nothing of their load."""
        links = self._links.eligible(run.tokenizer)
        is_closed = not run.has_started and not self.waking.policy().fails_open
        return is_closed and any(not self._links.outlook.is_leaving(link) for link in links.values())

    def _let_go(self, run: Run) -> None:
        if run.is_held:
            run.is_held = False
            self.waking.release()

    def _no_group(self, run: Run, why: str, waited_s: float) -> BackendError:
        """The answer when no group takes the request: what the last one said, if it said something."""
        why = f"{why} after {waited_s:g} s" if waited_s else why
        match run.trouble:
            case wire.Refused(_, _, status, code, message, retry_after_s):
                return BackendError(status, code, message, retry_after_s or self._settings.retry_after_s)
            case Lost(lost_why):
                why = f"{why}; before that {lost_why}"
        return BackendError(503, "no_group_ready", why, self._settings.retry_after_s)

    def _eligible(self, run: Run) -> dict[str, LeaderLink]:
        """The groups that may take the stream; those that are being emptied, or tell nothing, only what has started."""
        links = self._links.eligible(run.tokenizer, run.model_hash if run.stream.journal.delivered else None)
        if run.has_started:
            return links
        staying = {key: link for key, link in links.items() if not self._links.outlook.is_leaving(link)}
        return self._shared(run, self._told(run, staying))

    def _told(self, run: Run, links: dict[str, LeaderLink]) -> dict[str, LeaderLink]:
        """Those of them that told their load lately, where the policy fails closed; all of them else."""
        if self.waking.policy().fails_open:
            return links
        silent = {view.key for view in self._views(f"{_kind(run)} {sorted(links)}", links) if is_stale(view.state)}
        return {key: link for key, link in links.items() if key not in silent}

    def _shared(self, run: Run, links: dict[str, LeaderLink]) -> dict[str, LeaderLink]:
        """Those of the revision that the request's lot falls on, while the newest one has a share.

        What all groups of that one are too busy for goes to the other: it would keep those behind it from being looked at.
        """
        policy = self.waking.policy()
        if not policy.canary:
            return links
        if run.lot is None:
            run.lot = self._draw()
        revisions = {key: link.revision for key, link in links.items()}
        closed = {view.key for view in self._views(f"{_kind(run)} {sorted(links)}", links) if not is_open(view)}
        kept = share(revisions, policy.canary, policy.canary_percent, run.lot, run.excluded, closed)
        return {key: link for key, link in links.items() if key in kept}

    def _excluded_of(self, waiting: Waiting) -> frozenset[str]:
        """Groups that failed or refused it; for one that is computed alone also those that have another such of this router.

        If a group dies, it must be known under which of them.
        """
        run = self._runs[waiting.ticket]
        if not run.stream.journal.is_alone:
            return frozenset(run.excluded)
        self._alone = {other for other in self._alone if other.link is not None}
        return frozenset(run.excluded | {other.group for other in self._alone if other is not run})

    def _views_of(self, waiting: Waiting) -> Sequence[GroupView]:
        """Looked at once for all requests that the same groups can take, until the next is sent."""
        run = self._runs[waiting.ticket]
        kind = _kind(run)
        links = None
        if self._depends():
            links = self._eligible(run)
            kind = f"{kind} {sorted(links)}"
        if kind in self._seen:
            return self._seen[kind]
        return self._views(kind, self._eligible(run) if links is None else links)

    def _views(self, kind: str, links: Mapping[str, LeaderLink]) -> Sequence[GroupView]:
        """The groups as they are now, looked at once."""
        if kind not in self._seen:
            self._seen[kind] = self._look(list(links.values()))
        return self._seen[kind]

    def _views_of_all(self) -> list[GroupView]:
        """Of every group that may still have requests: those that are being emptied too."""
        return self._look([link for link in self._links.open_links() if link.is_serving or link.state.draining])

    def _look(self, links: Sequence[LeaderLink]) -> list[GroupView]:
        return [self.burden(view) for view in self._links.outlook.views(links)]

    def _hits_of(self, waiting: Waiting) -> Mapping[str, int]:
        run = self._runs[waiting.ticket]
        return self._links.outlook.hits(run.keys, self._eligible(run)) if self._is_prefix_aware() else {}

    def _held_tokens(self, run: Run, choice: Choice, link: LeaderLink) -> int:
        """Tokens of its prompt that the chosen group holds, whether it was chosen for them or not."""
        if self._is_prefix_aware():
            return choice.hit_tokens
        return self._links.outlook.hits(run.keys, {choice.key: link}).get(choice.key, 0)

    def _is_prefix_aware(self) -> bool:
        return self.waking.policy().routing == "PrefixAware"

    def _depends(self) -> bool:
        """Whether which groups may take a request depends on more than its kind."""
        policy = self.waking.policy()
        return bool(policy.canary) or not policy.fails_open

    def _turns_of(self) -> Mapping[str, int] | None:
        return self._turns.last if self.waking.policy().routing == "RoundRobin" else None

    def _show(self) -> None:
        self._metrics.show_queue(len(self.queue), self.queue.tokens)


def _weights_gone(run: Run) -> BackendError:
    """The end of a stream that no group may go on with: it was begun with other weights than those that are left."""
    who = f"{run.widowed_by}, the last group with the weights that began this stream, is gone"
    return BackendError(503, "weights_gone", f"{who}: the stream had spec.drain.timeoutSeconds to end there")


def _kind(run: Run) -> str:
    """What `_eligible` looks at: the tokenizer, the weights that drew its tokens, and whether it has started."""
    return f"{run.tokenizer}/{run.model_hash if run.stream.journal.delivered else None}/{run.has_started}"
