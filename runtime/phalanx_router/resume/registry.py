"""Streams that clients may resume: which are open here, what is kept of closed ones, and how one is found that began elsewhere.

    open here        its client lost the connection before we noticed: the old stream ends, the new one goes on from its journal
    at a leader      its router was lost and it goes on without one: adopted where it stands
    on the shelf     closed here, or a copy that a lost router had sent
    at another router  the same there

The source that knows most tokens counts. While leaders are not linked yet, as after a start, they are waited for. One that is
asked and does not answer in time may have the stream: then a client hears 503, and the stream goes on there until it asks again.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Begun
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import Links
from phalanx_router.resume.journal_store import PeerCopies, Shelf
from phalanx_router.resume.peer_wire import Copy
from phalanx_router.session import FleetSettings, Run
from phalanx_router.streams.stream import Adopting, Stream

log = logging.getLogger(__name__)

TAKE_UP_S = 10.0
"""How long an adopted stream waits for the door that found it: the client may have left."""


@dataclass(frozen=True, slots=True)
class Adoption:
    """A stream that runs at a leader, ours since it was found."""

    link: LeaderLink
    key: str
    handle: int
    stream: Stream
    num_delivered: int


Found = tuple[Copy, Adoption | None]


class Silent(Exception):
    """A leader was asked for a stream and did not answer in time, or was lost before it did."""


class Journals(Protocol):
    """Hears what becomes of the streams that are open here, and asks others for theirs."""

    def opened(self, run: Run) -> None:
        """A stream began."""
        ...

    def grown(self, run: Run) -> None:
        """A stream has more tokens."""
        ...

    def closed(self, run: Run, finish: wire.FinishReason | None, forgotten: bool) -> None:
        """A stream is over; nobody may resume one that is forgotten."""
        ...

    async def ask(self, ids: Sequence[str]) -> Iterable[Copy]:
        """What others know of these streams."""
        ...


class Resuming:
    """Finds streams, and keeps what is needed to find them. `copies` are those of other routers, `journals` goes to them."""

    def __init__(self, links: Links, settings: FleetSettings, clock: Callable[[], float]) -> None:
        self.shelf = Shelf(clock)
        self.copies = PeerCopies(self.shelf)
        self.journals: Journals | None = None
        self._links = links
        self._settings = settings
        self._clock = clock
        self._open: dict[str, Run] = {}
        self._adopted: dict[str, Adoption] = {}
        self._finding: set[asyncio.Task[Mapping[str, Begun]]] = set()

    def opened(self, run: Run) -> None:
        """A stream begins here."""
        self._open[run.stream.journal.id] = run
        if self.journals is not None:
            self.journals.opened(run)

    def closed(self, run: Run, finish: wire.FinishReason | None, may_resume: bool) -> None:
        """A stream is over here. What is left of it stays for a while if its client may come again."""
        id = run.stream.journal.id
        if self.journals is not None:
            self.journals.closed(run, finish, not may_resume)
        if self._open.get(id) is run:
            del self._open[id]
            if may_resume:
                self.shelf.put(msgspec.structs.replace(copy_of(run), finish=finish))
            else:
                self.shelf.forget(id)

    def open_runs(self) -> list[Run]:
        """The streams that are open here."""
        return list(self._open.values())

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, Begun]:
        """What is known of these streams of this tenant. It is found to the end even if its client leaves meanwhile: what leaders
        gave would be lost else. Raises BackendError 503 when a leader may have one of which nothing else is known."""
        finding = asyncio.create_task(self._find(ids, tenant))
        self._finding.add(finding)
        finding.add_done_callback(self._finding.discard)
        return await asyncio.shield(finding)

    async def _find(self, ids: Sequence[str], tenant: str) -> Mapping[str, Begun]:
        for id in ids:
            if (adoption := self._adopted.get(id)) is not None and adoption.stream.journal.tenant == tenant:
                del self._adopted[id]  # for a door that did not take it up: the leader gives it once more
            if (run := self._open.get(id)) is not None and run.stream.journal.tenant == tenant:
                self._take_over(run)
        best = {copy.request.id: copy for copy in self.copies.find(ids) if copy.request.tenant == tenant}
        missing = [id for id in ids if id not in best or best[id].finish is None]
        told, (adopted, is_certain) = await asyncio.gather(self._ask_peers(missing), self._adopt(missing, tenant))
        for copy in (*told, *(copy for copy, _ in adopted)):
            id = copy.request.id
            if copy.request.tenant != tenant:
                continue
            if id not in best or _worth(copy) >= _worth(best[id]):
                best[id] = copy
        for copy, adoption in adopted:
            if adoption is not None:
                self._use(copy.request.id, adoption, best[copy.request.id] is copy)
        for copy in best.values():
            self.shelf.put(copy)
        if not is_certain and any(id not in best for id in ids):
            why = "a group that may have this stream does not answer; the stream goes on there for a while"
            raise BackendError(503, "groups_silent", why, self._settings.retry_after_s, can_resume=True)
        log.info("streams asked for", extra={"asked": len(ids), "found": len(best), "running": len(self._adopted)})
        return {id: Begun(self._next_epoch(copy.request), copy.finish) for id, copy in best.items()}

    def take_up(self, request: wire.Request) -> Adoption | None:
        """The stream of this request where it runs, if it was found there and is asked for as it stood."""
        adoption = self._adopted.pop(request.id, None)
        if adoption is not None and adoption.num_delivered != len(request.delivered):
            adoption.link.abort(adoption.handle)
            return None
        return adoption

    def known(self, id: str) -> Copy | None:
        """What is kept of a stream that was found."""
        return self.shelf.get(id)

    def _take_over(self, run: Run) -> None:
        """Ends a stream whose client is here anew."""
        journal = run.stream.journal
        self.closed(run, journal.end(), may_resume=True)
        why = "its client has come again and resumed it"
        if run.link is None:  # it waits for a group, and hears of none
            run.give_up(BackendError(409, "resumed", why))
        else:
            run.stream.refused(wire.Refused(run.handle, journal.epoch, 409, "resumed", why))

    def _next_epoch(self, request: wire.Request) -> wire.Request:
        """The request as it is to be submitted: the group that had it has it no more, unless it was adopted there."""
        return request if request.id in self._adopted else msgspec.structs.replace(request, epoch=request.epoch + 1)

    def _use(self, id: str, adoption: Adoption, is_best: bool) -> None:
        if not is_best or id in self._adopted:  # two leaders have it: one epoch was lost on its way to another group
            adoption.link.abort(adoption.handle)
            return
        self._adopted[id] = adoption

        def drop() -> None:
            if self._adopted.get(id) is adoption:
                del self._adopted[id]
                adoption.link.disown(adoption.handle)

        asyncio.get_running_loop().call_later(TAKE_UP_S, drop)

    async def _ask_peers(self, ids: Sequence[str]) -> Iterable[Copy]:
        return await self.journals.ask(ids) if ids and self.journals is not None else []

    async def _adopt(self, ids: Sequence[str], tenant: str) -> tuple[list[Found], bool]:
        """What leaders have of these streams of this tenant, and whether all that were asked have answered.

        All are asked, those that are not linked yet once they are.
        """
        found: list[Found] = []
        is_certain = True
        asked: set[str] = set()
        deadline = self._clock() + self._settings.find_s
        while len(found) < len(ids):
            links = [link for link in self._links.open_links() if link.key not in asked]
            asked |= {link.key for link in links}
            left_s = deadline - self._clock()
            asking = (_ask(link, id, tenant, left_s) for link in links for id in ids)
            for answer in await asyncio.gather(*asking, return_exceptions=True):
                match answer:
                    case Silent():
                        is_certain = False
                    case BaseException():
                        raise answer
                    case (_, _):
                        found.append(answer)
            if self._links.all_open() or left_s <= 0:
                break
            await self._links.changed(left_s)
        return found, is_certain


async def _ask(link: LeaderLink, id: str, tenant: str, timeout_s: float) -> Found | None:
    """What this leader has of a stream, which is ours from then on; None when it has nothing. Raises Silent."""
    adopting = Adopting()
    handle = link.adopt(id, tenant, adopting)
    try:
        async with asyncio.timeout(timeout_s):
            told = await adopting.told
    except TimeoutError:
        link.disown(handle)  # its answer may be on its way, and the stream with it
        raise Silent from None
    if told is None:
        raise Silent
    if isinstance(told, wire.Refused):
        return None
    copy = Copy(told.request, link.told.served.model_hash, told.finish)
    stream = adopting.stream
    return copy, None if stream is None else Adoption(link, link.key, handle, stream, len(told.request.delivered))


def copy_of(run: Run) -> Copy:
    """What another router needs of a stream that is open here."""
    journal = run.stream.journal
    return Copy(journal.replay(), run.model_hash or "", None, run.deaths)


def _worth(copy: Copy) -> tuple[bool, int]:
    return copy.finish is not None, len(copy.request.delivered)
