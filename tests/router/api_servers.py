"""The leader's real link over a scripted engine, behind a real HTTP server on localhost."""

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp

from phalanx_api import wire
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_frontend.backend import BackendError
from phalanx_runtime.engine.load_feed import EngineObserver, PageKeys
from phalanx_runtime.engine.move_relay import MoveOrder, MoveRelay
from phalanx_runtime.engine.open_requests import RequestSink
from phalanx_runtime.server.link.connection import LinkSettings
from phalanx_runtime.server.link.endpoint import LinkEndpoint
from phalanx_runtime.server.link.gateway import EngineGateway
from tests.frontend.fakes import detail_of, prompt_details_of
from tests.polling import until
from tests.router.fakes import ASSETS, TOKEN, token_at


class FakeEngine:
    """An EngineGateway. `step` samples one token for each request with fewer than `hold`, as one frame per sink."""

    def __init__(self) -> None:
        self.submitted: dict[int, tuple[wire.Request, RequestSink]] = {}
        self.aborted: list[int] = []
        self.present: wire.State = wire.State(serving=True, incarnation=1)
        self.known_assets: wire.Assets | None = ASSETS
        self.reported = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=8, total_pages=8)
        self.subscribers: list[Callable[[], None]] = []
        self.observers: list[EngineObserver] = []
        self.found = PageKeys()
        self.hold = 10**9
        self.draw: Callable[[wire.Request, int], int] = lambda request, index: token_at(request.prompt, index)
        self._next: dict[int, int] = {}
        self.ordered: list[MoveOrder] = []
        self.moved: dict[int, str] = {}
        self.refusal: BackendError | None = None
        self.moves = MoveRelay(self.ordered.append, lambda handle: self.abort([handle]))

    def submit(self, request: wire.Request, sink: RequestSink, move: str = "") -> int:
        if self.refusal is not None:
            raise self.refusal
        handle = 1000 + len(self._next)
        self.submitted[handle] = (request, sink)
        self.moved |= {handle: move} if move else {}
        self._next[handle] = len(request.delivered)
        return handle

    def has(self, handle: int) -> bool:
        return handle in self.submitted

    def reassign(self, handles: Iterable[int], sink: RequestSink) -> None:
        for handle in handles:
            self.submitted[handle] = (self.submitted[handle][0], sink)

    def abort(self, handles: list[int]) -> None:
        self.aborted += handles
        for handle in handles:
            self.submitted.pop(handle, None)

    def state(self) -> wire.State:
        return self.present

    def load(self) -> wire.Load:
        return self.reported

    def assets(self) -> wire.Assets:
        if self.known_assets is None:
            raise BackendError(503, "model_loading", "not yet")
        return self.known_assets

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        self.subscribers.append(changed)
        return lambda: self.subscribers.remove(changed)

    def observe(self, observer: EngineObserver) -> Callable[[], None]:
        self.observers.append(observer)
        return lambda: self.observers.remove(observer)

    def pages(self) -> wire.PageChanges:
        return self.found.snapshot()

    def report(self, load: wire.Load) -> None:
        """Sends a load report."""
        self.reported = load
        for follower in list(self.observers):
            follower.load_changed()

    def send_pages(self, changes: wire.PageChanges) -> None:
        """Sends page changes."""
        self.found.apply(changes)
        for follower in list(self.observers):
            follower.pages_changed(changes)

    def change(self, state: wire.State) -> None:
        """Sends a state; a new incarnation drops all requests."""
        if state.incarnation != self.present.incarnation:
            self.submitted.clear()
            self.found = PageKeys()
        self.present = state
        for changed in list(self.subscribers):
            changed()

    def step(self) -> None:
        """Samples one token for every request."""
        frames: dict[int, tuple[RequestSink, wire.Tokens]] = {}
        for handle, (request, sink) in list(self.submitted.items()):
            index = self._next[handle]
            if index >= self.hold:
                continue
            self._next[handle] += 1
            _, frame = frames.setdefault(id(sink), (sink, wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[])))
            frame.handles.append(handle)
            frame.epochs.append(request.epoch)
            frame.indices.append(index)
            token = self.draw(request, index)
            frame.tokens.append(token)
            frame.details.append(detail_of(request, token))
            if index == 0 and (prompt_details := prompt_details_of(request)):
                frame.prompt_details.append(wire.PromptDetails(handle, request.epoch, 1, prompt_details))
            if index + 1 >= request.sampling.max_tokens:
                frame.finished.append(wire.Finished(handle, request.epoch, "length"))
                del self.submitted[handle]
        for sink, frame in frames.values():
            if not any(frame.details):
                frame.details.clear()
            sink.tokens(frame)

    async def run(self) -> None:
        """Runs steps until cancelled."""
        while True:
            self.step()
            await asyncio.sleep(0)


class QuietServer(uvicorn.Server):
    """A server without signal handlers."""

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


@asynccontextmanager
async def http_server(app: ASGIApp) -> AsyncIterator[str]:
    """Serves an application on a free port of localhost; yields host:port."""
    listening = socket.create_server(("127.0.0.1", 0))
    config = uvicorn.Config(
        app, log_config=None, ws="websockets-sansio", ws_per_message_deflate=False, timeout_graceful_shutdown=1, access_log=False
    )
    server = QuietServer(config)
    task = asyncio.create_task(server.serve([listening]))
    try:
        await until(lambda: server.started)
        yield f"127.0.0.1:{listening.getsockname()[1]}"
    finally:
        server.should_exit = True
        await task


def make_link_settings(
    *,
    tick_s: float = 0.01,
    heartbeat_s: float = 0.05,
    stall_s: float = 10.0,
    max_waiting_tokens: int = 1_000_000,
    hello_s: float = 5.0,
) -> LinkSettings:
    return LinkSettings(
        token=ServiceToken([TOKEN]),
        group="group-a",
        revision="r1",
        page_size=16,
        tick_s=tick_s,
        heartbeat_s=heartbeat_s,
        stall_s=stall_s,
        max_waiting_tokens=max_waiting_tokens,
        hello_s=hello_s,
    )


@asynccontextmanager
async def running_leader(engine: EngineGateway, settings: LinkSettings | None = None) -> AsyncIterator[tuple[str, LinkEndpoint]]:
    """The leader's link over an engine; yields host:port and the endpoint."""
    endpoint = LinkEndpoint(engine, settings or make_link_settings())
    async with http_server(Starlette(routes=[endpoint.route()])) as address:
        yield address, endpoint


@dataclass(slots=True)
class Path:
    """A network path to a server. While `held` is set, data to the server is delayed; data from it is not."""

    address: str
    held: asyncio.Event


@asynccontextmanager
async def slow_path(address: str) -> AsyncIterator[Path]:
    """A path to this host:port with a delayable direction to the server."""
    host, _, port = address.rpartition(":")
    path = Path("", asyncio.Event())

    async def copy(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, is_delayable: bool) -> None:
        with contextlib.suppress(OSError):
            while data := await reader.read(1 << 16):
                while is_delayable and path.held.is_set():
                    await asyncio.sleep(0.002)
                writer.write(data)
                await writer.drain()
        writer.close()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        server_reader, server_writer = await asyncio.open_connection(host, int(port))
        await asyncio.gather(copy(reader, server_writer, True), copy(server_reader, writer, False))

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    path.address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield path
    finally:
        path.held.clear()
        server.close()
