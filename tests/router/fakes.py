"""A leader that is a real WebSocket server with scripted tokens, and builders for router tests."""

import asyncio
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from http import HTTPStatus
from itertools import count

import msgspec
from prometheus_client import CollectorRegistry
from websockets.asyncio.server import Server, ServerConnection, serve
from websockets.exceptions import ConnectionClosed
from websockets.http11 import Request as HttpRequest
from websockets.http11 import Response as HttpResponse

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy
from phalanx_api.wire import PROTOCOL_VERSION
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_frontend.backend import Delta
from phalanx_router.backend import RouterBackend
from phalanx_router.links.connection import LinkSettings
from phalanx_router.links.endpoints import Endpoint
from phalanx_router.metrics import RouterMetrics
from phalanx_router.routing.queue import QueueBounds
from phalanx_router.session import FleetSettings, StreamSession
from tests.frontend.fakes import EMBEDDING, detail_of, prompt_details_of, vector_of
from tests.polling import until

TOKEN = "secret of the service"
ASSETS = wire.make_assets({"tokenizer.json": b"{}"}, ["tiny"], 4096, [0])


def token_at(prompt: list[int], index: int) -> int:
    """Token of every fake leader: a function of prompt and output index."""
    return (sum(prompt) * 31 + len(prompt) * 7 + index * 13) % 50_021 + 1


def expected(prompt: list[int], count: int) -> list[int]:
    """Tokens of an undisturbed stream."""
    return [token_at(prompt, index) for index in range(count)]


def make_request(prompt: Iterable[int] = (1, 2, 3), max_tokens: int = 16, id: str = "request") -> wire.Request:
    return wire.Request(
        id=id, epoch=0, prompt=list(prompt), delivered=[], sampling=wire.Sampling(max_tokens=max_tokens, seed=7, temperature=0.0)
    )


@dataclass(slots=True)
class Script:
    """Behaviour of a fake leader."""

    die_after: int | None = None  # cut all connections after this many steps with tokens
    hold_at: int | None = None  # step after which tokens wait for `release`
    refuse: Callable[[wire.Submit], wire.Refused | None] | None = None  # answer to every Submit
    echo: int = 1  # copies of every frame
    stale: bool = False  # precede every frame by one of an older epoch with wrong tokens
    skip: set[int] = field(default_factory=set)  # indices to leave out once
    silent: bool = False  # no load reports
    protocol_version: int = PROTOCOL_VERSION
    first: bytes | None = None  # sent before Welcome
    finish: bool = True  # send Finished
    assets: wire.Assets = ASSETS
    sends_assets: bool = True
    draw: Callable[[wire.Request, int], int] = lambda request, index: token_at(request.prompt, index)
    embed: Callable[[wire.Request], bytes | None] = vector_of  # null: never
    endless_from: int = 10**9  # requests with at least this `max_tokens` stop after five tokens without an end
    sends_prefixes: bool = False  # reads `moves.SendPrefix`
    kills: Callable[[wire.Request], bool] = lambda request: False  # requests that kill the group within three tokens


@dataclass(slots=True)
class RunningRequest:
    submit: wire.Submit
    next_index: int


class FakeLeader:
    """A leader on localhost. One step: one token for each running request, as one frame per connection."""

    def __init__(self, group: str = "group-a", script: Script | None = None, token: str = TOKEN) -> None:
        self.group = group
        self.revision = "r1"
        self.script = script or Script()
        self.token = token
        self.port = 0
        self.state = wire.State(serving=True, incarnation=1, served=wire.Served(embedding_size=EMBEDDING.size))
        self.load = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=10, total_pages=10)
        self.submitted: list[wire.Submit] = []
        self.aborted: list[int] = []  # handles
        self.fetched = 0  # requests for the assets
        self.steps = 0
        self.deaths = 0
        self._released = asyncio.Event()
        self.running: dict[ServerConnection, dict[int, RunningRequest]] = {}
        self._last_handles: dict[ServerConnection, int] = {}
        self._server: Server | None = None

    @property
    def address(self) -> str:
        return f"127.0.0.1:{self.port}"

    def endpoint(self, created: str = "", is_leaving: bool = False) -> Endpoint:
        return Endpoint(key=self.group, address=self.address, group=self.group, created=created, is_leaving=is_leaving)

    async def start(self) -> None:
        """Listens, on the same port after a stop."""
        self._server = await serve(
            self._serve, "127.0.0.1", self.port, process_request=self._check, compression=None, ping_interval=None
        )
        self.port = next(iter(self._server.sockets)).getsockname()[1]

    async def stop(self) -> None:
        """Cuts every connection and stops listening."""
        if self._server is not None:
            self.cut()
            self._server.close()
            await self._server.wait_closed()
            self._server = None

    def cut(self) -> None:
        """Aborts every connection, as a killed process does."""
        for connection in list(self.running):
            connection.transport.abort()

    async def close(self) -> None:
        """Closes every connection normally and stops listening."""
        assert self._server is not None
        self._server.close(code=1012)
        await self._server.wait_closed()
        self._server = None

    def release(self) -> None:
        """Continues after `hold_at`."""
        self._released.set()

    async def send(self, frame: wire.FromLeader) -> None:
        """Sends a frame to every router."""
        if isinstance(frame, wire.State):
            if frame.incarnation != self.state.incarnation or not (frame.serving or frame.draining):
                for running in self.running.values():
                    running.clear()
            self.state = frame
        for connection in list(self.running):
            await connection.send(wire.encode(frame))

    async def until_linked(self) -> None:
        """Waits for a connected router."""
        await until(lambda: self.running)

    def _check(self, connection: ServerConnection, request: HttpRequest) -> HttpResponse | None:
        if request.path != wire.LINK_PATH or request.headers.get("Authorization") != f"Bearer {self.token}":
            return connection.respond(HTTPStatus.UNAUTHORIZED, "wrong token\n")
        return None

    async def _serve(self, connection: ServerConnection) -> None:
        script = self.script
        try:
            hello = wire.decode_to_leader(await connection.recv(decode=False))
            assert isinstance(hello, wire.Hello)
            if script.first is not None:
                await connection.send(script.first)
            if hello.protocol_version != script.protocol_version:
                await connection.close(4426, f"this leader speaks link version {script.protocol_version}")
                return
            self.running[connection] = {}
            assets_hash = script.assets.content_hash if script.sends_assets else ""
            await connection.send(
                wire.encode(
                    wire.Welcome(
                        protocol_version=script.protocol_version,
                        group=self.group,
                        revision=self.revision,
                        page_size=16,
                        assets_hash=assets_hash,
                        can_send_prefixes=script.sends_prefixes,
                    )
                )
            )
            await connection.send(wire.encode(self.state))
            parts = [self._step(connection)] + ([] if script.silent else [self._beat(connection)])
            tasks = [asyncio.create_task(part) for part in parts]
            try:
                while True:
                    await self.obey(connection, wire.decode_to_leader(await connection.recv(decode=False)))
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
        except ConnectionClosed:
            pass
        finally:
            self.running.pop(connection, None)

    async def obey(self, connection: ServerConnection, frame: wire.ToLeader) -> None:
        match frame:
            case wire.Submit():
                self.submitted.append(frame)
                self._last_handles[connection] = frame.handle
                refused = self.script.refuse(frame) if self.script.refuse else None
                if refused is not None:
                    await connection.send(wire.encode(refused))
                else:
                    self.running[connection][frame.handle] = RunningRequest(frame, len(frame.request.delivered))
            case wire.Abort():
                self.aborted += frame.handles
                for handle in frame.handles:
                    self.running[connection].pop(handle, None)
            case wire.Fetch():
                self.fetched += 1
                await connection.send(wire.encode(self.script.assets))

    async def _beat(self, connection: ServerConnection) -> None:
        for sequence in count(1):
            report = msgspec.structs.replace(self.load, sequence=sequence, last_handle=self._last_handles.get(connection, 0))
            await connection.send(wire.encode(report))
            await asyncio.sleep(0.02)

    async def _step(self, connection: ServerConnection) -> None:
        script = self.script
        while True:
            await asyncio.sleep(0.001)
            running = self.running[connection]
            if not running:
                continue
            if script.hold_at is not None and self.steps >= script.hold_at:
                await self._released.wait()
            frame = self._frame(running)
            if not frame.handles and not frame.finished and not script.skip:
                continue
            self.steps += 1
            if script.stale:
                stale = [epoch - 1 for epoch in frame.epochs]
                wrong = wire.Tokens(
                    handles=frame.handles,
                    epochs=stale,
                    indices=frame.indices,
                    tokens=[token + 1 for token in frame.tokens],
                    finished=[],
                )
                await connection.send(wire.encode(wrong))
            for _ in range(script.echo):
                await connection.send(wire.encode(frame))
            if any(
                script.kills(e.submit.request) and e.next_index > len(e.submit.request.delivered) + 2 for e in running.values()
            ):
                self.deaths += 1
                self.cut()
            if script.die_after is not None and self.steps >= script.die_after:
                self.cut()

    def _frame(self, running: dict[int, RunningRequest]) -> wire.Tokens:
        frame = wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[])
        for handle, entry in list(running.items()):
            request = entry.submit.request
            if request.pooling is not None:
                vector = self.script.embed(request)
                if vector is not None:
                    del running[handle]
                    frame.finished.append(wire.Finished(handle, request.epoch, "stop", 1, vector))
                continue
            index = entry.next_index
            if index >= 5 and request.sampling.max_tokens >= self.script.endless_from:
                continue
            entry.next_index += 1
            if index in self.script.skip:
                self.script.skip.discard(index)
                continue
            frame.handles.append(handle)
            frame.epochs.append(request.epoch)
            frame.indices.append(index)
            token = self.script.draw(request, index)
            frame.tokens.append(token)
            frame.details.append(detail_of(request, token))
            if index == 0 and (prompt_details := prompt_details_of(request)):
                frame.prompt_details.append(wire.PromptDetails(handle, request.epoch, 1, prompt_details))
            if index + 1 >= request.sampling.max_tokens:
                del running[handle]
                if self.script.finish:
                    frame.finished.append(wire.Finished(handle, request.epoch, "length", 5))
        if not any(frame.details):
            frame.details.clear()
        return frame


def make_settings(
    *,
    token: str = TOKEN,
    heartbeat_timeout_s: float = 3.0,
    patience_s: float = 10.0,
    keep_alive_s: float = 5.0,
    max_replays: int = 3,
    max_departures: int = 32,
    refusal_pause_s: float = 0.02,
    served_names: tuple[str, ...] = (),
    queue: QueueBounds | None = None,
    tick_s: float = 3600.0,
    hold_s: float = 0.0,
    max_held: int = 1024,
    find_s: float = 3.0,
    coalesces: bool = False,
) -> FleetSettings:
    """Settings of a router, by default without balancing ticks."""
    link = LinkSettings(
        token=ServiceToken([token]),
        router="router-0",
        heartbeat_timeout_s=heartbeat_timeout_s,
        open_timeout_s=1.0,
        first_retry_s=0.01,
        last_retry_s=0.05,
    )
    return FleetSettings(
        link=link,
        served_names=served_names,
        max_replays=max_replays,
        patience_s=patience_s,
        keep_alive_s=keep_alive_s,
        retry_after_s=2.0,
        refusal_pause_s=refusal_pause_s,
        max_departures=max_departures,
        queue=queue or QueueBounds(),
        tick_s=tick_s,
        hold_s=hold_s,
        max_held=max_held,
        find_s=find_s,
        policy=BalancePolicy(coalesce_requests=coalesces),
    )


class Leaders:
    """A leader source that a test changes."""

    def __init__(self, *endpoints: Endpoint) -> None:
        self._endpoints = endpoints
        self._on_change: Callable[[dict[str, Endpoint]], None] | None = None

    async def run(self, on_change: Callable[[dict[str, Endpoint]], None]) -> None:
        self._on_change = on_change
        self.change(*self._endpoints)
        await asyncio.Event().wait()

    def change(self, *endpoints: Endpoint) -> None:
        assert self._on_change is not None
        self._on_change({endpoint.key: endpoint for endpoint in endpoints})


@dataclass(slots=True)
class World:
    """A running backend over fake leaders."""

    fleet: RouterBackend
    leaders: list[FakeLeader]
    source: Leaders
    registry: CollectorRegistry
    metrics: RouterMetrics

    def metric(self, name: str, **labels: str) -> float:
        return self.registry.get_sample_value(name, labels) or 0.0

    async def until_ready(self, count: int) -> None:
        """Waits until the router counts `count` ready groups."""
        await until(lambda: self.metric("phalanx_router_groups_ready") == count)


@asynccontextmanager
async def running_world(
    *leaders: FakeLeader,
    settings: FleetSettings | None = None,
    ready: int | None = None,
    draw: Callable[[], float] = lambda: 0.0,
    clock: Callable[[], float] | None = None,
) -> AsyncIterator[World]:
    """A backend with a link to each leader; `ready` of them serve, all by default. `clock`: the event loop's by default."""
    async with AsyncExitStack() as stack:
        for leader in leaders:
            await leader.start()
            stack.push_async_callback(leader.stop)
        registry = CollectorRegistry()
        source = Leaders(*(leader.endpoint() for leader in leaders))
        metrics = RouterMetrics(registry)
        fleet = RouterBackend(settings or make_settings(), metrics, draw, clock or asyncio.get_running_loop().time)
        task = asyncio.create_task(fleet.run(source))
        try:
            world = World(fleet, list(leaders), source, registry, metrics)
            await world.until_ready(len(leaders) if ready is None else ready)
            yield world
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


def group_of(session: StreamSession) -> str:
    """Name of the group that runs the stream; empty without one."""
    return session.assignment.link.endpoint.group if session.assignment is not None else ""


@dataclass(slots=True)
class StreamResult:
    """Items that a client received of one stream."""

    tokens: list[int]
    finish: str | None
    keep_alives: int
    vector: bytes = b""


async def read_stream(fleet: RouterBackend, request: wire.Request) -> StreamResult:
    """Reads a whole stream. Fails unless every delta starts at the end of the previous one."""
    received = StreamResult([], None, 0)
    async with asyncio.timeout(20):
        async for item in fleet.generate(request):
            if isinstance(item, Delta):
                assert item.index == len(request.delivered) + len(received.tokens)
                received.tokens += item.tokens
                received.finish, received.vector = item.finish, item.vector
            else:
                received.keep_alives += 1
    return received
