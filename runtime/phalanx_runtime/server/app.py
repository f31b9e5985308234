"""The HTTP application of a pod: the door and the link in the leader's, health and metrics in every one."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.routing import Route

from phalanx_frontend.app import Lifespan, create_app, create_health_app
from phalanx_runtime.engine.backend import LocalBackend
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.server.link import LinkDoor, LinkSettings
from phalanx_runtime.server.supervisor import Status

log = logging.getLogger(__name__)


class Supervisor(Protocol):
    """Runs beside the application, and says whether the pod is ready."""

    def status(self) -> Status:
        """Whether the group serves."""
        ...

    async def run(self) -> None:
        """Until cancelled."""
        ...


def make_leader_app(
    supervisor: Supervisor, client: EngineClient, link: LinkSettings | None, registry: CollectorRegistry, lifespan: Lifespan
) -> FastAPI:
    """The OpenAI door over the local engine, and the link when there is a token to prove."""
    app = create_app(LocalBackend(client), registry=registry, lifespan=lifespan)
    if link is not None:
        app.router.routes.append(LinkDoor(client, link).route())
    return app


def make_member_app(supervisor: Supervisor, registry: CollectorRegistry, lifespan: Lifespan) -> FastAPI:
    """Health and metrics only."""
    return create_health_app(lambda: supervisor.status().reason or None, registry=registry, lifespan=lifespan)


def add_readiness(app: FastAPI, supervisor: Supervisor, group: str, revision: str) -> None:
    """Puts /readyz with the state of the group in front of the door's own."""

    async def readyz(request: Request) -> JSONResponse:
        status = supervisor.status()
        body = {
            "ready": status.ready,
            "reason": status.reason,
            "incarnation": status.incarnation,
            "group": group,
            "revision": revision,
        }
        return JSONResponse(body, 200 if status.ready else 503)

    app.router.routes.insert(0, Route("/readyz", readyz))


def supervised(supervisor: Supervisor, failed: Callable[[BaseException], None], ended: Callable[[], None]) -> Lifespan:
    """A lifespan that runs the supervisor. `failed` is called if it ends by itself: a pod without one must not look well.

    `ended` is called after the supervisor is gone, its ranks with it.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(supervisor.run())

        def look(task: asyncio.Task[None]) -> None:
            if not task.cancelled():
                error = task.exception() or RuntimeError("the supervisor returned")
                log.error("the supervisor ended", exc_info=error)
                failed(error)

        task.add_done_callback(look)
        try:
            yield
        finally:
            task.cancel()
            with suppress(BaseException):  # `look` has told of an error
                await task
            ended()

    return lifespan
