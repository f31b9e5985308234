"""Builds the router's application: the API server over a `RouterBackend`, which runs as long as the application."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette

from phalanx_api.speculation import SpeculationCounts
from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.app import ServerHealthSource, create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.auth.key_file import KeyFile
from phalanx_frontend.health import Health, HealthSource, HealthTotals
from phalanx_router.backend import RouterBackend
from phalanx_router.links.endpoints import LeaderSource
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.metrics import GroupGauges, RouterMetrics
from phalanx_router.operator_endpoint import OperatorEndpoint, OperatorRouteMiddleware
from phalanx_router.resume.peer_endpoint import PeerEndpoint
from phalanx_router.resume.peers import Peers
from phalanx_router.session import FleetSettings
from phalanx_router.summary import SummaryBuilder

# Data of /v1/health and /v1/metrics: that of the API server plus speculation counts and page sizes of the groups.


class RouterHealthSource:
    """Implements `HealthSource`: requests of this router, speculation counts of the requests of all routers."""

    def __init__(self, server: HealthSource, links: LinkPool) -> None:
        self._server = server
        self._links = links

    def health(self) -> Health:
        """Returns the health of the API server."""
        return self._server.health()

    def totals(self) -> HealthTotals:
        """Returns the API server's request totals and the draft tokens of all groups."""
        counts = [_counts(link) for link in self._links.all()]
        proposed, accepted = sum(sum(one.proposed) for one in counts), sum(sum(one.accepted) for one in counts)
        return replace(self._server.totals(), proposed=proposed, accepted=accepted)

    def memory(self) -> Sequence[MemoryAccount]:
        """Returns no accounts: a router has no rank, each runtime reports its own."""
        return ()

    def kv_bytes_per_token(self) -> int | None:
        """Returns the maximum over the groups: two revisions may differ."""
        reports = [link.group_report for link in self._links.all()]
        return max((one.served.page_bytes // one.page_size for one in reports), default=0) or None


def _counts(link: LeaderLink) -> SpeculationCounts:
    return link.group_report.load.speculation if link.group_report.load is not None else SpeculationCounts()


def _raise(error: BaseException) -> None:
    raise error


def _make_lifespan(
    jobs: Sequence[Callable[[], Coroutine[Any, Any, None]]], failed: Callable[[BaseException], None]
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    """Returns a lifespan that runs `jobs` concurrently with the application and passes their errors to `failed`."""

    def report(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            failed(error)

    @asynccontextmanager
    async def lifespan(app: Starlette) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(job()) for job in jobs]
        for task in tasks:
            task.add_done_callback(report)
        try:
            yield
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)  # `report` has passed on an error

    return lifespan


def make_router(
    settings: FleetSettings,
    source: LeaderSource,
    failed: Callable[[BaseException], None] = _raise,
    keys: Sequence[ApiKey] = (),
    key_file: KeyFile | None = None,
    peers: LeaderSource | None = None,
) -> tuple[Starlette, RouterBackend]:
    """Returns the application and its backend, which follows `source` while the application runs; `failed` receives its error.

    /readyz returns 200 after the first list of leaders, even with no ready group: clients then get 503 with Retry-After instead
    of a refused connection, and waiting streams are not cut. One of `peers`, the other routers of the service, gets copies of
    this router's journals.
    """
    registry = CollectorRegistry()
    metrics = RouterMetrics(registry)
    fleet = RouterBackend(settings, metrics)
    api_keys = ApiKeys(keys)
    fleet.dispatcher.tenants.quota_of = api_keys.quota_of
    journals = Peers(settings.link, fleet.stream_registry.open_runs)
    fleet.stream_registry.journals = journals if peers is not None else None
    summing = SummaryBuilder(fleet, metrics, settings.link.router, time.monotonic)
    registry.register(GroupGauges(summing.groups))
    summaries = OperatorEndpoint(settings.link.token, fleet.balancing.set_policy, summing.summary, summing.urgent_state)
    fleet.balancing.ticked.append(summaries.notify_if_changed)

    jobs = [partial(fleet.run, source)]
    if peers is not None:
        jobs.append(partial(journals.run, peers))
    if key_file is not None:
        jobs.append(partial(key_file.follow, api_keys))
    app = create_app(
        fleet,
        registry=registry,
        lifespan=_make_lifespan(jobs, failed),
        keys=api_keys,
        metrics_prefix="phalanx_router",
        keep_alive_s=settings.keep_alive_s,
        make_health_source=lambda server: RouterHealthSource(ServerHealthSource(server), fleet.links),
    )
    app.router.routes.append(PeerEndpoint(settings.link.token, fleet.stream_registry.copies).route())
    app.add_middleware(OperatorRouteMiddleware, endpoint=summaries)
    return app, fleet
