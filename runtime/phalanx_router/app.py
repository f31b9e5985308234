"""The router's application: the door over the fleet. The fleet's links live as long as the application."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from phalanx_frontend.app import DoorVitals, create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.key_file import KeyFile
from phalanx_router.backend import Fleet
from phalanx_router.group_gauges import GroupGauges
from phalanx_router.links.endpoints import LeaderSource
from phalanx_router.metrics import RouterMetrics
from phalanx_router.operator_endpoint import BesideTheDoor, SummaryDoor
from phalanx_router.resume.peer_endpoint import PeerDoor
from phalanx_router.resume.peers import Peers
from phalanx_router.session import FleetSettings
from phalanx_router.summary import Summing
from phalanx_router.vitals import FleetVitals


def _raise(error: BaseException) -> None:
    raise error


def make_router(
    settings: FleetSettings,
    source: LeaderSource,
    failed: Callable[[BaseException], None] = _raise,
    keys: Sequence[ApiKey] = (),
    key_file: KeyFile | None = None,
    peers: LeaderSource | None = None,
) -> tuple[Starlette, Fleet]:
    """The application and its fleet, which follows `source` while the application runs. `failed` hears when it no longer does.

    /readyz answers 200 from the first list of leaders on, also while no group is ready: the Service then still brings
    clients here, who get 503 with Retry-After, or their waiting stream goes on, where else they would get no connection.
    One of `peers`, the other routers of the service, gets copies of this one's journals.
    """
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    fleet = Fleet(settings, metrics)
    api_keys = ApiKeys(keys)
    fleet.placing.tenants.quota_of = api_keys.quota_of
    journals = Peers(settings.link, fleet.resuming.open_runs)
    fleet.resuming.journals = journals if peers is not None else None
    summing = Summing(fleet, metrics, settings.link.router, time.monotonic)
    registry.register(GroupGauges(summing.groups))
    summaries = SummaryDoor(settings.link.token, fleet.balancing.obey, summing.summary, summing.crossing)
    fleet.balancing.ticked.append(summaries.looked)

    def look(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            failed(error)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(fleet.run(source))]
        if peers is not None:
            tasks.append(asyncio.create_task(journals.run(peers)))
        if key_file is not None:
            tasks.append(asyncio.create_task(key_file.follow(api_keys)))
        for task in tasks:
            task.add_done_callback(look)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # `look` has told of an error

    app = create_app(
        fleet,
        registry=registry,
        lifespan=lifespan,
        keys=api_keys,
        metrics_prefix="phalanx_router",
        keep_alive_s=settings.keep_alive_s,
        vitals=lambda door: FleetVitals(DoorVitals(door), fleet.links),
    )
    app.router.routes.append(PeerDoor(settings.link.token, fleet.resuming.copies).route())
    app.add_middleware(BesideTheDoor, door=summaries)
    return app, fleet
