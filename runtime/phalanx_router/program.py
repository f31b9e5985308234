"""The router as a program: from settings to a server, and its orderly end."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.config import WS_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from phalanx_frontend.limits import IDLE_CONNECTION_S
from phalanx_frontend.logs import start_logging
from phalanx_router.app import make_router
from phalanx_router.backend import Fleet
from phalanx_router.links.connection import MAX_FRAME_BYTES
from phalanx_router.links.endpoints import LeaderSource, StaticLeaders, router_selector, selector
from phalanx_router.links.leader_link import LinkSettings
from phalanx_router.routing.queue import QueueBounds
from phalanx_router.session import FleetSettings
from phalanx_router.settings import Settings, read_settings

log = logging.getLogger("phalanx_router")

GRACE_S = 3
"""How long open streams have to take their last event at the end."""
LOOK_S = 0.02


def run(arguments: Sequence[str]) -> int:
    """The exit code: 0 after SIGTERM or SIGINT, 1 after a bug. Raises SystemExit 2 for a bad flag."""
    settings = read_settings(arguments)
    start_logging(settings.log_level.upper())
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(serve(settings))


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop  # no use to tests

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class Farewell:
    """ASGI middleware: while the router leaves, a connection ends with the answer to its next request.

    Its client comes again by the Service, which knows the routers that stay; over the old connection every request would come
    here, and be refused in the end.
    """

    def __init__(self, app: ASGIApp, fleet: Fleet) -> None:
        self._app = app
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request."""

        async def last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        leaves = scope["type"] == "http" and self._fleet.draining
        await self._app(scope, receive, last if leaves else send)


class _Server(uvicorn.Server):
    """A server that leaves signals to us: the first one does not end it at once."""

    exit_code = 0

    def fail(self, error: BaseException) -> None:
        """Ends the server with a code that says so: a router that no longer follows its leaders is of no use."""
        log.error("the fleet failed", exc_info=error)
        self.exit_code = 1
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing to capture."""
        yield


async def serve(settings: Settings) -> int:
    """Serves until a signal comes; then `leave`s. The exit code."""
    link = LinkSettings(settings.token, socket.gethostname(), heartbeat_timeout_s=settings.heartbeat_timeout_s)
    fleet_settings = FleetSettings(
        link,
        settings.served_names,
        patience_s=settings.patience_s,
        retry_after_s=settings.retry_after_s,
        policy=settings.policy,
        queue=QueueBounds(settings.max_queued, settings.max_queued_tokens),
        hold_s=settings.hold_s,
        max_held=settings.max_held,
    )
    source = await make_source(settings)
    peers = await make_peers(settings)
    app, fleet = make_router(
        fleet_settings, source, lambda error: server.fail(error), settings.api_keys, settings.key_file, peers
    )
    config = uvicorn.Config(
        Farewell(app, fleet),
        host=settings.host,
        port=settings.port,
        http="httptools",
        log_config=None,
        access_log=False,
        ws="websockets-sansio" if "websockets-sansio" in WS_PROTOCOLS else "auto",
        ws_ping_interval=None,
        ws_max_size=MAX_FRAME_BYTES,
        timeout_keep_alive=IDLE_CONNECTION_S,
        timeout_graceful_shutdown=GRACE_S,
    )
    server = _Server(config)
    loop = asyncio.get_running_loop()
    leaving: list[asyncio.Task[None]] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: leaving.append(loop.create_task(leave(server, fleet, settings))))
    await server.serve()
    return server.exit_code


async def leave(server: uvicorn.Server, fleet: Fleet, settings: Settings) -> None:
    """Shows not ready and sends clients away at once; takes no more requests a little later. Open streams have `drain_s` to end.

    What is left then, or at a second signal, ends with an error that names the id to resume from; its group goes on with it.
    """
    if not fleet.draining:
        fleet.draining = True
        log.info("leaving: open streams go on", extra={"streams": len(fleet.runs), "seconds": settings.drain_s})
        send_away(server)
        await asyncio.sleep(settings.lame_duck_s)
        fleet.refuse()
        end = asyncio.get_running_loop().time() + settings.drain_s
        while fleet.runs and not server.should_exit and asyncio.get_running_loop().time() < end:
            close_idle(server)
            await asyncio.sleep(LOOK_S)
    log.info("leaving: what is left may be resumed elsewhere", extra={"streams": len(fleet.runs)})
    fleet.close()
    server.should_exit = True


def send_away(server: uvicorn.Server) -> None:
    """Ends each connection with the answer that is under way there."""
    for connection in list(server.server_state.connections):
        if isinstance(connection, HttpToolsProtocol) and connection.cycle is not None and not connection.cycle.response_complete:
            connection.shutdown()


def close_idle(server: uvicorn.Server) -> None:
    """Ends connections whose last answer is over: who was sent away and has not asked since would be refused."""
    for connection in list(server.server_state.connections):
        if isinstance(connection, HttpToolsProtocol) and connection.cycle is not None and connection.cycle.response_complete:
            connection.shutdown()


async def make_source(settings: Settings) -> LeaderSource:
    """Where this router learns of leaders."""
    if settings.leaders:
        return StaticLeaders(settings.leaders)
    from phalanx_router.links.leader_watch import (  # a second of imports that a fixed list does not need
        NoCluster,
        WatchedLeaders,
        make_api,
    )

    try:
        return WatchedLeaders(await make_api(), settings.namespace, selector(settings.service))
    except NoCluster as error:
        print(f"phalanx-router: --service {settings.service}: {error}; --leaders needs no cluster", file=sys.stderr)
        raise SystemExit(2) from error


async def make_peers(settings: Settings) -> LeaderSource | None:
    """Where this router learns of the others; None when it is alone."""
    if settings.leaders:
        return StaticLeaders(settings.peers) if settings.peers else None
    from phalanx_router.links.leader_watch import WatchedLeaders, make_api

    return WatchedLeaders(await make_api(), settings.namespace, router_selector(settings.service))
