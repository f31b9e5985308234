"""The router's application: the door over the fleet. The fleet's links live as long as the application."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from phalanx_frontend.app import create_app
from phalanx_router.endpoints import LeaderSource
from phalanx_router.fleet import Fleet, FleetSettings
from phalanx_router.metrics import RouterMetrics


def make_router(settings: FleetSettings, source: LeaderSource) -> tuple[Starlette, Fleet]:
    """The application and its fleet, which follows `source` while the application runs.

    /readyz answers 200 from the first list of leaders on, also while no group is ready: the Service then still brings
    clients here, who get 503 with Retry-After, or their waiting stream goes on, where else they would get no connection.
    """
    registry = CollectorRegistry()
    fleet = Fleet(settings, RouterMetrics(registry))

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        task = asyncio.create_task(fleet.run(source))
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task

    return create_app(fleet, registry=registry, lifespan=lifespan), fleet
