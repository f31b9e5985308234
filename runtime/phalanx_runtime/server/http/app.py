"""The HTTP application of the leader's pod, with the door and the link, and the life of a supervisor beside any."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Protocol

from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from phalanx_frontend.app import Lifespan, create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.health import Vitals
from phalanx_runtime.engine.backend import LocalBackend
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.server.link.connection import LinkSettings
from phalanx_runtime.server.link.endpoint import LinkDoor

log = logging.getLogger(__name__)


class Supervisor(Protocol):
    """Runs beside the application."""

    async def run(self) -> None:
        """Until cancelled."""
        ...


def make_leader_app(
    vitals: Vitals,
    client: EngineClient,
    link: LinkSettings | None,
    registry: CollectorRegistry,
    lifespan: Lifespan,
    keys: Sequence[ApiKey] = (),
) -> FastAPI:
    """The OpenAI door over the local engine, and the link when there is a token to prove."""
    app = create_app(LocalBackend(client), registry=registry, lifespan=lifespan, vitals=lambda _: vitals, keys=ApiKeys(keys))
    if link is not None:
        app.router.routes.append(LinkDoor(client, link).route())
    return app


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
