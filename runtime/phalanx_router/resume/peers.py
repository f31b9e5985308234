"""Replicates journals to one other router every 20 ms, and queries all routers for streams.

The peer is the next router by name, wrapping around, so that each router is the peer of another. A peer that is unreachable or
unlisted is replaced by the next, which receives all open journals. A slow peer causes no queue: the next frame is built from the
journals after the previous one was sent.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from phalanx_api import wire
from phalanx_router.links.endpoints import Endpoint, Leaders, LeaderSource
from phalanx_router.links.leader_link import LinkSettings
from phalanx_router.resume import peer_wire
from phalanx_router.resume.peer_wire import JournalChanges, JournalCopy, JournalEnd
from phalanx_router.resume.registry import make_copy
from phalanx_router.session import StreamSession

log = logging.getLogger(__name__)

PERIOD_S = 0.02
MAX_BEGUN = 64
"""New journals per frame, since a new peer gets many at once."""
QUERY_TIMEOUT_S = 1.0
RETRY_S = 0.5
NO_PEER = (OSError, InvalidHandshake, InvalidURI, ConnectionClosed, TimeoutError, msgspec.DecodeError)


def peer_order(own: str, others: Iterable[Endpoint]) -> list[Endpoint]:
    """Returns the other routers, nearest peer first: in order of names from `own`, wrapping around; leaving ones last."""
    named = sorted((peer for peer in others if peer.group != own), key=lambda peer: peer.group)
    around = [peer for peer in named if peer.group > own] + [peer for peer in named if peer.group < own]
    return sorted(around, key=lambda peer: peer.leaving)


class PeerBacklog:
    """Journal changes that a peer has not received, per connection: a new connection starts with all open journals."""

    def __init__(self, open_runs: Iterable[StreamSession]) -> None:
        self._new = dict.fromkeys(open_runs)
        self._sent: dict[StreamSession, list[int]] = {}  # number, tokens sent
        self._grown: set[StreamSession] = set()
        self._over: list[JournalEnd] = []
        self._tails: list[tuple[int, Sequence[int]]] = []
        self._numbers = 0

    def opened(self, run: StreamSession) -> None:
        """Records a new stream."""
        self._new[run] = None

    def grown(self, run: StreamSession) -> None:
        """Records that a stream has more tokens."""
        self._grown.add(run)

    def closed(self, run: StreamSession, finish: wire.FinishReason | None, forgotten: bool) -> None:
        """Records the end of a stream. A stream that was never sent is skipped."""
        self._new.pop(run, None)
        self._grown.discard(run)
        if (sent := self._sent.pop(run, None)) is not None:
            self._tails.append((sent[0], run.stream.journal.delivered[sent[1] :]))
            self._over.append(JournalEnd(sent[0], finish, forgotten))

    def take(self) -> JournalChanges | None:
        """Returns the next frame if a journal changed."""
        tails, self._tails = self._tails, []
        over, self._over = self._over, []
        grown, self._grown = self._grown, set()
        for run in grown:
            if (sent := self._sent.get(run)) is not None:
                delivered = run.stream.journal.delivered
                tails.append((sent[0], delivered[sent[1] :]))
                sent[1] = len(delivered)
        begun: list[tuple[int, JournalCopy]] = []
        for run in list(self._new)[:MAX_BEGUN]:
            del self._new[run]
            self._numbers += 1
            begun.append((self._numbers, make_copy(run)))
            self._sent[run] = [self._numbers, len(run.stream.journal.delivered)]
        if not (begun or tails or over):
            return None
        numbers, counts = [number for number, _ in tails], [len(tail) for _, tail in tails]
        return JournalChanges(
            begun=begun, numbers=numbers, counts=counts, tokens=[token for _, tail in tails for token in tail], ended=over
        )


class Peers:
    """Replicates to one peer and queries all. Implements `phalanx_router.resume.registry.JournalReplication`."""

    def __init__(self, settings: LinkSettings, open_runs: Callable[[], Iterable[StreamSession]]) -> None:
        self.peer: Endpoint | None = None
        """The router that receives this router's journals."""
        self._settings = settings
        self._open_runs = open_runs
        self._others: list[Endpoint] = []
        self._outgoing: PeerBacklog | None = None
        self._listed = asyncio.Event()

    def opened(self, run: StreamSession) -> None:
        """Records a new stream."""
        if self._outgoing is not None:
            self._outgoing.opened(run)

    def grown(self, run: StreamSession) -> None:
        """Records that a stream has more tokens."""
        if self._outgoing is not None:
            self._outgoing.grown(run)

    def closed(self, run: StreamSession, finish: wire.FinishReason | None, forgotten: bool) -> None:
        """Records the end of a stream."""
        if self._outgoing is not None:
            self._outgoing.closed(run, finish, forgotten)

    async def ask(self, ids: Sequence[str]) -> list[JournalCopy]:
        """Returns the copies of these streams that the other routers have."""
        answer = await asyncio.gather(*(self._ask(peer, ids) for peer in self._others))
        return [copy for copies in answer for copy in copies]

    async def run(self, source: LeaderSource) -> None:
        """Follows the list of routers and replicates to one of them, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(source.run(self._found))
            tasks.create_task(self._keep())

    def _found(self, routers: Leaders) -> None:
        self._others = peer_order(self._settings.router, routers.values())
        self._listed.set()

    async def _keep(self) -> None:
        """Tries the routers in order; starts again at the first after an established peer is lost."""
        while True:
            if not self._others:
                self._listed.clear()
                await self._listed.wait()
            for peer in list(self._others):
                try:
                    async with self._dial(peer) as connection:
                        await self._supply(peer, connection)
                        break
                except NO_PEER as error:
                    had, self.peer, self._outgoing = self.peer, None, None
                    if had is not None:
                        log.warning("lost the peer", extra={"peer": peer.address, "why": str(error) or type(error).__name__})
                        break
            self.peer, self._outgoing = None, None
            await asyncio.sleep(RETRY_S)

    async def _supply(self, peer: Endpoint, connection: ClientConnection) -> None:
        """Sends changes until the peer leaves the list. Raises one of NO_PEER if it fails."""
        await connection.send(peer_wire.encode(self._greeting()))
        outgoing = self._outgoing = PeerBacklog(self._open_runs())
        self.peer = peer
        log.info("replicating journals to a peer", extra={"peer": peer.address})
        while any(other.key == peer.key and not other.leaving for other in self._others):
            await asyncio.sleep(PERIOD_S)
            changes = outgoing.take()
            if changes is not None:
                async with asyncio.timeout(self._settings.heartbeat_timeout_s):
                    await connection.send(peer_wire.encode(changes))
            elif connection.close_code is not None:
                raise ConnectionClosed(connection.protocol.close_rcvd, None)

    async def _ask(self, peer: Endpoint, ids: Sequence[str]) -> list[JournalCopy]:
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S), self._dial(peer) as connection:
                await connection.send(peer_wire.encode(self._greeting()))
                await connection.send(peer_wire.encode(peer_wire.JournalQuery(list(ids))))
                answer = peer_wire.decode(await connection.recv(decode=False))
        except NO_PEER as error:
            log.info("no answer from a router", extra={"peer": peer.address, "why": str(error) or type(error).__name__})
            return []
        return answer.copies if isinstance(answer, peer_wire.JournalAnswer) else []

    def _greeting(self) -> peer_wire.Greeting:
        return peer_wire.Greeting(self._settings.router, self._settings.instance)

    def _dial(self, peer: Endpoint) -> connect:
        return connect(
            f"ws://{peer.address}{peer_wire.PEER_PATH}",
            additional_headers={"Authorization": f"Bearer {self._settings.token}"},
            proxy=None,
            compression=None,
            open_timeout=QUERY_TIMEOUT_S,
            ping_interval=1.0,
            ping_timeout=self._settings.heartbeat_timeout_s,
            close_timeout=0.5,
            max_size=None,
        )
