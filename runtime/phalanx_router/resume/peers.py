"""Replicates journals and stored responses to one other router within 20 ms, queries all routers, and serves both.

The peer is the next router by name. A lost peer is replaced by the next, which receives all open journals. A slow peer causes no
queue: each frame is built after the previous one was sent.
"""

import asyncio
import logging
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

import msgspec
from starlette.responses import PlainTextResponse
from starlette.routing import WebSocketRoute
from starlette.websockets import WebSocket, WebSocketDisconnect
from websockets.exceptions import ConnectionClosed, InvalidHandshake, InvalidURI

from phalanx_api import labels, wire
from phalanx_api.wire import CLOSE_WRONG_VERSION, PROTOCOL_VERSION
from phalanx_frontend.auth.service_token import ServiceToken, is_bearer
from phalanx_frontend.connections import receive_binary
from phalanx_frontend.openai_responses.conversation_store import ConversationStore
from phalanx_frontend.tls import client_arguments
from phalanx_router.links.connection import LinkSettings, certificate_for, open_websocket
from phalanx_router.links.endpoints import Endpoint, Leaders, LeaderSource
from phalanx_router.resume import peer_wire
from phalanx_router.resume.backlog import PeerBacklog
from phalanx_router.resume.conversations import answer_query, take_over
from phalanx_router.resume.journal_store import CopyReceiver, PeerCopies
from phalanx_router.resume.peer_wire import (
    ConversationAnswer,
    ConversationHandOver,
    ConversationQuery,
    JournalAnswer,
    JournalCopy,
    JournalQuery,
    SharedResponse,
)
from phalanx_router.session import StreamSession

log = logging.getLogger(__name__)

PERIOD_S = 0.02
QUERY_TIMEOUT_S = 1.0
DOCUMENTS_TIMEOUT_S = 5.0
"""From an open connection to an answer with stored responses: up to 8 MiB."""
NEXT_PEER_S = 0.5
"""Time of a router to take responses until the next one gets them too."""
RETRY_S = 0.5
SILENCE_S = 60.0
"""Time for which a router that does not answer may still have a stream, as it keeps journals of ended streams."""
CONNECTION_ERRORS = (OSError, InvalidHandshake, InvalidURI, ConnectionClosed, TimeoutError, msgspec.DecodeError)
CLOSE_BAD_FRAME = 4400
GREETING_TIMEOUT_S = 5.0


Query = JournalQuery | ConversationQuery | ConversationHandOver


class ResponseExchange(Protocol):
    """Exchanges stored responses."""

    def notify(self, has_responses: Callable[[], None]) -> None:
        """Calls `has_responses` for each response that waits for the peer, from now on."""
        ...

    def take(self) -> list[SharedResponse]:
        """Removes and returns responses for the peer: those of one frame."""
        ...

    def receive(self, responses: Sequence[SharedResponse]) -> None:
        """Stores responses of another router."""
        ...


class _NoResponseExchange:
    def notify(self, has_responses: Callable[[], None]) -> None:
        pass

    def take(self) -> list[SharedResponse]:
        return []

    def receive(self, responses: Sequence[SharedResponse]) -> None:
        pass


NO_EXCHANGE: ResponseExchange = _NoResponseExchange()


class PeerConnection(Protocol):
    """Open connection to a router. Methods raise websockets' ConnectionClosed after its end."""

    @property
    def close_code(self) -> int | None:
        """Code of its end, once it has ended."""
        ...

    @property
    def close_reason(self) -> str | None:
        """Reason of its end, once it has ended."""
        ...

    async def send(self, message: bytes, /) -> None:
        """Sends one message, when the buffer has space."""
        ...

    async def recv(self, decode: Literal[False]) -> bytes:
        """Returns the next message."""
        ...

    async def wait_closed(self) -> None:
        """Returns after its end."""
        ...


DialPeer = Callable[[Endpoint, LinkSettings], AbstractAsyncContextManager[PeerConnection]]
"""Opens a connection to another router, which ends when no pong arrives within `heartbeat_timeout_s`.

Raises `CONNECTION_ERRORS`.
"""


def dial_peer(peer: Endpoint, settings: LinkSettings) -> AbstractAsyncContextManager[PeerConnection]:
    """Opens a WebSocket to the endpoint of another router."""
    certificate = certificate_for(peer, settings.certificate)
    return open_websocket(
        f"{peer.address}{peer_wire.PEER_PATH}",
        settings.token.current,
        client_arguments(certificate, labels.ROUTER_ROLE, is_https=peer.is_https),
        open_timeout=QUERY_TIMEOUT_S,
        ping_interval=1.0,
        ping_timeout=settings.heartbeat_timeout_s,
        close_timeout=0.5,
        max_size=None,
    )


def peer_order(own: str, others: Iterable[Endpoint]) -> list[Endpoint]:
    """Other routers by name from `own`, wrapping around; leaving ones last."""
    by_name = sorted((peer for peer in others if peer.group != own), key=lambda peer: peer.group)
    around = [peer for peer in by_name if peer.group > own] + [peer for peer in by_name if peer.group < own]
    return sorted(around, key=lambda peer: peer.is_leaving)


class Peers:
    """Implements `resume.registry.JournalReplication`."""

    def __init__(
        self,
        settings: LinkSettings,
        open_sessions: Callable[[], Iterable[StreamSession]],
        responses: ResponseExchange = NO_EXCHANGE,
        dial: DialPeer = dial_peer,
        period_s: float = PERIOD_S,
    ) -> None:
        self._dial, self._period_s = dial, period_s
        self.peer: Endpoint | None = None  # receives this router's journals and responses
        self._responses = responses
        self._settings = settings
        self._open_sessions = open_sessions
        self._others: list[Endpoint] = []
        self._silent_since: dict[str, float] = {}  # by key, of routers that did not answer the latest question
        self._taker = ""  # key of the router that took responses last
        self._backlog: PeerBacklog | None = None
        self._listed = asyncio.Event()
        self._changed = asyncio.Event()  # something to send or to look at: an idle router sleeps
        responses.notify(self._changed.set)

    def opened(self, session: StreamSession) -> None:
        """Records a new stream."""
        if self._backlog is not None:
            self._backlog.opened(session)
            self._changed.set()

    def extended(self, session: StreamSession) -> None:
        """Records new tokens."""
        if self._backlog is not None:
            self._backlog.extended(session)
            self._changed.set()

    def closed(self, session: StreamSession, finish: wire.FinishReason | None, is_forgotten: bool) -> None:
        """Records the end of a stream."""
        if self._backlog is not None:
            self._backlog.closed(session, finish, is_forgotten)
            self._changed.set()

    async def query(self, ids: Sequence[str]) -> tuple[list[JournalCopy], bool]:
        """Copies of these streams at the other routers; also returns whether every router that may have one has answered.

        A router that has not answered for `SILENCE_S` counts as one without streams.
        """
        answers = await self._ask(JournalQuery(list(ids)))
        now = asyncio.get_running_loop().time()
        silent = [now - self._silent_since[peer.key] < SILENCE_S for peer in self._others if peer.key in self._silent_since]
        return [copy for answer in answers if isinstance(answer, JournalAnswer) for copy in answer.copies], not any(silent)

    async def conversations(self, query: ConversationQuery) -> list[ConversationAnswer | None]:
        """Returns each other router's answer to a query of responses, or its deletion of one; None without an answer in time."""
        return [answer if isinstance(answer, ConversationAnswer) else None for answer in await self._ask(query)]

    async def hand_over(self, responses: ConversationHandOver) -> bool:
        """Gives responses to the first other router that takes them; returns whether one has.

        One that hangs holds up no other: after `NEXT_PEER_S` the next one gets them too.
        """
        peers = [peer for peer in self._others if not peer.is_leaving]
        waiting = sorted(peers, key=lambda peer: peer.key != self._taker)
        asked: dict[asyncio.Task[peer_wire.Frame | None], str] = {}
        try:
            while waiting or asked:
                if waiting:
                    peer = waiting.pop(0)
                    asked[asyncio.create_task(self._ask_peer(peer, responses))] = peer.key
                done, _ = await asyncio.wait(asked, timeout=NEXT_PEER_S if waiting else None, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    key = asked.pop(task)
                    if isinstance(task.result(), ConversationAnswer):
                        self._taker = key
                        return True
            return False
        finally:
            for task in asked:
                task.cancel()
            await asyncio.gather(*asked, return_exceptions=True)

    async def run(self, source: LeaderSource) -> None:
        """Replicates to one router of the list, until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(source.run(self._set_routers))
            tasks.create_task(self._follow_peer())

    def _set_routers(self, routers: Leaders) -> None:
        self._others = peer_order(self._settings.router, routers.values())
        listed = {peer.key for peer in self._others}
        self._silent_since = {key: since for key, since in self._silent_since.items() if key in listed}
        self._listed.set()
        self._changed.set()

    async def _follow_peer(self) -> None:
        """Tries the routers in order, again from the first after a lost peer."""
        while True:
            if not self._others:
                self._listed.clear()
                await self._listed.wait()
            for peer in list(self._others):
                try:
                    async with self._dial(peer, self._settings) as connection:
                        await self._replicate(peer, connection)
                        break
                except CONNECTION_ERRORS as error:
                    if self.peer is not None:
                        log.warning("lost the peer", extra={"peer": peer.address, "why": str(error) or type(error).__name__})
                        break
            self.peer, self._backlog = None, None
            await asyncio.sleep(RETRY_S)

    async def _replicate(self, peer: Endpoint, connection: PeerConnection) -> None:
        """Sends changes until the peer leaves the list. Raises `CONNECTION_ERRORS`."""
        await connection.send(peer_wire.encode(self._greeting()))
        backlog = self._backlog = PeerBacklog(self._open_sessions())
        self.peer = peer
        log.info("replicating journals to a peer", extra={"peer": peer.address})
        self._changed.set()
        ended = asyncio.ensure_future(connection.wait_closed())
        ended.add_done_callback(lambda _: self._changed.set())
        try:
            while any(other.key == peer.key and not other.is_leaving for other in self._others):
                await self._changed.wait()
                await asyncio.sleep(self._period_s)
                await self._send_changes(backlog, connection)
        finally:
            ended.cancel()

    async def _send_changes(self, backlog: PeerBacklog, connection: PeerConnection) -> None:
        """Sends one frame. Without changes it checks the connection."""
        changes = backlog.take(self._responses.take())
        if changes is not None:
            async with asyncio.timeout(self._settings.heartbeat_timeout_s):
                await connection.send(peer_wire.encode(changes))
            return  # there may be more
        self._changed.clear()
        if connection.close_code is not None:
            reason = connection.close_reason or "no close frame"
            raise ConnectionResetError(f"the connection ended ({connection.close_code} {reason})")

    async def _ask(self, query: Query) -> list[peer_wire.Frame | None]:
        """Returns each other router's answer; None without one in time."""
        return await asyncio.gather(*(self._ask_peer(peer, query) for peer in self._others))

    async def _ask_peer(self, peer: Endpoint, query: Query) -> peer_wire.Frame | None:
        try:
            async with asyncio.timeout(QUERY_TIMEOUT_S) as deadline, self._dial(peer, self._settings) as connection:
                if not isinstance(query, JournalQuery):
                    deadline.reschedule(asyncio.get_running_loop().time() + DOCUMENTS_TIMEOUT_S)
                await connection.send(peer_wire.encode(self._greeting()))
                await connection.send(peer_wire.encode(query))
                answer: peer_wire.Frame = peer_wire.decode(await connection.recv(decode=False))
                self._silent_since.pop(peer.key, None)
                return answer
        except CONNECTION_ERRORS as error:
            if isinstance(error, ConnectionRefusedError):  # it has ended, and its journals with it
                self._silent_since.pop(peer.key, None)
            else:
                self._silent_since.setdefault(peer.key, asyncio.get_running_loop().time())
            log.info("no answer from a router", extra={"peer": peer.address, "why": str(error) or type(error).__name__})
            return None

    def _greeting(self) -> peer_wire.Greeting:
        return peer_wire.Greeting(self._settings.router, self._settings.instance)


class UnknownVersion(Exception):
    """The routers share no protocol version."""


class PeerEndpoint:
    """Endpoint at `peer_wire.PEER_PATH`; requires the service token."""

    def __init__(
        self,
        token: ServiceToken,
        copies: PeerCopies,
        responses: ResponseExchange = NO_EXCHANGE,
        conversations: ConversationStore | None = None,
    ) -> None:
        self._token = token
        self._copies = copies
        self._responses = responses
        self._conversations = conversations if conversations is not None else ConversationStore()

    def route(self) -> WebSocketRoute:
        """Route for the router's application."""
        return WebSocketRoute(peer_wire.PEER_PATH, self.serve)

    async def serve(self, websocket: WebSocket) -> None:
        """Serves one router."""
        authorization = websocket.headers.get("authorization", "").encode("latin-1", "replace")
        if not is_bearer(authorization, self._token.accepted):
            await websocket.send_denial_response(PlainTextResponse("the service token is wrong\n", status_code=401))
            return
        await websocket.accept()
        receiver = self._copies.receiver()
        try:
            await self._receive(websocket, receiver)
        except msgspec.DecodeError as error:
            log.warning("invalid frame from another router", extra={"why": str(error)})
            await websocket.close(CLOSE_BAD_FRAME, "invalid frame between routers")
        except UnknownVersion as error:
            log.warning("rejected another router", extra={"why": str(error)})
            await websocket.close(CLOSE_WRONG_VERSION, str(error)[:120])
        except (WebSocketDisconnect, TimeoutError):
            pass  # the other router dials again
        finally:
            receiver.close()

    async def _receive(self, websocket: WebSocket, receiver: CopyReceiver) -> None:
        async with asyncio.timeout(GREETING_TIMEOUT_S):
            greeting = peer_wire.decode(await receive_binary(websocket))
        if not isinstance(greeting, peer_wire.Greeting):
            raise msgspec.DecodeError("expected a Greeting")
        if greeting.version != PROTOCOL_VERSION:
            raise UnknownVersion(f"this router supports peer version {PROTOCOL_VERSION}, {greeting.router} {greeting.version}")
        while True:
            match peer_wire.decode(await receive_binary(websocket)):
                case peer_wire.JournalChanges() as changes:
                    receiver.apply(changes)
                    self._responses.receive(changes.responses)
                case JournalQuery(ids):
                    await websocket.send_bytes(peer_wire.encode(peer_wire.JournalAnswer(self._copies.find(ids))))
                case ConversationQuery() as query:
                    await websocket.send_bytes(peer_wire.encode(answer_query(self._conversations, query)))
                case ConversationHandOver() as handed:
                    await websocket.send_bytes(peer_wire.encode(take_over(self._conversations, handed)))
                case frame:
                    raise msgspec.DecodeError(f"expected changes or a query, got {type(frame).__name__}")
