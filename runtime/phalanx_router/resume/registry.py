"""Registry of resumable streams.

    open here          the client reconnected early: the old stream ends, the new one continues its journal
    at a leader        an orphan, adopted
    in the store       closed here, or a copy from a lost router
    at another router  the same there

The newest journal of a router says what the client got. A leader with these tokens continues them, the one of the newest epoch:
a group whose link broke runs on, in bf16 with other tokens. The lookup waits for leaders that are not linked yet, unless a
journal shows that the newest run is found.
"""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import msgspec

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, ResumableStream
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.resume.journal_store import JournalStore, PeerCopies, with_history
from phalanx_router.resume.peer_wire import JournalCopy, JournalHistory
from phalanx_router.session import FleetSettings, StreamSession
from phalanx_router.streams.stream import AdoptedStream, Stream

log = logging.getLogger(__name__)

CLAIM_TIMEOUT_S = 10.0
"""Time before an unclaimed adopted stream is disowned."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Adoption:
    """A stream at a leader that this router adopted."""

    link: LeaderLink
    key: str
    handle: int
    stream: Stream
    num_delivered: int


FoundCopy = tuple[JournalCopy, Adoption | None]
PeerAnswer = tuple[Sequence[JournalCopy], bool]
"""Copies at other routers, and whether every router that may have one has answered."""


class NoAnswer(Exception):
    """A leader did not answer an Adopt."""


class JournalReplication(Protocol):
    """Replicates open journals to other routers and queries theirs."""

    def opened(self, session: StreamSession) -> None:
        """Records a new stream."""
        ...

    def extended(self, session: StreamSession) -> None:
        """Records new tokens."""
        ...

    def closed(self, session: StreamSession, finish: wire.FinishReason | None, is_forgotten: bool) -> None:
        """Records an end; a forgotten stream cannot be resumed."""
        ...

    async def query(self, ids: Sequence[str]) -> tuple[Iterable[JournalCopy], bool]:
        """Copies of these streams at the other routers; also returns whether every router that may have one has answered."""
        ...


class _NoReplication:
    def opened(self, session: StreamSession) -> None:
        pass

    def extended(self, session: StreamSession) -> None:
        pass

    def closed(self, session: StreamSession, finish: wire.FinishReason | None, is_forgotten: bool) -> None:
        pass

    async def query(self, ids: Sequence[str]) -> tuple[Iterable[JournalCopy], bool]:
        return (), True


NO_REPLICATION: JournalReplication = _NoReplication()


class StreamRegistry:
    """Finds streams for clients that resume."""

    def __init__(self, links: LinkPool, settings: FleetSettings, clock: Callable[[], float]) -> None:
        self.store = JournalStore(clock)
        self.copies = PeerCopies(self.store)  # of other routers' journals
        self.replication = NO_REPLICATION
        self._links = links
        self._settings = settings
        self._clock = clock
        self._open: dict[str, StreamSession] = {}
        self._adopted: dict[str, Adoption] = {}
        self._searches: set[asyncio.Task[Mapping[str, ResumableStream]]] = set()

    def opened(self, session: StreamSession) -> None:
        """Registers a new stream."""
        id = session.stream.journal.id
        if id not in self._open:
            self.store.opened(id)
        self._open[id] = session
        self.replication.opened(session)

    def closed(self, session: StreamSession, finish: wire.FinishReason | None, may_resume: bool) -> None:
        """Unregisters a stream; stores a resumable journal."""
        id = session.stream.journal.id
        self.replication.closed(session, finish, not may_resume)
        if self._open.get(id) is session:
            del self._open[id]
            self.store.ended(id)
            if may_resume:
                self.store.put(msgspec.structs.replace(make_copy(session), finish=finish))
            else:
                self.store.forget(id)

    def open_sessions(self) -> list[StreamSession]:
        """Streams that are open here."""
        return list(self._open.values())

    async def find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        """Finds these streams of `tenant`. The search completes even if its client disconnects: adopted streams are kept.

        Raises BackendError 503 when a leader or a router that does not answer may have a missing stream.
        """
        search = asyncio.create_task(self._find(ids, tenant))
        self._searches.add(search)
        search.add_done_callback(self._search_ended)
        return await asyncio.shield(search)

    def _search_ended(self, search: asyncio.Task[Mapping[str, ResumableStream]]) -> None:
        self._searches.discard(search)
        if not search.cancelled():
            search.exception()  # its client may have left; asyncio would log it

    async def _find(self, ids: Sequence[str], tenant: str) -> Mapping[str, ResumableStream]:
        for id in ids:
            if (adoption := self._adopted.get(id)) is not None and adoption.stream.journal.tenant == tenant:
                del self._adopted[id]  # found before and never claimed: the leader returns it again
            if (session := self._open.get(id)) is not None and session.stream.journal.tenant == tenant:
                self._take_over(session)
        best = {copy.request.id: copy for copy in self.copies.find(ids) if copy.request.tenant == tenant}
        missing = [id for id in ids if id not in best or best[id].finish is None]
        asked = asyncio.create_task(self._query_peers(missing, tenant))
        (copies, have_answered), (adopted, is_certain) = await asyncio.gather(
            asked, self._adopt(missing, tenant, list(best.values()), asked)
        )
        for id in missing:
            journals, orphans = _of_stream(id, (*copies, *best.values())), _of_stream(id, (copy for copy, _ in adopted))
            if (chosen := choose_copy(journals, orphans)) is not None:
                best[id] = chosen
        for copy, adoption in adopted:
            if adoption is not None:
                self._register(copy.request.id, adoption, best[copy.request.id] is copy)
        for copy in best.values():
            self.store.put(copy)
        if any(id not in best for id in ids):
            self._check_answers(is_certain, have_answered)
        log.info("looked up streams", extra={"requested": len(ids), "found": len(best), "running": len(self._adopted)})
        return {
            id: ResumableStream(self._next_epoch(copy.request), copy.finish, has_lost_router=id in self._adopted)
            for id, copy in best.items()
        }

    def _check_answers(self, have_groups_answered: bool, have_routers_answered: bool) -> None:
        """Raises BackendError 503 if a group or a router that may have the missing stream has not answered."""
        if not have_groups_answered:
            why = "a group that may have this stream does not answer: retry, the stream continues there for a while"
            raise BackendError(503, "groups_silent", why, self._settings.retry_after_s, can_resume=True)
        if not have_routers_answered:
            why = "a router that may have this stream does not answer: retry"
            raise BackendError(503, "routers_silent", why, self._settings.retry_after_s, can_resume=True)

    def claim(self, request: wire.Request) -> Adoption | None:
        """Adopted stream with the same delivered tokens."""
        adoption = self._adopted.pop(request.id, None)
        if adoption is not None and adoption.num_delivered != len(request.delivered):
            adoption.link.abort(adoption.handle)
            return None
        return adoption

    def stored_copy(self, id: str) -> JournalCopy | None:
        """Stored copy of a stream that was found."""
        return self.store.get(id)

    def _take_over(self, session: StreamSession) -> None:
        journal, assignment = session.stream.journal, session.assignment
        self.closed(session, journal.finish_reason(), may_resume=True)
        why = "the client has reconnected and resumed this stream"
        if assignment is None:  # queued: no group can send it a setback
            session.give_up(BackendError(409, "resumed", why))
            return
        session.stream.refused(
            wire.Refused(handle=assignment.handle, epoch=journal.epoch, status=409, code="resumed", message=why)
        )

    def _next_epoch(self, request: wire.Request) -> wire.Request:
        return request if request.id in self._adopted else msgspec.structs.replace(request, epoch=request.epoch + 1)

    def _register(self, id: str, adoption: Adoption, is_best: bool) -> None:
        """Keeps an adopted stream until a request claims it."""
        if not is_best or id in self._adopted:  # two leaders have it
            adoption.link.abort(adoption.handle)
            return
        self._adopted[id] = adoption

        def drop() -> None:
            if self._adopted.get(id) is adoption:
                del self._adopted[id]
                adoption.link.disown(adoption.handle)

        asyncio.get_running_loop().call_later(CLAIM_TIMEOUT_S, drop)

    async def _query_peers(self, ids: Sequence[str], tenant: str) -> PeerAnswer:
        if not ids:
            return [], True
        copies, have_answered = await self.replication.query(ids)
        return [copy for copy in copies if copy.request.tenant == tenant], have_answered

    async def _adopt(
        self, ids: Sequence[str], tenant: str, stored: Sequence[JournalCopy], asked: Awaitable[PeerAnswer]
    ) -> tuple[list[FoundCopy], bool]:
        """Adopts streams at all leaders that are linked in time; also returns whether each answered.

        It ends early only with journals, stored here or at the routers that are `asked`: without one, a leader that is not linked
        yet may have a newer run.
        """
        found: list[FoundCopy] = []
        is_certain = True
        queried: set[str] = set()
        deadline = self._clock() + self._settings.find_s
        while ids and (left_s := deadline - self._clock()) > 0:
            links = [link for link in self._links.open_links() if link.key not in queried]
            queried |= {link.key for link in links}
            attempts = (_adopt_at(link, id, tenant, left_s) for link in links for id in ids)
            for answer in await asyncio.gather(*attempts, return_exceptions=True):
                match answer:
                    case NoAnswer():
                        is_certain = False
                    case BaseException():
                        raise answer
                    case (_, _):
                        found.append(answer)
            if any(link.key not in queried for link in self._links.open_links()):  # opened meanwhile
                continue
            if self._links.all_open():
                break
            copies, _ = await asked
            if _have_newest(ids, (*copies, *stored), [copy for copy, _ in found]):
                break
            if all(link.key in queried for link in self._links.open_links()):
                await self._links.wait_for_change(deadline - self._clock())
        return found, is_certain


async def _adopt_at(link: LeaderLink, id: str, tenant: str, timeout_s: float) -> FoundCopy | None:
    """Adopts a stream at one leader. Raises NoAnswer."""
    adopted = AdoptedStream()
    handle = link.adopt(id, tenant, adopted)
    try:
        async with asyncio.timeout(timeout_s):
            answer = await adopted.answer
    except TimeoutError:
        link.disown(handle)  # the leader may have answered and handed over the stream
        raise NoAnswer from None
    if answer is None:
        raise NoAnswer
    if isinstance(answer, wire.Refused):
        return None
    copy = JournalCopy(answer.request, link.group_report.served.model_hash, answer.finish)
    stream = adopted.stream
    return copy, None if stream is None else Adoption(
        link=link, key=link.key, handle=handle, stream=stream, num_delivered=len(answer.request.delivered)
    )


def make_copy(session: StreamSession) -> JournalCopy:
    """Copy of an open stream, without pixels: these are a thousand times larger, and a client that resumes sends them again."""
    request = session.stream.journal.replay().without_pixels()
    return with_history(JournalCopy(request, session.computing.model_hash or ""), history(session))


def history(session: StreamSession) -> JournalHistory:
    """History of an open stream; of a joined one with that of its computation."""
    sessions = session, session.computing
    journals = [each.stream.journal for each in sessions]
    deaths = max(each.failures.num_deaths for each in sessions)
    return JournalHistory(max(journal.epoch for journal in journals), deaths, any(journal.is_alone for journal in journals))


def choose_copy(journals: Sequence[JournalCopy], orphans: Sequence[JournalCopy]) -> JournalCopy | None:
    """Returns the copy of a stream to continue, of the `journals` of routers and of those at leaders.

    An orphan of an older epoch is as good if it has the tokens of the journal: it may run for a stream with which it is shared.
    """
    received = max(journals, key=_newness, default=None)
    if received is None or received.finish is None:
        tokens = [] if received is None else received.request.delivered
        orphans = [orphan for orphan in orphans if orphan.request.delivered[: len(tokens)] == tokens]
        return max(orphans, key=_newness, default=received)
    return received


def _of_stream(id: str, copies: Iterable[JournalCopy]) -> list[JournalCopy]:
    return [copy for copy in copies if copy.request.id == id]


def _have_newest(ids: Sequence[str], journals: Sequence[JournalCopy], orphans: Sequence[JournalCopy]) -> bool:
    """Whether no leader can have a newer run of any of these streams: a journal has the end, or the epoch of an orphan."""
    for id in ids:
        received = max(_of_stream(id, journals), key=_newness, default=None)
        if received is None:
            return False
        chosen = choose_copy([received], _of_stream(id, orphans))
        if received.finish is None and (chosen is None or chosen is received or chosen.request.epoch < received.request.epoch):
            return False
    return True


def _newness(copy: JournalCopy) -> tuple[int, bool, int]:
    return copy.request.epoch, copy.finish is not None, len(copy.request.delivered)
