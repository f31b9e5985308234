"""The leader's HTTP application (API server and link), and the lifespan that runs a supervisor."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from phalanx_frontend.app import Lifespan, create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.health import HealthSource
from phalanx_runtime.engine.backend import LocalBackend
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.server.link.connection import LinkSettings
from phalanx_runtime.server.link.endpoint import LinkEndpoint

log = logging.getLogger(__name__)


class SupervisorTask(Protocol):
    """Runs while the application does."""

    async def run(self) -> None:
        """Runs until cancelled."""
        ...


def make_leader_app(
    health: HealthSource,
    client: EngineClient,
    link: LinkSettings | None,
    registry: CollectorRegistry,
    lifespan: Lifespan,
    keys: Sequence[ApiKey] = (),
) -> FastAPI:
    """The OpenAI API over the local engine, with the link endpoint if `link` is set."""
    app = create_app(
        LocalBackend(client), registry=registry, lifespan=lifespan, make_health_source=lambda _: health, keys=ApiKeys(keys)
    )
    if link is not None:
        app.router.routes.append(LinkEndpoint(client, link).route())
    return app


def supervised(supervisor: SupervisorTask, failed: Callable[[BaseException], None], ended: Callable[[], None]) -> Lifespan:
    """A lifespan that runs the supervisor. Calls `failed` if it ends by itself, since the pod must then not appear healthy.

    Calls `ended` after the supervisor and its ranks have ended.
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
            with suppress(BaseException):  # `look` has logged any error
                await task
            ended()

    return lifespan
