"""Backend of the API server over all groups: runs each stream from submission to end, in another group after a setback.

    place -> deltas -> end
      ^        |
      +-- setback: the group was lost, or refused the stream

The loss of a group ends the epoch; prompt and delivered tokens go to another group. A group that refused a request never had it,
so the epoch stays, and the next group may refuse it too. `max_replays` bounds the losses, `max_moves` losses and drains together.
`dispatch.dispatcher` chooses the group, `links.link_pool` has the links to all groups.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta, KeepAlive, ResumableStream
from phalanx_router.dispatch.dispatcher import Dispatcher
from phalanx_router.links.endpoints import LeaderSource
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.metrics import Outcome, RouterMetrics
from phalanx_router.migration.balance_loop import BalanceLoop
from phalanx_router.migration.mover import Mover
from phalanx_router.resume.registry import StreamRegistry
from phalanx_router.routing.prefixes import PromptKeys
from phalanx_router.session import FleetSettings, StreamSession
from phalanx_router.streams.stream import GroupLost, Setback, Stream
from phalanx_router.streams.traffic import TrafficStats

ALONE_AFTER = 2
"""Number of group deaths under a request after which it runs alone."""


class RouterBackend:
    """Implements `phalanx_frontend.backend.Backend`. Bound to one event loop. `runs`: the open streams."""

    def __init__(
        self,
        settings: FleetSettings,
        metrics: RouterMetrics,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.draining = False
        self.excused: Counter[str] = Counter()
        """Group deaths that a request of this router caused, by leader key."""
        self._blamed: set[tuple[str, str]] = set()
        self.links = LinkPool(settings.link, settings.served_names, metrics, draw)
        self.runs: set[StreamSession] = set()
        self._settings = settings
        self._metrics = metrics
        self.dispatcher = Dispatcher(settings, self.links, metrics, draw, clock)
        self.mover = Mover(self.links, self.runs, settings, metrics, clock)
        self.balancing = BalanceLoop(self.links, self.runs, self.mover, metrics.balance, settings, clock=clock)
        self.dispatcher.burden = self.balancing.with_departed_load
        self.dispatcher.cold_start.policy = lambda: self.balancing.policy
        self.balancing.ticked.append(self._ticked)
        self.traffic = TrafficStats()
        self.stream_registry = StreamRegistry(self.links, settings, clock)
        self._clock = clock
        self._refuses = False
        self._is_closing = False

    async def generate(self, request: wire.Request) -> AsyncIterator[Delta | KeepAlive]:
        """Yields deltas in order of index, each index once, across failures of groups. Closing the iterator aborts the
        request."""
        run = self._begin(request)
        self.runs.add(run)
        if request.can_resume:
            self.stream_registry.opened(run)
        self._metrics.show_streams(len(self.runs))
        outcome: Outcome = "cancelled"
        end: wire.FinishReason | None = None
        may_resume = True
        journals = self.stream_registry.journals if request.can_resume else None
        meter = self.traffic.begin(len(request.prompt), self._clock())
        try:
            while True:
                if self._is_closing:
                    raise self._leaving("the router shuts down before the stream has ended: resume it")
                if run.link is None and not await self.dispatcher.place(run):
                    yield KeepAlive()
                    continue
                await run.stream.wait()
                match run.stream.take():
                    case Delta() as delta:
                        end = delta.finish
                        outcome = "finished" if end is not None else outcome
                        if journals is not None:
                            journals.grown(run)
                        meter.record(len(delta.tokens), delta.cached_tokens, self._clock())
                        yield delta
                        if delta.finish is not None:
                            return
                    case None:
                        yield KeepAlive()
                    case setback:
                        reason = run.stream.journal.end()
                        if reason is not None:  # all tokens arrived and only the Finished was lost
                            outcome, end = "finished", reason
                            yield Delta(index=len(run.stream.journal.delivered), tokens=[], finish=reason)
                            return
                        self._set_back(run, setback)
        except BackendError as error:
            outcome = "failed" if run.moves or error.status >= 500 else "refused"
            may_resume = error.can_resume
            raise
        finally:
            meter.end(self._clock())
            self._remove(run, request, outcome, end, may_resume)

    def _remove(
        self, run: StreamSession, request: wire.Request, outcome: Outcome, end: wire.FinishReason | None, may_resume: bool
    ) -> None:
        """Removes an ended stream; during shutdown its group continues it."""
        self.runs.discard(run)
        self.mover.stream_over(run, "the stream ended")
        if request.can_resume:
            self.stream_registry.closed(run, end, may_resume)
        if self._is_closing:
            run.detach()
        run.abort()
        self.dispatcher.forget(run)
        self._metrics.request_ended(outcome)
        self._metrics.show_streams(len(self.runs))

    def _begin(self, request: wire.Request) -> StreamSession:
        """Creates the session of a new, resumed or adopted stream. Raises BackendError."""
        if self._refuses:
            raise self._leaving("the router shuts down and accepts no requests: retry")
        keys = PromptKeys(request.prompt, request.tenant, request.cache_salt)
        adoption = self.stream_registry.take_up(request)
        run = StreamSession(
            stream=Stream(request) if adoption is None else adoption.stream, tokenizer=self.links.tokenizer(), keys=keys
        )
        run.began_at = self._clock()
        run.deaths = ALONE_AFTER if run.stream.journal.is_alone else 0  # a leader does not report the number
        if adoption is not None:
            run.link, run.group, run.handle = adoption.link, adoption.key, adoption.handle
        if (
            request.can_resume
            and (adoption is not None or request.epoch)
            and (known := self.stream_registry.known(request.id)) is not None
        ):
            run.model_hash, run.deaths = known.model_hash or None, max(run.deaths, known.deaths)
            run.stream.journal.is_alone = run.deaths >= ALONE_AFTER
        if adoption is not None:
            self.dispatcher.begun(run)
        return run

    def _leaving(self, why: str) -> BackendError:
        return BackendError(503, "router_leaving", why, self._settings.retry_after_s, can_resume=True)

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        """Returns the streams of `tenant` that can be resumed. Raises BackendError during shutdown."""
        if self._refuses:
            raise self._leaving("the router shuts down and accepts no requests: retry")
        return await self.stream_registry.find(ids, tenant)

    def refuse(self) -> None:
        """Refuses new requests; open streams continue."""
        self._refuses = True

    def close(self) -> None:
        """Ends open streams with an error that permits a resume; their groups continue them for a while."""
        self._refuses = self._is_closing = True
        for run in self.runs:
            run.stream.nudge()
            if run.wait_ended is not None and not run.wait_ended.done():
                run.wait_ended.set_result(None)

    async def wait_for_assets(self) -> None:
        """Waits for a first group if this router holds requests for one."""
        await self.dispatcher.cold_start.model_known()

    def assets(self) -> wire.Assets:
        """Returns the model assets of the newest ready group, or of the last ready one. Raises BackendError 503 before the
        first."""
        assets = self.links.assets()
        if assets is None:
            raise BackendError(503, "no_group_ready", "no group has reported its model yet: retry", self._settings.retry_after_s)
        return assets

    def not_ready(self) -> str | None:
        """Returns why this router should get no clients: it has no list of leaders yet, or it shuts down.

        A router without a ready group is ready, so that clients get 503 with Retry-After instead of a refused connection and
        waiting streams are not cut.
        """
        if self.draining:
            return "the router is shutting down"
        return None if self.links.has_list else "the router has no list of leaders yet"

    async def run(self, source: LeaderSource) -> None:
        """Links to each leader of `source` until cancelled; then closes the links."""
        await self.links.run(source, self._nudge(), self.balancing.run())

    def _set_back(self, run: StreamSession, setback: Setback) -> None:
        """Detaches the stream from its group. Raises BackendError if it may not go to another."""
        was_running = not run.stream.journal.is_fresh
        self.mover.stream_over(run, "the stream lost its group")
        link = run.link
        group = link.endpoint.group if link is not None else ""
        run.lost_group = group if group in self.balancing.policy.for_good else ""
        run.abort()
        run.excluded.add(run.group)
        run.last_setback = setback
        if isinstance(setback, wire.Refused) and setback.status not in (429, 503):
            raise BackendError(setback.status, setback.code, setback.message, setback.retry_after_s)
        if isinstance(setback, wire.Refused) and not was_running:
            return
        run.stream.journal.next_epoch()
        run.unassigned_since = None
        self._count(run, setback, link)

    def _count(self, run: StreamSession, setback: Setback, link: LeaderLink | None) -> None:
        """Counts a replay, and a loss unless the group drained. Raises BackendError over the limits."""
        why, is_leave = (setback.why, setback.is_leave) if isinstance(setback, GroupLost) else (setback.message, False)
        run.moves += 1
        run.losses += not is_leave
        if isinstance(setback, GroupLost) and not is_leave:
            self._count_death(run, setback, link)
        if run.losses > self._settings.max_replays:
            raise BackendError(503, "too_many_replays", f"the stream lost its group {run.losses} times; last: {why}")
        if run.moves > self._settings.max_moves:
            raise BackendError(503, "too_many_moves", f"the stream moved {run.moves} times; last: {why}")

    def _count_death(self, run: StreamSession, lost: GroupLost, link: LeaderLink | None) -> None:
        """Counts the death of a group if the request may have caused it; the third one ends the request and excuses all groups.

        No group is excused if all deaths hit one leader, possibly because of its hardware. A leader that ran only this request
        excuses itself if it survives. Raises BackendError.
        """
        was_alone = lost.cause == "alone" and run.stream.journal.is_alone
        run.deaths += lost.cause == "" or was_alone
        if link is not None and (lost.cause == "" or (was_alone and not link.is_open)):
            run.blamed_incarnations.add((link.endpoint.key, run.group))
        run.stream.journal.is_alone = run.deaths >= ALONE_AFTER
        if run.deaths > ALONE_AFTER:
            self._excuse(run.blamed_incarnations)
            why = f"{run.deaths} groups died while they computed this request, the last one without other requests: {lost.why}"
            raise BackendError(500, "groups_died", why)

    def _excuse(self, blamed_incarnations: Set[tuple[str, str]]) -> None:
        """Excuses these incarnations, each once, however many requests ran in it."""
        if len({leader for leader, _ in blamed_incarnations}) > 1:
            known = {link.endpoint.key for link in self.links.all()}
            self._blamed = {
                (leader, incarnation) for leader, incarnation in self._blamed | blamed_incarnations if leader in known
            }
            self.excused = Counter(leader for leader, _ in self._blamed)

    def _ticked(self) -> None:
        """Applies the ladder's measures at the queue: takes requests back, and rejects some if no other measure helps."""
        self._metrics.show_prefix_keys(self.links.fleet_view.prefixes.num_keys)
        self._metrics.show_states(Counter(view.state for view in self.balancing.views()))
        self.dispatcher.dispatch()  # a silent group becomes open after a while, without an event
        self.dispatcher.tenants.routers = max(1, self.balancing.policy.routers)
        if self.balancing.policy.mode in ("Requeue", "Migrate"):
            self.dispatcher.requeue(self.runs)
        shed = self.balancing.last.shed
        if shed is not None:
            self.dispatcher.shed(shed.bands, shed.retry_after_s, shed.why)

    async def _nudge(self) -> None:
        """Wakes silent streams so that they send a KeepAlive. One timer for all, since a timer per delta would cost too much."""
        before: dict[StreamSession, int] = {}
        while True:
            await asyncio.sleep(self._settings.keep_alive_s)
            now = {run: len(run.stream.journal.delivered) for run in self.runs}
            for run, count in now.items():
                if before.get(run) == count:
                    run.stream.nudge()
            before = now
