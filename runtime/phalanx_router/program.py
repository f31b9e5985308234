"""The router process: builds the server from the settings, and shuts it down gracefully."""

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
from phalanx_router.backend import RouterBackend
from phalanx_router.links.connection import MAX_FRAME_BYTES
from phalanx_router.links.endpoints import LeaderSource, StaticLeaders, leader_selector, router_selector
from phalanx_router.links.leader_link import LinkSettings
from phalanx_router.routing.queue import QueueBounds
from phalanx_router.session import FleetSettings
from phalanx_router.settings import Settings, read_settings

log = logging.getLogger("phalanx_router")

GRACE_S = 3
"""Time in which open streams can send their last event at the end."""
CHECK_S = 0.02


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code: 0 after SIGTERM or SIGINT, 1 after an unexpected exception. Raises SystemExit 2 for a bad flag."""
    settings = read_settings(arguments)
    start_logging(settings.log_level.upper())
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(serve(settings))


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop  # tests do not need it

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class ConnectionCloser:
    """ASGI middleware: while the router shuts down, a connection closes after the response to its next request.

    The client reconnects through the Service to another router; on the old connection its requests would come here and be refused
    in the end.
    """

    def __init__(self, app: ASGIApp, fleet: RouterBackend) -> None:
        self._app = app
        self._fleet = fleet

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles the request."""

        async def last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        leaves = scope["type"] == "http" and self._fleet.draining
        await self._app(scope, receive, last if leaves else send)


class _Server(uvicorn.Server):
    """Server without uvicorn's signal handlers, so that the first signal starts a graceful shutdown."""

    exit_code = 0

    def fail(self, error: BaseException) -> None:
        """Stops the server with exit code 1: without its leaders the router cannot serve."""
        log.error("the router backend failed", exc_info=error)
        self.exit_code = 1
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no handlers."""
        yield


async def serve(settings: Settings) -> int:
    """Serves until a signal, then calls `leave`; returns the exit code."""
    link = LinkSettings(token=settings.token, router=socket.gethostname(), heartbeat_timeout_s=settings.heartbeat_timeout_s)
    fleet_settings = FleetSettings(
        link=link,
        served_names=settings.served_names,
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
        fleet_settings,
        source,
        failed=lambda error: server.fail(error),
        keys=settings.api_keys,
        key_file=settings.key_file,
        peers=peers,
    )
    config = uvicorn.Config(
        ConnectionCloser(app, fleet),
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


async def leave(server: uvicorn.Server, fleet: RouterBackend, settings: Settings) -> None:
    """Reports not ready and closes connections after their present response; refuses requests after `lame_duck_s`.

    Open streams have `drain_s` to end. After that, or after a second signal, the others end with an error that permits a resume,
    and their groups continue them.
    """
    if not fleet.draining:
        fleet.draining = True
        log.info("shutting down: open streams continue", extra={"streams": len(fleet.runs), "seconds": settings.drain_s})
        send_away(server)
        await asyncio.sleep(settings.lame_duck_s)
        fleet.refuse()
        end = asyncio.get_running_loop().time() + settings.drain_s
        while fleet.runs and not server.should_exit and asyncio.get_running_loop().time() < end:
            close_idle(server)
            await asyncio.sleep(CHECK_S)
    log.info("shutting down: open streams can be resumed at another router", extra={"streams": len(fleet.runs)})
    fleet.close()
    server.should_exit = True


def send_away(server: uvicorn.Server) -> None:
    """Closes each connection after the response that it is sending."""
    for connection in list(server.server_state.connections):
        if isinstance(connection, HttpToolsProtocol) and connection.cycle is not None and not connection.cycle.response_complete:
            connection.shutdown()


def close_idle(server: uvicorn.Server) -> None:
    """Closes idle connections: their next request would be refused."""
    for connection in list(server.server_state.connections):
        if isinstance(connection, HttpToolsProtocol) and connection.cycle is not None and connection.cycle.response_complete:
            connection.shutdown()


async def make_source(settings: Settings) -> LeaderSource:
    """Returns the source of leaders."""
    if settings.leaders:
        return StaticLeaders(settings.leaders)
    from phalanx_router.links.leader_watch import (  # its imports take a second, which a fixed list does not need
        NoCluster,
        WatchedLeaders,
        make_api,
    )

    try:
        return WatchedLeaders(await make_api(), settings.namespace, leader_selector(settings.service))
    except NoCluster as error:
        print(f"phalanx-router: --service {settings.service}: {error}; without a cluster use --leaders", file=sys.stderr)
        raise SystemExit(2) from error


async def make_peers(settings: Settings) -> LeaderSource | None:
    """Returns the source of the other routers, if configured."""
    if settings.leaders:
        return StaticLeaders(settings.peers) if settings.peers else None
    from phalanx_router.links.leader_watch import WatchedLeaders, make_api

    return WatchedLeaders(await make_api(), settings.namespace, router_selector(settings.service))
