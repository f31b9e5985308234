"""Registry of resumable streams: open and closed ones of this router, and lookup of streams that began elsewhere.

    open here          the client reconnected before this router noticed: the old stream ends, the new one continues its journal
    at a leader        an orphan, adopted
    in the store       closed here, or a copy received from a lost router
    at another router  the same there

The source with the most tokens wins. The lookup waits for leaders that are not linked yet, as after a start. A leader that does
not answer in time may have the stream: the client gets 503 and retries, while the stream continues there.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, ResumableStream
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.resume.journal_store import JournalStore, PeerCopies
from phalanx_router.resume.peer_wire import JournalCopy
from phalanx_router.session import FleetSettings, StreamSession
from phalanx_router.streams.stream import AdoptedStream, Stream

log = logging.getLogger(__name__)

TAKE_UP_S = 10.0
"""Seconds before an adopted stream that no request takes up is disowned: the client may have disconnected."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """A stream that runs at a leader and was adopted by this router."""

    link: LeaderLink
    key: str
    handle: int
    stream: Stream
    num_delivered: int


Found = tuple[JournalCopy, Adoption | None]


class NoAnswer(Exception):
    """A leader did not answer an Adopt in time, or its link was lost before the answer."""


class JournalReplication(Protocol):
    """Replicates the journals of open streams to other routers, and queries those for theirs."""

    def opened(self, run: StreamSession) -> None:
        """Records a new stream."""
        ...

    def grown(self, run: StreamSession) -> None:
        """Records that a stream has more tokens."""
        ...

    def closed(self, run: StreamSession, finish: wire.FinishReason | None, forgotten: bool) -> None:
        """Records the end of a stream; a `forgotten` one cannot be resumed."""
        ...

    async def ask(self, ids: Sequence[str]) -> Iterable[JournalCopy]:
        """Returns the copies of these streams that the other routers have."""
        ...


class StreamRegistry:
    """Finds streams for clients that resume. `copies`: journals of other routers; `journals`: replication of this one's."""

    def __init__(self, links: LinkPool, settings: FleetSettings, clock: Callable[[], float]) -> None:
        self.store = JournalStore(clock)
        self.copies = PeerCopies(self.store)
        self.journals: JournalReplication | None = None
        self._links = links
        self._settings = settings
        self._clock = clock
        self._open: dict[str, StreamSession] = {}
        self._adopted: dict[str, Adoption] = {}
        self._finding: set[asyncio.Task[Mapping[str, ResumableStream]]] = set()

    def opened(self, run: StreamSession) -> None:
        """Registers a stream that begins here."""
        self._open[run.stream.journal.id] = run
        if self.journals is not None:
            self.journals.opened(run)

    def closed(self, run: StreamSession, finish: wire.FinishReason | None, may_resume: bool) -> None:
        """Unregisters a stream; stores its journal for a while if the client may resume it."""
        id = run.stream.journal.id
        if self.journals is not None:
            self.journals.closed(run, finish, not may_resume)
        if self._open.get(id) is run:
            del self._open[id]
            if may_resume:
                self.store.put(msgspec.structs.replace(make_copy(run), finish=finish))
            else:
                self.store.forget(id)

    def open_runs(self) -> list[StreamSession]:
        """Returns the streams that are open here."""
        return list(self._open.values())

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        """Finds these streams of `tenant`. The search completes even if its client disconnects, so that adopted streams are kept.

        Raises BackendError 503 when a leader that does not answer may have a stream that is unknown otherwise.
        """
        finding = asyncio.create_task(self._find(ids, tenant))
        self._finding.add(finding)
        finding.add_done_callback(self._finding.discard)
        return await asyncio.shield(finding)

    async def _find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        for id in ids:
            if (adoption := self._adopted.get(id)) is not None and adoption.stream.journal.tenant == tenant:
                del self._adopted[id]  # found before and never taken up: the leader returns it again
            if (run := self._open.get(id)) is not None and run.stream.journal.tenant == tenant:
                self._take_over(run)
        best = {copy.request.id: copy for copy in self.copies.find(ids) if copy.request.tenant == tenant}
        missing = [id for id in ids if id not in best or best[id].finish is None]
        copies, (adopted, is_certain) = await asyncio.gather(self._ask_peers(missing), self._adopt(missing, tenant))
        for copy in (*copies, *(copy for copy, _ in adopted)):
            id = copy.request.id
            if copy.request.tenant != tenant:
                continue
            if id not in best or _completeness(copy) >= _completeness(best[id]):
                best[id] = copy
        for copy, adoption in adopted:
            if adoption is not None:
                self._use(copy.request.id, adoption, best[copy.request.id] is copy)
        for copy in best.values():
            self.store.put(copy)
        if not is_certain and any(id not in best for id in ids):
            why = "a group that may have this stream does not answer: retry, the stream continues there for a while"
            raise BackendError(503, "groups_silent", why, self._settings.retry_after_s, can_resume=True)
        log.info("looked up streams", extra={"asked": len(ids), "found": len(best), "running": len(self._adopted)})
        return {id: ResumableStream(self._next_epoch(copy.request), copy.finish) for id, copy in best.items()}

    def take_up(self, request: wire.Request) -> Adoption | None:
        """Returns the adopted stream of this request, if it was adopted with the same delivered tokens."""
        adoption = self._adopted.pop(request.id, None)
        if adoption is not None and adoption.num_delivered != len(request.delivered):
            adoption.link.abort(adoption.handle)
            return None
        return adoption

    def known(self, id: str) -> JournalCopy | None:
        """Returns the stored copy of a stream that was found."""
        return self.store.get(id)

    def _take_over(self, run: StreamSession) -> None:
        """Ends a stream because its client reconnected."""
        journal = run.stream.journal
        self.closed(run, journal.end(), may_resume=True)
        why = "the client has reconnected and resumed this stream"
        if run.link is None:  # queued: no group can send it a setback
            run.give_up(BackendError(409, "resumed", why))
        else:
            run.stream.refused(wire.Refused(handle=run.handle, epoch=journal.epoch, status=409, code="resumed", message=why))

    def _next_epoch(self, request: wire.Request) -> wire.Request:
        """Returns the request to submit, with a new epoch unless the stream was adopted at its group."""
        return request if request.id in self._adopted else msgspec.structs.replace(request, epoch=request.epoch + 1)

    def _use(self, id: str, adoption: Adoption, is_best: bool) -> None:
        if not is_best or id in self._adopted:  # two leaders have it: one was left behind when the stream went to another group
            adoption.link.abort(adoption.handle)
            return
        self._adopted[id] = adoption

        def drop() -> None:
            if self._adopted.get(id) is adoption:
                del self._adopted[id]
                adoption.link.disown(adoption.handle)

        asyncio.get_running_loop().call_later(TAKE_UP_S, drop)

    async def _ask_peers(self, ids: Sequence[str]) -> Iterable[JournalCopy]:
        return await self.journals.ask(ids) if ids and self.journals is not None else []

    async def _adopt(self, ids: Sequence[str], tenant: str) -> tuple[list[Found], bool]:
        """Adopts these streams at all leaders, including those that are linked before the deadline.

        Returns the streams found, and whether each leader answered.
        """
        found: list[Found] = []
        is_certain = True
        queried: set[str] = set()
        deadline = self._clock() + self._settings.find_s
        while len(found) < len(ids):
            links = [link for link in self._links.open_links() if link.key not in queried]
            queried |= {link.key for link in links}
            left_s = deadline - self._clock()
            asking = (_ask(link, id, tenant, left_s) for link in links for id in ids)
            for answer in await asyncio.gather(*asking, return_exceptions=True):
                match answer:
                    case NoAnswer():
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
    """Adopts a stream at one leader, if the leader has it. Raises NoAnswer."""
    adopting = AdoptedStream()
    handle = link.adopt(id, tenant, adopting)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await adopting.answer
    except TimeoutError:
        link.disown(handle)  # the leader may have answered and handed over the stream
        raise NoAnswer from None
    if answer is None:
        raise NoAnswer
    if isinstance(answer, wire.Refused):
        return None
    copy = JournalCopy(answer.request, link.group_report.served.model_hash, answer.finish)
    stream = adopting.stream
    return copy, None if stream is None else Adoption(
        link=link, key=link.key, handle=handle, stream=stream, num_delivered=len(answer.request.delivered)
    )


def make_copy(run: StreamSession) -> JournalCopy:
    """Returns the copy that another router needs of an open stream."""
    journal = run.stream.journal
    return JournalCopy(journal.replay(), run.model_hash or "", None, run.deaths)


def _completeness(copy: JournalCopy) -> tuple[bool, int]:
    return copy.finish is not None, len(copy.request.delivered)
