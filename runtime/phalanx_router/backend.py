"""The door's backend over all groups: the life of a stream, and when its group fails, its life in another.

    place -> deltas -> the end
      ^        |
      +-- setback: the group was lost, or refused

Losing a group ends the epoch; prompt and delivered tokens go to another group. A group that refused a request never had
it: the epoch stays, by which the next group knows a request that it may refuse too. Losses are bounded by `max_replays`,
they and orderly leaves together by `max_moves`. Where a stream goes is in `placing`, who the groups are in `links`.
"""

import asyncio
import random
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Mapping, Sequence, Set

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Begun, Delta, KeepAlive
from phalanx_router.dispatch.dispatcher import Placing
from phalanx_router.links.endpoints import LeaderSource
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import Links
from phalanx_router.metrics import Outcome, RouterMetrics
from phalanx_router.migration.balance_loop import Balancing
from phalanx_router.migration.mover import Moving
from phalanx_router.resume.registry import Resuming
from phalanx_router.routing.prefixes import PromptKeys
from phalanx_router.session import FleetSettings, Run
from phalanx_router.streams.stream import Lost, Setback, Stream
from phalanx_router.streams.traffic import TrafficBook

ALONE_AFTER = 2
"""Deaths of groups under a request, after which it is computed alone."""


class Fleet:
    """Implements `phalanx_frontend.backend.Backend`. Belongs to one running event loop. `runs`: the streams that are open."""

    def __init__(
        self,
        settings: FleetSettings,
        metrics: RouterMetrics,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.draining = False
        self.excused: Counter[str] = Counter()
        """Deaths of groups, by key of the leader, that a request of this router is to blame for."""
        self._blamed: set[tuple[str, str]] = set()
        self.links = Links(settings.link, settings.served_names, metrics, draw)
        self.runs: set[Run] = set()
        self._settings = settings
        self._metrics = metrics
        self.placing = Placing(settings, self.links, metrics, draw, clock)
        self.moving = Moving(self.links, self.runs, settings, metrics, clock)
        self.balancing = Balancing(self.links, self.runs, self.moving, metrics.balance, settings, clock)
        self.placing.burden = self.balancing.burdened
        self.placing.waking.policy = lambda: self.balancing.policy
        self.balancing.ticked.append(self._ticked)
        self.traffic = TrafficBook()
        self.resuming = Resuming(self.links, settings, clock)
        self._clock = clock
        self._refuses = False
        self._is_closing = False

    async def generate(self, request: wire.Request) -> AsyncIterator[Delta | KeepAlive]:
        """Deltas in order of index, each index once, whatever groups fail meanwhile. Closing it early aborts."""
        run = self._begin(request)
        self.runs.add(run)
        if request.can_resume:
            self.resuming.opened(run)
        self._metrics.show_streams(len(self.runs))
        outcome: Outcome = "cancelled"
        end: wire.FinishReason | None = None
        may_resume = True
        journals = self.resuming.journals if request.can_resume else None
        meter = self.traffic.begin(len(request.prompt), self._clock())
        try:
            while True:
                if self._is_closing:
                    raise self._leaving("the router is leaving before the stream has ended")
                if run.link is None and not await self.placing.place(run):
                    yield KeepAlive()
                    continue
                await run.stream.wait()
                match run.stream.take():
                    case Delta() as delta:
                        end = delta.finish
                        outcome = "finished" if end is not None else outcome
                        if journals is not None:
                            journals.grown(run)
                        meter.came(len(delta.tokens), delta.cached_tokens, self._clock())
                        yield delta
                        if delta.finish is not None:
                            return
                    case None:
                        yield KeepAlive()
                    case setback:
                        reason = run.stream.journal.end()
                        if reason is not None:  # every token is there, only the word that it was the last got lost
                            outcome, end = "finished", reason
                            yield Delta(len(run.stream.journal.delivered), [], reason)
                            return
                        self._set_back(run, setback)
        except BackendError as error:
            outcome = "failed" if run.moves or error.status >= 500 else "refused"
            may_resume = error.can_resume
            raise
        finally:
            meter.end(self._clock())
            self.runs.discard(run)
            self.moving.stream_over(run, "the stream ended")
            if request.can_resume:
                self.resuming.closed(run, end, may_resume)
            if self._is_closing:
                run.part()
            run.leave()
            self.placing.forget(run)
            self._metrics.request_ended(outcome)
            self._metrics.show_streams(len(self.runs))

    def _begin(self, request: wire.Request) -> Run:
        """A new stream, or one that goes on: where it runs, if it was adopted there. Raises BackendError."""
        if self._refuses:
            raise self._leaving("the router takes no more requests: it is leaving")
        keys = PromptKeys(request.prompt, request.tenant, request.cache_salt)
        adoption = self.resuming.take_up(request)
        run = Run(Stream(request) if adoption is None else adoption.stream, self.links.tokenizer(), keys)
        run.began_at = self._clock()
        run.deaths = ALONE_AFTER if run.stream.journal.is_alone else 0  # a leader does not tell how many there were
        if adoption is not None:
            run.link, run.group, run.handle = adoption.link, adoption.key, adoption.handle
        if (
            request.can_resume
            and (adoption is not None or request.epoch)
            and (known := self.resuming.known(request.id)) is not None
        ):
            run.model_hash, run.deaths = known.model_hash or None, max(run.deaths, known.deaths)
            run.stream.journal.is_alone = run.deaths >= ALONE_AFTER
        if adoption is not None:
            self.placing.begun(run)
        return run

    def _leaving(self, why: str) -> BackendError:
        return BackendError(503, "router_leaving", why, self._settings.retry_after_s, can_resume=True)

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, Begun]:
        """Those of these streams of this tenant that may go on. Raises BackendError when the router leaves."""
        if self._refuses:
            raise self._leaving("the router takes no more requests: it is leaving")
        return await self.resuming.find(ids, tenant)

    def refuse(self) -> None:
        """Takes no more requests; those that are open go on."""
        self._refuses = True

    def close(self) -> None:
        """Ends what is still open, with an error that says that it may be resumed elsewhere; groups go on with it for a while."""
        self._refuses = self._is_closing = True
        for run in self.runs:
            run.stream.nudge()
            if run.came is not None and not run.came.done():
                run.came.set_result(None)

    async def awake(self) -> None:
        """Waits for a first group, if this router holds requests for one."""
        await self.placing.waking.model_known()

    def assets(self) -> wire.Assets:
        """What the door needs of the model, from the newest ready group; from the last one when none is ready."""
        assets = self.links.assets()
        if assets is None:
            raise BackendError(503, "no_group_ready", "no group has told the model yet", self._settings.retry_after_s)
        return assets

    def not_ready(self) -> str | None:
        """Why this router should get no clients: it knows no list of leaders yet, or it is about to leave.

        A router without a ready group stays ready itself, so that clients get its 503 with Retry-After and not a refused
        connection, and so that streams which wait for a group are not cut.
        """
        if self.draining:
            return "the router is leaving"
        return None if self.links.has_list else "the router has no list of leaders yet"

    async def run(self, source: LeaderSource) -> None:
        """Keeps a link to each leader of the source until cancelled; then closes them."""
        await self.links.run(source, self._nudge(), self.balancing.run())

    def _set_back(self, run: Run, setback: Setback) -> None:
        """Notes why the stream has to leave its group. Raises BackendError when it may not try another."""
        was_running = not run.stream.journal.is_fresh
        self.moving.stream_over(run, "the stream lost its group")
        link = run.link
        group = link.endpoint.group if link is not None else ""
        run.widowed_by = group if group in self.balancing.policy.for_good else ""
        run.leave()
        run.excluded.add(run.group)
        run.trouble = setback
        if isinstance(setback, wire.Refused) and setback.status not in (429, 503):
            raise BackendError(setback.status, setback.code, setback.message, setback.retry_after_s)
        if isinstance(setback, wire.Refused) and not was_running:
            return
        run.stream.journal.next_epoch()
        run.homeless_since = None
        self._count(run, setback, link)

    def _count(self, run: Run, setback: Setback, link: LeaderLink | None) -> None:
        """Counts a move, and a loss unless the group left in order. Raises BackendError when there were too many."""
        why, is_leave = (setback.why, setback.is_leave) if isinstance(setback, Lost) else (setback.message, False)
        run.moves += 1
        run.losses += not is_leave
        if isinstance(setback, Lost) and not is_leave:
            self._count_death(run, setback, link)
        if run.losses > self._settings.max_replays:
            raise BackendError(503, "too_many_replays", f"the stream lost its group {run.losses} times; last: {why}")
        if run.moves > self._settings.max_moves:
            raise BackendError(503, "too_many_moves", f"the stream moved {run.moves} times; last: {why}")

    def _count_death(self, run: Run, lost: Lost, link: LeaderLink | None) -> None:
        """Counts a group that died under the request, if that may be its fault: the third ends it, and all are excused.

        None is where they were of one leader: that may be its hardware's fault as well.
        Of one that computed nothing else the leader itself knows that it is not to blame, if it lives. Raises BackendError.
        """
        was_alone = lost.cause == "alone" and run.stream.journal.is_alone
        run.deaths += lost.cause == "" or was_alone
        if link is not None and (lost.cause == "" or (was_alone and not link.is_open)):
            run.killed.add((link.endpoint.key, run.group))
        run.stream.journal.is_alone = run.deaths >= ALONE_AFTER
        if run.deaths > ALONE_AFTER:
            self._excuse(run.killed)
            why = f"{run.deaths} groups died while they computed this request, the last one when it computed no other: {lost.why}"
            raise BackendError(500, "groups_died", why)

    def _excuse(self, killed: Set[tuple[str, str]]) -> None:
        """Takes these incarnations off what their leaders are charged with: each once, however many requests it died under."""
        if len({leader for leader, _ in killed}) > 1:
            known = {link.endpoint.key for link in self.links.all()}
            self._blamed = {(leader, incarnation) for leader, incarnation in self._blamed | killed if leader in known}
            self.excused = Counter(leader for leader, _ in self._blamed)

    def _ticked(self) -> None:
        """Climbs the rungs of the ladder that are the queue's: takes requests back, and refuses some when nothing else helps."""
        self._metrics.show_prefix_keys(self.links.outlook.prefixes.num_keys)
        self._metrics.show_states(Counter(view.state for view in self.balancing.views()))
        self.placing.dispatch()  # a group that tells nothing is open after a while: no event says so
        self.placing.tenants.routers = max(1, self.balancing.policy.routers)
        if self.balancing.policy.mode in ("Requeue", "Migrate"):
            self.placing.requeue(self.runs)
        shed = self.balancing.last.shed
        if shed is not None:
            self.placing.shed(shed.bands, shed.retry_after_s, shed.why)

    async def _nudge(self) -> None:
        """Lets silent streams say that they live. One timer for all: a timer per delta would cost more than the delta."""
        before: dict[Run, int] = {}
        while True:
            await asyncio.sleep(self._settings.keep_alive_s)
            now = {run: len(run.stream.journal.delivered) for run in self.runs}
            for run, count in now.items():
                if before.get(run) == count:
                    run.stream.nudge()
            before = now
