"""The router's application: the door over the fleet. The fleet's links live as long as the application."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from phalanx_api.speculation import SpeculationCounts
from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.app import DoorVitals, create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.auth.key_file import KeyFile
from phalanx_frontend.health import Health, Totals, Vitals
from phalanx_router.backend import Fleet
from phalanx_router.links.endpoints import LeaderSource
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import Links
from phalanx_router.metrics import GroupGauges, RouterMetrics
from phalanx_router.operator_endpoint import BesideTheDoor, SummaryDoor
from phalanx_router.resume.peer_endpoint import PeerDoor
from phalanx_router.resume.peers import Peers
from phalanx_router.session import FleetSettings
from phalanx_router.summary import Summing

# What a router tells at /v1/health and /v1/metrics: the door's `Vitals`, with what its groups last told of themselves.


class FleetVitals:
    """Implements the door's `Vitals`. Requests are those of this router; what was proposed is so for the requests of all."""

    def __init__(self, door: Vitals, links: Links) -> None:
        self._door = door
        self._links = links

    def health(self) -> Health:
        """That of the door."""
        return self._door.health()

    def totals(self) -> Totals:
        """The door's requests, and what became of proposals in the engines of all groups."""
        counts = [_counts(link) for link in self._links.all()]
        proposed, accepted = sum(sum(one.proposed) for one in counts), sum(sum(one.accepted) for one in counts)
        return replace(self._door.totals(), proposed=proposed, accepted=accepted)

    def memory(self) -> Sequence[MemoryAccount]:
        """Nothing: a router has no rank. Each runtime tells of its own."""
        return ()

    def kv_bytes_per_token(self) -> int | None:
        """That of the group where it is most: groups of two revisions may differ."""
        told = [link.told for link in self._links.all()]
        return max((one.served.page_bytes // one.page_size for one in told), default=0) or None


def _counts(link: LeaderLink) -> SpeculationCounts:
    return link.told.load.speculation if link.told.load is not None else SpeculationCounts()


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
