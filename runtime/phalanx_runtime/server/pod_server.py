"""The uvicorn server of a pod: its drain on a signal, its listeners, and its configuration."""

import asyncio
import logging
import socket
from types import FrameType
from typing import Protocol

import uvicorn
from starlette.types import ASGIApp

from phalanx_api import labels
from phalanx_frontend.auth.peers import RoleMiddleware, add_listener, mutual_tls
from phalanx_frontend.connections import CONNECTION_OPTIONS
from phalanx_frontend.tls import Certificate

log = logging.getLogger(__name__)
GRACE_S = 3
"""Time of open streams to receive their last event; with `EXIT_S` of the ranks below 5 s."""
DRAIN_POLL_S = 0.02
LINK_FRAME_BYTES = 256 << 20
"""More than any request the API server accepts: 64 MiB of tiles, and a body of 32 MiB, whose strings may grow."""
EXIT_SUPERVISOR = 1
STOPPING = "the pod is stopping"


class Drainable(Protocol):
    """Receives the shutdown: engine client or worker supervisor."""

    @property
    def is_busy(self) -> bool:
        """Whether open requests would fail."""
        ...

    def drain(self, reason: str) -> None:
        """Accepts no new requests."""
        ...

    def stop(self, reason: str) -> None:
        """Ends running requests."""
        ...


class PodServer(uvicorn.Server):
    """Drains on a signal; ends open streams after `drain_s` or on a second signal.

    A worker waits while its group serves: its ranks compute the leader's streams.
    """

    def __init__(self, config: uvicorn.Config, drainable: Drainable, drain_s: float) -> None:
        super().__init__(config)
        self.drainable = drainable
        self._drain_s = drain_s
        self._drain_task: asyncio.Task[None] | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self.exit_code = 0
        self.error: BaseException | None = None
        """Why the server ended by itself."""
        self.probes: uvicorn.Config | None = None
        """Also listens for probes as configured here."""
        self.certificate: Certificate | None = None
        """Loaded again when it changes."""
        self._following: asyncio.Task[None] | None = None

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Stores the event loop."""
        self._loop = asyncio.get_running_loop()
        await super().startup()
        if self.probes is not None and self.started:
            await add_listener(self, self.probes)
        if self.certificate is not None:
            self._following = self._loop.create_task(self.certificate.follow())
        for server in self.servers:
            for listening in server.sockets:
                log.info("listening", extra={"address": listening.getsockname()[:2]})

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Starts the drain; a second signal ends it."""
        if self._loop is not None and not self.should_exit:
            self._loop.call_soon_threadsafe(self._start_drain)
        else:
            super().handle_exit(sig, frame)

    def _start_drain(self) -> None:
        drain_s = self._drain_s
        if self._drain_task is not None:
            self._drain_task.cancel()
            drain_s = 0.0
        self._drain_task = asyncio.get_running_loop().create_task(self._drain(drain_s))

    async def _drain(self, drain_s: float) -> None:
        self.drainable.drain(STOPPING)
        log.info("draining: open streams continue", extra={"seconds": drain_s})
        end = asyncio.get_running_loop().time() + drain_s
        while self.drainable.is_busy and asyncio.get_running_loop().time() < end:
            await asyncio.sleep(DRAIN_POLL_S)
        self.drainable.stop(STOPPING)
        self.should_exit = True

    def fail(self, error: BaseException) -> None:
        """Ends the server with an error."""
        self.error = error
        self.exit_code = EXIT_SUPERVISOR
        self.should_exit = True


def guarded_config(app: ASGIApp, host: str, port: int, certificate: Certificate) -> uvicorn.Config:
    """uvicorn configuration with mutual TLS: routers may call every path, Prometheus its metrics."""
    allowed = RoleMiddleware(app, (labels.ROUTER_ROLE,), {"/metrics": (labels.METRICS_ROLE, labels.ROUTER_ROLE)})
    return mutual_tls(make_config(allowed, host, port), certificate)


def make_config(app: ASGIApp, host: str, port: int) -> uvicorn.Config:
    """uvicorn configuration."""
    return uvicorn.Config(
        app,
        host=host,
        port=port,
        loop="uvloop",
        ws_ping_interval=None,
        ws_max_size=LINK_FRAME_BYTES,
        lifespan="on",
        **CONNECTION_OPTIONS,
        timeout_graceful_shutdown=GRACE_S,
    )
