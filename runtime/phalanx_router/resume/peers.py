"""The other routers of the service: one of them gets copies of our journals every 20 ms, all of them are asked for streams.

The peer is the next router in the order of names, so that of several routers each is another one's peer. One that cannot be
reached, or leaves the list, is replaced by the one after it, which gets all open journals anew. What waits for a slow peer is
the journals themselves: a frame is made when the one before it has left.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence

import msgspec
from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from phalanx_api import wire
from phalanx_api.wire.versions import PEER
from phalanx_router.links.endpoints import Endpoint, Leaders, LeaderSource
from phalanx_router.links.leader_link import LinkSettings
from phalanx_router.resume import peer_wire
from phalanx_router.resume.peer_wire import Changes, Copy, Ended
from phalanx_router.resume.registry import copy_of
from phalanx_router.session import Run

log = logging.getLogger(__name__)

PERIOD_S = 0.02
MAX_BEGUN = 64
"""New journals in one frame: a new peer gets many at once."""
ASK_S = 1.0
RETRY_S = 0.5
NO_PEER = (OSError, InvalidHandshake, InvalidURI, ConnectionClosed, TimeoutError, msgspec.DecodeError)


def ring(own: str, others: Iterable[Endpoint]) -> list[Endpoint]:
    """The other routers, nearest peer first: the next in the order of names, then on around; leaving ones last."""
    named = sorted((peer for peer in others if peer.group != own), key=lambda peer: peer.group)
    around = [peer for peer in named if peer.group > own] + [peer for peer in named if peer.group < own]
    return sorted(around, key=lambda peer: peer.leaving)


class Outgoing:
    """What a peer has not been told yet of our journals. One connection's: a new one begins with all that are open."""

    def __init__(self, open_runs: Iterable[Run]) -> None:
        self._new = dict.fromkeys(open_runs)
        self._sent: dict[Run, list[int]] = {}  # number, tokens told
        self._grown: set[Run] = set()
        self._over: list[Ended] = []
        self._tails: list[tuple[int, Sequence[int]]] = []
        self._numbers = 0

    def opened(self, run: Run) -> None:
        """A stream began."""
        self._new[run] = None

    def grown(self, run: Run) -> None:
        """A stream has more tokens."""
        self._grown.add(run)

    def closed(self, run: Run, finish: wire.FinishReason | None, forgotten: bool) -> None:
        """A stream is over. One that the peer never heard of is none of its business."""
        self._new.pop(run, None)
        self._grown.discard(run)
        if (sent := self._sent.pop(run, None)) is not None:
            self._tails.append((sent[0], run.stream.journal.delivered[sent[1] :]))
            self._over.append(Ended(sent[0], finish, forgotten))

    def take(self) -> Changes | None:
        """The next frame, or None while nothing changed."""
        tails, self._tails = self._tails, []
        over, self._over = self._over, []
        grown, self._grown = self._grown, set()
        for run in grown:
            if (sent := self._sent.get(run)) is not None:
                delivered = run.stream.journal.delivered
                tails.append((sent[0], delivered[sent[1] :]))
                sent[1] = len(delivered)
        begun: list[tuple[int, Copy]] = []
        for run in list(self._new)[:MAX_BEGUN]:
            del self._new[run]
            self._numbers += 1
            begun.append((self._numbers, copy_of(run)))
            self._sent[run] = [self._numbers, len(run.stream.journal.delivered)]
        if not (begun or tails or over):
            return None
        numbers, counts = [number for number, _ in tails], [len(tail) for _, tail in tails]
        return Changes(begun, numbers, counts, [token for _, tail in tails for token in tail], over)


class Peers:
    """Keeps a peer and asks all. Implements `phalanx_router.resume.registry.Journals`."""

    def __init__(self, settings: LinkSettings, open_runs: Callable[[], Iterable[Run]]) -> None:
        self.peer: Endpoint | None = None
        """Who has our journals now."""
        self._settings = settings
        self._open_runs = open_runs
        self._others: list[Endpoint] = []
        self._outgoing: Outgoing | None = None
        self._listed = asyncio.Event()

    def opened(self, run: Run) -> None:
        """A stream began."""
        if self._outgoing is not None:
            self._outgoing.opened(run)

    def grown(self, run: Run) -> None:
        """A stream has more tokens."""
        if self._outgoing is not None:
            self._outgoing.grown(run)

    def closed(self, run: Run, finish: wire.FinishReason | None, forgotten: bool) -> None:
        """A stream is over."""
        if self._outgoing is not None:
            self._outgoing.closed(run, finish, forgotten)

    async def ask(self, ids: Sequence[str]) -> list[Copy]:
        """What the other routers know of these streams."""
        told = await asyncio.gather(*(self._ask(peer, ids) for peer in self._others))
        return [copy for copies in told for copy in copies]

    async def run(self, source: LeaderSource) -> None:
        """Follows the other routers, and keeps one of them supplied, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(source.run(self._found))
            tasks.create_task(self._keep())

    def _found(self, routers: Leaders) -> None:
        self._others = ring(self._settings.router, routers.values())
        self._listed.set()

    async def _keep(self) -> None:
        """Tries the others in their order; goes back to the first when one that it had is gone."""
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
                        log.warning("the peer is gone", extra={"peer": peer.address, "why": str(error) or type(error).__name__})
                        break
            self.peer, self._outgoing = None, None
            await asyncio.sleep(RETRY_S)

    async def _supply(self, peer: Endpoint, connection: ClientConnection) -> None:
        """Sends what changes until the peer leaves the list. Raises one of NO_PEER when it is gone."""
        await connection.send(peer_wire.encode(self._greeting()))
        outgoing = self._outgoing = Outgoing(self._open_runs())
        self.peer = peer
        log.info("journals go to a peer", extra={"peer": peer.address})
        while any(other.key == peer.key and not other.leaving for other in self._others):
            await asyncio.sleep(PERIOD_S)
            changes = outgoing.take()
            if changes is not None:
                async with asyncio.timeout(self._settings.heartbeat_timeout_s):
                    await connection.send(peer_wire.encode(changes))
            elif connection.close_code is not None:
                raise ConnectionClosed(connection.protocol.close_rcvd, None)

    async def _ask(self, peer: Endpoint, ids: Sequence[str]) -> list[Copy]:
        try:
            async with asyncio.timeout(ASK_S), self._dial(peer) as connection:
                await connection.send(peer_wire.encode(self._greeting()))
                await connection.send(peer_wire.encode(peer_wire.Wanted(list(ids))))
                told = peer_wire.decode(await connection.recv(decode=False))
        except NO_PEER as error:
            log.info("a router does not answer", extra={"peer": peer.address, "why": str(error) or type(error).__name__})
            return []
        return told.copies if isinstance(told, peer_wire.Told) else []

    def _greeting(self) -> peer_wire.Greeting:
        return peer_wire.Greeting(self._settings.router, self._settings.instance, PEER.newest, PEER.oldest)

    def _dial(self, peer: Endpoint) -> connect:
        return connect(
            f"ws://{peer.address}{peer_wire.PEER_PATH}",
            additional_headers={"Authorization": f"Bearer {self._settings.token}"},
            proxy=None,
            compression=None,
            open_timeout=ASK_S,
            ping_interval=1.0,
            ping_timeout=self._settings.heartbeat_timeout_s,
            close_timeout=0.5,
            max_size=None,
        )
