"""The door's backend over all groups: choose, submit, deliver; and when a group fails, go on in another.

    place -> deltas -> the end
      ^        |
      +-- setback: the group was lost, or refused

Losing a group ends the epoch; prompt and delivered tokens go to another group. A group that refused a request never had
it: the epoch stays, by which the next group knows a request that it may refuse too. Losses are bounded by `max_replays`,
they and orderly leaves together by `max_moves`, time without any group by `patience_s`; a request that no group ever took
is answered at once, so that the client can retry.
"""

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta, KeepAlive
from phalanx_router.assets import AssetShelf
from phalanx_router.endpoints import Leaders, LeaderSource
from phalanx_router.link import LeaderLink, LinkSettings
from phalanx_router.metrics import Outcome, RouterMetrics
from phalanx_router.route.choose import NoChoice, choose
from phalanx_router.route.view import GroupView
from phalanx_router.stream import Lost, Setback, Stream

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class FleetSettings:
    """Bounds of one router.

    max_replays: how often one stream may lose its group. max_moves: how often it may lose it or be left by it. patience_s:
    how long a stream that was running waits for a group. keep_alive_s: silence after which the door hears that a stream
    lives. retry_after_s: what clients are told when no group is ready. refusal_pause_s: wait before groups that refused a
    running stream are asked again.
    """

    link: LinkSettings
    served_names: tuple[str, ...] = ()
    max_replays: int = 3
    patience_s: float = 60.0
    keep_alive_s: float = 5.0
    retry_after_s: float = 2.0
    refusal_pause_s: float = 0.5
    max_moves: int = 32


@dataclass(slots=True, eq=False)
class _Run:
    """Where one stream is on its way through groups."""

    stream: Stream
    tokenizer: str | None
    link: LeaderLink | None = None
    group: str = ""
    handle: int = 0
    losses: int = 0
    moves: int = 0
    excluded: set[str] = field(default_factory=set)
    trouble: Setback | None = None
    homeless_since: float | None = None


class Fleet:
    """Implements `phalanx_frontend.backend.Backend`, and listens to the links. Belongs to one running event loop."""

    def __init__(
        self,
        settings: FleetSettings,
        metrics: RouterMetrics,
        draw: Callable[[], float] = random.random,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.draining = False
        self._settings = settings
        self._metrics = metrics
        self._draw = draw
        self._clock = clock
        self._shelf = AssetShelf(settings.served_names)
        self._links: dict[str, LeaderLink] = {}
        self._tasks: dict[str, asyncio.Task[None]] = {}
        self._runs: set[_Run] = set()
        self._changed = asyncio.Event()
        self._has_list = False

    # Backend

    async def generate(self, request: wire.Request) -> AsyncIterator[Delta | KeepAlive]:
        """Deltas in order of index, each index once, whatever groups fail meanwhile. Closing it early aborts."""
        run = _Run(Stream(request), self._shelf.current_tokenizer())
        self._runs.add(run)
        outcome: Outcome = "cancelled"
        try:
            while True:
                if run.link is None and not await self._place(run):
                    yield KeepAlive()
                    continue
                await run.stream.wait()
                match run.stream.take():
                    case Delta() as delta:
                        outcome = "finished" if delta.finish is not None else outcome
                        yield delta
                        if delta.finish is not None:
                            return
                    case None:
                        yield KeepAlive()
                    case setback:
                        reason = run.stream.journal.end()
                        if reason is not None:  # every token is there, only the word that it was the last got lost
                            outcome = "finished"
                            yield Delta(len(run.stream.journal.delivered), [], reason)
                            return
                        self._set_back(run, setback)
        except BackendError as error:
            outcome = "failed" if run.moves or error.status >= 500 else "refused"
            raise
        finally:
            self._runs.discard(run)
            if run.link is not None:
                run.link.abort(run.handle)
            self._metrics.request_ended(outcome)
            self._show()

    def assets(self) -> wire.Assets:
        """What the door needs of the model, from the newest ready group; from the last one when none is ready."""
        assets = self._shelf.current()
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
        return None if self._has_list else "the router has no list of leaders yet"

    @property
    def num_ready(self) -> int:
        """How many groups take requests now."""
        return sum(link.is_serving and self._shelf.has(link.assets_hash) for link in self._links.values())

    # Placing a stream

    async def _place(self, run: _Run) -> bool:
        """Whether the stream went to a group. If not, some time has passed and it may be tried again."""
        links = self._eligible(run.tokenizer)
        views = [GroupView(key, outstanding_tokens=link.ledger.outstanding_tokens) for key, link in links.items()]
        choice = choose(views, run.excluded, self._draw())
        if not isinstance(choice, NoChoice):
            self._submit(run, choice.key, links[choice.key])
            return True
        now = self._clock()
        if run.homeless_since is None:
            run.homeless_since = now
        left_s = run.homeless_since + self._settings.patience_s - now
        if not (run.moves or run.stream.journal.delivered) or left_s <= 0:
            raise self._no_group(run, choice.why)
        pause_s = self._settings.refusal_pause_s if views else self._settings.keep_alive_s
        if not await self._wait_for_change(min(pause_s, left_s)):
            run.excluded.clear()
        return False

    def _submit(self, run: _Run, key: str, link: LeaderLink) -> None:
        request = run.stream.journal.replay()
        run.link, run.group = link, key
        run.handle = link.submit(request, run.stream)
        if request.delivered or run.moves:
            self._metrics.replayed()
            log.info("stream goes on", extra={"request": request.id, "group": link.endpoint.group, "epoch": request.epoch})

    def _no_group(self, run: _Run, why: str) -> BackendError:
        """The answer when no group takes the request: what the last one said, if it said something."""
        match run.trouble:
            case wire.Refused(_, _, status, code, message, retry_after_s):
                return BackendError(status, code, message, retry_after_s or self._settings.retry_after_s)
            case Lost(lost_why):
                why = f"{why} after {self._settings.patience_s:g} s; before that {lost_why}"
        return BackendError(503, "no_group_ready", why, self._settings.retry_after_s)

    def _set_back(self, run: _Run, setback: Setback) -> None:
        """Notes why the stream has to leave its group. Raises BackendError when it may not try another."""
        was_running = not run.stream.journal.is_fresh
        if run.link is not None:
            run.link.abort(run.handle)
        run.link = None
        run.excluded.add(run.group)
        run.trouble = setback
        if isinstance(setback, wire.Refused) and setback.status not in (429, 503):
            raise BackendError(setback.status, setback.code, setback.message, setback.retry_after_s)
        if isinstance(setback, wire.Refused) and not was_running:
            return
        run.stream.journal.next_epoch()
        run.homeless_since = None
        self._count(run, setback)

    def _count(self, run: _Run, setback: Setback) -> None:
        """Counts a move, and a loss unless the group left in order. Raises BackendError when there were too many."""
        why, is_leave = (setback.why, setback.is_leave) if isinstance(setback, Lost) else (setback.message, False)
        run.moves += 1
        run.losses += not is_leave
        if run.losses > self._settings.max_replays:
            raise BackendError(503, "too_many_replays", f"the stream lost its group {run.losses} times; last: {why}")
        if run.moves > self._settings.max_moves:
            raise BackendError(503, "too_many_moves", f"the stream moved {run.moves} times; last: {why}")

    def _eligible(self, tokenizer: str | None) -> dict[str, LeaderLink]:
        """Links of groups that take requests with this tokenizer, by key; leaving leaders only when there is no other."""
        serving = [link for link in self._links.values() if link.is_serving and tokenizer is not None]
        same = [link for link in serving if self._shelf.tokenizer(link.assets_hash) == tokenizer]
        staying = [link for link in same if not link.endpoint.leaving]
        return {link.key: link for link in staying or same}

    async def _wait_for_change(self, timeout_s: float) -> bool:
        """Whether a group changed within the time."""
        try:
            async with asyncio.timeout(timeout_s):
                await self._changed.wait()
            return True
        except TimeoutError:
            return False

    # Links

    async def run(self, source: LeaderSource) -> None:
        """Keeps a link to each leader of the source until cancelled; then closes them."""
        tasks = [asyncio.create_task(source.run(self.leaders_found)), asyncio.create_task(self._nudge())]
        try:
            done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            next(iter(done)).result()
        finally:
            tasks += self._tasks.values()
            self._tasks = {}
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def leaders_found(self, leaders: Leaders) -> None:
        """Opens links to new leaders and ends those to leaders that are gone."""
        self._has_list = True
        known = {key: link.endpoint.address for key, link in self._links.items()}
        for key in [key for key, address in known.items() if key not in leaders or leaders[key].address != address]:
            self._tasks.pop(key).cancel()
            del self._links[key]
        for key, endpoint in leaders.items():
            if key in self._links:
                self._links[key].endpoint = endpoint
                continue
            link = self._links[key] = LeaderLink(endpoint, self._settings.link, self, self._draw)
            self._tasks[key] = asyncio.create_task(self._keep(link))
        self._update()

    def link_changed(self, link: LeaderLink) -> None:
        """Lets waiting streams look again."""
        if not link.is_open:
            self._metrics.link_lost()
        self._update()

    def assets_came(self, link: LeaderLink, assets: wire.Assets) -> None:
        """Keeps assets that are what their hash says; a group whose assets are not gets no requests."""
        if not self._shelf.add(assets):
            log.error("assets differ from their hash", extra={"leader": link.endpoint.address})
            link.assets_hash = ""
        self._update()

    async def _keep(self, link: LeaderLink) -> None:
        """Runs a link. A bug in it costs that link a second, and no other stream anything."""
        while True:
            try:
                await link.run()
            except Exception:
                log.exception("link failed", extra={"leader": link.endpoint.address})
                await asyncio.sleep(1)

    def _update(self) -> None:
        """Chooses the current assets, wakes streams that wait for a group, shows the counts."""
        ready = [link for link in self._links.values() if link.is_serving and self._shelf.has(link.assets_hash)]
        if ready:
            newest = max(ready, key=lambda link: (not link.endpoint.leaving, link.endpoint.created, link.endpoint.key))
            self._shelf.use(newest.assets_hash)
        self._shelf.keep({link.assets_hash for link in self._links.values()})
        self._fetch_missing()
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        self._show()

    def _fetch_missing(self) -> None:
        """Asks one leader for each assets that some group uses and that never came."""
        asked = {link.assets_hash for link in self._links.values() if link.is_open and link.is_fetching}
        for link in self._links.values():
            if link.is_open and link.assets_hash and link.assets_hash not in asked and not self._shelf.has(link.assets_hash):
                asked.add(link.assets_hash)
                link.fetch(link.assets_hash)

    def _show(self) -> None:
        self._metrics.show(len(self._links), self.num_ready, len(self._runs))

    async def _nudge(self) -> None:
        """Lets silent streams say that they live. One timer for all: a timer per delta would cost more than the delta."""
        before: dict[_Run, int] = {}
        while True:
            await asyncio.sleep(self._settings.keep_alive_s)
            now = {run: len(run.stream.journal.delivered) for run in self._runs}
            for run, count in now.items():
                if before.get(run) == count:
                    run.stream.nudge()
            before = now
