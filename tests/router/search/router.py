"""A router process: the real backend, journals, peers and endpoint of the operator behind calls in virtual time."""

import asyncio
import contextlib
import random
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any, cast

import msgspec
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.websockets import WebSocket
from websockets.exceptions import ConnectionClosedError

from bench.virtual.leader import TOKEN
from bench.virtual.net import Network, Process, Socket
from bench.virtual.peers import DialPeerFrom
from bench.virtual.websocket import VirtualWebSocket
from phalanx_api import wire
from phalanx_api.summary import SUMMARY_PATH
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_frontend.backend import BackendError, Delta, KeepAlive
from phalanx_frontend.errors import ApiError
from phalanx_frontend.ids import EventId
from phalanx_frontend.stream.reply import Reply
from phalanx_frontend.stream.resume import find_resumable, resume_answer
from phalanx_router.backend import RouterBackend
from phalanx_router.links.connection import LinkSettings
from phalanx_router.links.endpoints import LeaderSource
from phalanx_router.metrics import RouterMetrics
from phalanx_router.migration.manual import ManualMoves
from phalanx_router.moves.records import MoveEnded, MoveRequest
from phalanx_router.operator_endpoint import OperatorEndpoint
from phalanx_router.program import PING_INTERVAL_S, PING_TIMEOUT_S
from phalanx_router.resume.peers import PeerEndpoint, Peers
from phalanx_router.session import FleetSettings, StreamSession
from phalanx_router.summary import SummaryBuilder
from tests.router.search.calls import Call, Chunk, decode_call, encode

LINGER_S = 30.0
"""Until the server closes a connection whose answer is complete."""
LAME_DUCK_S, DRAIN_S = 2.0, 10.0
PEER_PERIOD_S, TICK_S = 0.25, 1.0
"""Longer than in production, to simulate more hours."""


class TokenReply:
    """The part of `phalanx_frontend.stream.reply.Reply` that a resume uses, without text."""

    finish: wire.FinishReason | None = None

    def __init__(self) -> None:
        self.completion_tokens = 0

    def skip_delivered(self, tokens: list[int]) -> str:
        """Counts tokens that the client has."""
        self.completion_tokens += len(tokens)
        return ""


class RouterProcess(Process):
    """One start of a router. Constructed in its own execution."""

    def __init__(self, name: str, uid: str, net: Network, rng: random.Random, report: Callable[[str], None]) -> None:
        super().__init__(name)
        self.uid = uid
        self.is_leaving = False
        self._report = report
        clock = asyncio.get_running_loop().time
        link = LinkSettings(token=ServiceToken([TOKEN]), router=name, instance=uid, dial=net.dial_from(self))
        metrics = RouterMetrics(CollectorRegistry())
        self.backend = RouterBackend(FleetSettings(link=link, patience_s=120.0, tick_s=TICK_S), metrics, rng.random, clock)
        registry = self.backend.stream_registry
        self.peers = Peers(link, registry.open_sessions, dial=DialPeerFrom(net, self), period_s=PEER_PERIOD_S)
        registry.replication = self.peers
        self._peer_endpoint = PeerEndpoint(ServiceToken([TOKEN]), registry.copies)
        balancing = self.backend.balancing
        summaries = SummaryBuilder(self.backend, metrics, name, clock)
        self._endpoint = OperatorEndpoint(
            ServiceToken([TOKEN]), balancing.set_policy, summaries.summary, summaries.urgent_state, clock
        )
        balancing.tick_listeners.append(self._endpoint.notify_if_changed)
        self.moves = ManualMoves(
            self.backend.links, self.backend.sessions, self.backend.mover, lambda: balancing.policy.budgets.bytes_per_s
        )
        net.listen(f"{name}/http", self, self._serve)
        net.listen(f"{name}/peer", self, self._serve_peer)
        self.tasks: set[asyncio.Task[None]] = set()
        self.num_moved = 0
        """Streams that it has moved to another group."""
        self.backend.mover.end_listeners.append(self._move_ended)

    def run(self, leaders: LeaderSource, routers: LeaderSource) -> None:
        """Follows the lists of pods."""
        self._start(self.backend.run(leaders), "the backend")
        self._start(self.peers.run(routers), "the replication")

    def _move_ended(self, session: StreamSession, planned: MoveRequest, ended: MoveEnded) -> None:
        self.num_moved += ended.outcome == "moved"

    def _start(self, job: Coroutine[Any, Any, None], what: str) -> None:
        task = asyncio.create_task(job)
        self.tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                self._report(f"{self.name}: {what} ended: {task.exception()!r}")

        task.add_done_callback(ended)

    async def shut_down(self) -> None:
        """Ends the router as `phalanx_router.program.shut_down`; its process ends a moment later."""
        self.is_leaving = self.backend.is_draining = True
        await asyncio.sleep(LAME_DUCK_S)
        self.backend.refuse()
        end = asyncio.get_running_loop().time() + DRAIN_S
        while self.backend.sessions and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(0.1)
        self.backend.close()
        await asyncio.sleep(1.0)

    async def _serve_peer(self, socket: Socket) -> None:
        websocket = VirtualWebSocket(socket, self.name, TOKEN, PING_INTERVAL_S + PING_TIMEOUT_S)
        await self._peer_endpoint.serve(cast(WebSocket, websocket))
        socket.close()

    async def _serve(self, socket: Socket) -> None:
        """Answers one call; a connection that ends aborts it."""
        try:
            call = decode_call(await socket.recv())
        except ConnectionClosedError:
            return
        answer, closed = asyncio.create_task(self._answer(socket, call)), asyncio.create_task(_closed(socket))
        await asyncio.wait((answer, closed), return_when=asyncio.FIRST_COMPLETED)
        if not closed.done():
            await asyncio.wait((closed,), timeout=LINGER_S)
        for task in (answer, closed):
            task.cancel()
        for result in await asyncio.gather(answer, closed, return_exceptions=True):
            if isinstance(result, Exception) and not isinstance(result, ConnectionClosedError):
                self._report(f"{self.name}: the API server failed: {result!r}")
        socket.close()

    async def _answer(self, socket: Socket, call: Call) -> None:
        if call.kind == "poll":
            await socket.send(encode(await self._poll(call)))
            return
        try:
            await self._generate(socket, call)
        except (BackendError, ApiError) as error:
            can_resume, retry_s = error.can_resume, getattr(error, "retry_after_s", None) or 0.0
            chunk = Chunk(status=error.status, code=error.code or "", can_resume=can_resume, retry_after_s=retry_s)
            await socket.send(encode(chunk))

    async def _poll(self, call: Call) -> Chunk:
        async def receive() -> dict[str, Any]:
            return {"type": "http.request", "body": call.body, "more_body": False}

        headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
        scope = {"type": "http", "method": "POST", "path": SUMMARY_PATH, "headers": headers, "query_string": b""}
        response = await self._endpoint.answer(Request(scope, cast(Callable[[], Awaitable[Any]], receive)))
        return Chunk(status=response.status_code, body=bytes(response.body))

    async def _generate(self, socket: Socket, call: Call) -> None:
        request, reply = call.request, TokenReply()
        assert request is not None, "a call to generate has one"
        if call.num_delivered >= 0 and self.backend.links.assets() is None:  # the API server tokenizes the body first
            raise BackendError(503, "no_group_ready", "no group has reported its model yet", 1.0, can_resume=True)
        stream: AsyncIterator[Delta | KeepAlive] = self.backend.generate(request)
        if call.num_delivered >= 0:
            event_id = EventId(request.id, (call.num_delivered - 1,))
            ((known, point),) = await find_resumable(self.backend, event_id, [request], None)
            stream = resume_answer(self.backend, known, cast(Reply, reply), lambda text, tokens: None, point)
        async with contextlib.aclosing(cast(Any, stream)):
            async for item in stream:
                if isinstance(item, Delta):
                    reply.completion_tokens += len(item.tokens)
                    await socket.send(encode(Chunk(index=item.index, tokens=list(item.tokens), finish=item.finish)))
                else:
                    await socket.send(encode(Chunk()))


async def _closed(socket: Socket) -> None:
    """Returns when the client has closed the connection."""
    with contextlib.suppress(ConnectionClosedError):
        while True:
            await socket.recv()


def copy_of(request: wire.Request, number: int) -> wire.Request:
    """Returns the request under the id of another attempt."""
    return msgspec.structs.replace(request, id=f"{request.id.partition('.')[0]}.{number}")
