"""The router process: builds the server and shuts it down gracefully."""

import asyncio
import gc
import logging
import signal
import socket
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import uvicorn
from starlette.applications import Starlette
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from phalanx_api.tls.certificates import CertificateUnusable
from phalanx_frontend.auth.origins import with_origins
from phalanx_frontend.auth.peers import add_listener, mutual_tls
from phalanx_frontend.connections import CONNECTION_OPTIONS
from phalanx_frontend.flight import ROUTER_BYTES, open_recorder
from phalanx_frontend.images.source import image_source
from phalanx_frontend.logs import make_formatter, prevent_core_dumps, start_logging
from phalanx_frontend.metrics import Purpose
from phalanx_frontend.tls import Certificate, CertificateFiles
from phalanx_frontend.tracing.otlp import start_tracer
from phalanx_router.app import RouterOptions, make_router
from phalanx_router.backend import RouterBackend
from phalanx_router.batches.store import BatchStore
from phalanx_router.links.connection import MAX_FRAME_BYTES, LinkSettings
from phalanx_router.links.endpoints import LeaderSource, StaticLeaders, leader_selector, router_selector
from phalanx_router.links.holders import HolderSettings
from phalanx_router.root_path import below_root
from phalanx_router.routing.queue import QueueBounds
from phalanx_router.session import FleetSettings
from phalanx_router.settings import BatchSettings, Settings, read_settings

log = logging.getLogger("phalanx_router")

GRACE_S = 3  # for the last event of open streams
CHECK_INTERVAL_S = 0.02
PING_INTERVAL_S, PING_TIMEOUT_S = 5.0, 10.0
"""Seconds between pings of other routers, and until a pong is missed. A router whose machine was lost closes no connection;
without pings its journals would be kept until this process ends."""


def run(arguments: Sequence[str]) -> int:
    """Returns the exit code. Raises SystemExit 2 for a bad flag."""
    settings = read_settings(arguments)
    prevent_core_dumps()
    start_logging(settings.log_level.upper(), make_formatter(settings.log_format, sys.stderr))
    # A full collection reads 110,000 objects of imports and blocks all streams for 50 ms; CPython therefore starts it late.
    gc.freeze()
    with asyncio.Runner(loop_factory=_new_loop) as runner:
        return runner.run(serve(settings))


def _new_loop() -> asyncio.AbstractEventLoop:
    import uvloop  # tests run without it

    loop: asyncio.AbstractEventLoop = uvloop.new_event_loop()
    return loop


class ConnectionCloser:
    """ASGI middleware: during shutdown a connection closes after its next response; the client reconnects to another router."""

    def __init__(self, app: ASGIApp, backend: RouterBackend) -> None:
        self._app = app
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles the request."""

        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message.get("headers", ()), (b"connection", b"close")]
            await send(message)

        should_close = scope["type"] == "http" and self._backend.is_draining
        await self._app(scope, receive, send_last if should_close else send)


def _for_clients(app: Starlette, backend: RouterBackend, settings: Settings) -> ASGIApp:
    return ConnectionCloser(with_origins(below_root(app, settings.root_path), settings.allowed_origins), backend)


class _Server(uvicorn.Server):
    exit_code = 0
    internal: uvicorn.Config | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Also listens for other pods, if they have a port of their own."""
        await super().startup(sockets)
        if self.internal is not None and self.started:
            port = await add_listener(self, self.internal)
            log.info("listening for pods of the service", extra={"port": port})

    def fail(self, error: BaseException) -> None:
        """Stops the server with exit code 1."""
        log.error("the router backend failed", exc_info=error)
        self.exit_code = 1
        self.should_exit = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Installs no handlers."""
        yield


async def serve(settings: Settings) -> int:
    """Serves until a signal; returns the exit code. Raises SystemExit 2 for an unusable certificate or folder of batches."""
    check_batches(settings.batches)
    certificates = read_certificates(settings)
    link = LinkSettings(
        token=settings.token,
        router=socket.gethostname(),
        heartbeat_timeout_s=settings.heartbeat_timeout_s,
        certificate=certificates.get("internal"),
    )
    fleet_settings = FleetSettings(
        link=link,
        served_names=settings.served_names,
        patience_s=settings.patience_s,
        retry_after_s=settings.retry_after_s,
        policy=settings.policy,
        queue=QueueBounds(settings.max_queued, settings.max_queued_tokens),
        hold_s=settings.hold_s,
        max_held=settings.max_held,
        holders=make_holders(settings),
        recorder=open_recorder(settings.flight_dir, "router", ROUTER_BYTES),
    )
    source = await make_source(settings)
    peers = await make_peers(settings)
    options = RouterOptions(
        keys=settings.api_keys,
        key_file=settings.key_file,
        oidc=settings.oidc,
        peers=peers,
        certificates=certificates,
        tracer=start_tracer(settings.tracing),
        has_console=settings.has_console,
        has_tenant_metrics=settings.has_tenant_metrics,
        batches=settings.batches,
        images=image_source(settings.image_hosts),
        on_error=lambda error: server.fail(error),
    )
    app, backend = make_router(fleet_settings, source, options)
    server = _Server(make_config(_for_clients(app, backend, settings), settings, certificates.get("clients")))
    if link.certificate is not None:
        server.internal = internal_config(app.state.internal, settings, link.certificate)
    loop = asyncio.get_running_loop()
    shutdowns: list[asyncio.Task[None]] = []
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, lambda: shutdowns.append(loop.create_task(shut_down(server, backend, settings))))
    await server.serve()
    return server.exit_code


def make_config(app: ASGIApp, settings: Settings, certificate: Certificate | None) -> uvicorn.Config:
    """uvicorn configuration for clients. Null certificate: HTTP."""
    config = _config(app, settings.host, settings.port)
    if certificate is not None:
        config.ssl_context_factory = lambda _config, _default: certificate.context
    return config


def internal_config(app: ASGIApp, settings: Settings, certificate: Certificate) -> uvicorn.Config:
    """uvicorn configuration for the operator and other routers."""
    return mutual_tls(_config(app, settings.host, settings.internal_port), certificate)


def _config(app: ASGIApp, host: str, port: int) -> uvicorn.Config:
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        ws_ping_interval=PING_INTERVAL_S,
        ws_ping_timeout=PING_TIMEOUT_S,
        ws_max_size=MAX_FRAME_BYTES,
        timeout_graceful_shutdown=GRACE_S,
        **CONNECTION_OPTIONS,
    )


async def shut_down(server: uvicorn.Server, backend: RouterBackend, settings: Settings) -> None:
    """Closes connections after their present response; refuses requests after `lame_duck_s`.

    After `drain_s`, or a second signal, open streams end with an error that permits a resume.
    """
    if not backend.is_draining:
        backend.is_draining = True
        backend.balancing.wake()  # the operator learns of it by the next tick
        log.info("shutting down: open streams continue", extra={"streams": len(backend.sessions), "seconds": settings.drain_s})
        close_after_response(server)
        await asyncio.sleep(settings.lame_duck_s)
        backend.refuse()
        end = asyncio.get_running_loop().time() + settings.drain_s
        while backend.sessions and not server.should_exit and asyncio.get_running_loop().time() < end:
            close_idle(server)
            await asyncio.sleep(CHECK_INTERVAL_S)
    log.info("shutting down: open streams can be resumed at another router", extra={"streams": len(backend.sessions)})
    backend.close()
    server.should_exit = True


def close_after_response(server: uvicorn.Server) -> None:
    """Closes each connection after the response that it is sending."""
    for connection in list(server.server_state.connections):
        if isinstance(connection, HttpToolsProtocol) and connection.cycle is not None and not connection.cycle.response_complete:
            connection.shutdown()


def close_idle(server: uvicorn.Server) -> None:
    """Closes idle connections: their next request would be refused."""
    for connection in list(server.server_state.connections):
        if isinstance(connection, HttpToolsProtocol) and connection.cycle is not None and connection.cycle.response_complete:
            connection.shutdown()


def check_batches(settings: BatchSettings | None) -> None:
    """Creates the folder of batches. Raises SystemExit 2 if it cannot be used."""
    try:
        if settings is not None:
            BatchStore(settings.folder, settings.max_bytes)
    except OSError as error:
        print(f"phalanx-router: argument --batches-dir: {error}", file=sys.stderr)
        raise SystemExit(2) from error


def read_certificates(settings: Settings) -> dict[Purpose, Certificate]:
    """The configured certificates. Raises SystemExit 2 if one is unusable."""
    found: dict[Purpose, Certificate] = {}
    wanted: list[tuple[Purpose, CertificateFiles | None, str]] = [
        ("clients", settings.tls, "--ssl-certfile"),
        ("internal", settings.internal_tls, "--internal-tls-dir"),
    ]
    for purpose, files, flag in wanted:
        try:
            if files is not None:
                found[purpose] = Certificate(files)
        except CertificateUnusable as error:
            print(f"phalanx-router: argument {flag}: {error}", file=sys.stderr)
            raise SystemExit(2) from error
    return found


async def make_source(settings: Settings) -> LeaderSource:
    """Source of leaders. Raises SystemExit 2 if neither leaders nor a cluster is configured."""
    if settings.leaders:
        return StaticLeaders(settings.leaders)
    from phalanx_router.links.leader_watch import (  # its imports take a second
        NoCluster,
        WatchedLeaders,
        make_api,
    )

    try:
        return WatchedLeaders(await make_api(), settings.namespace, leader_selector(settings.service))
    except NoCluster as error:
        print(f"phalanx-router: --service {settings.service}: {error}; without a cluster use --leaders", file=sys.stderr)
        raise SystemExit(2) from error


def make_holders(settings: Settings) -> HolderSettings:
    """Where other services that share pages are found."""
    if settings.leaders:
        return HolderSettings(folder=settings.shared_services_dir)

    async def watch(service: str) -> LeaderSource:
        from phalanx_router.links.leader_watch import WatchedLeaders, make_api

        return WatchedLeaders(await make_api(), settings.namespace, leader_selector(service))

    return HolderSettings(own=settings.service, folder=settings.shared_services_dir, watch=watch)


async def make_peers(settings: Settings) -> LeaderSource:
    """Source of the other routers."""
    if settings.leaders:
        return StaticLeaders(settings.peers)
    from phalanx_router.links.leader_watch import WatchedLeaders, make_api

    return WatchedLeaders(await make_api(), settings.namespace, router_selector(settings.service))
