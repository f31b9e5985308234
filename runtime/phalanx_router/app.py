"""Builds the router's application: the API server over a `RouterBackend`."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from prometheus_client import CollectorRegistry
from starlette.applications import Starlette
from starlette.routing import WebSocketRoute

from phalanx_api import labels
from phalanx_api.cache_curve import merge_curves
from phalanx_api.speculation import SpeculationCounts
from phalanx_api.summary import SNAPSHOT_PATH, SUMMARY_PATH
from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.app import ServerHealthSource, create_app
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.auth.caller import accepted_keys
from phalanx_frontend.auth.key_file import KeyFile
from phalanx_frontend.auth.oidc import OidcSettings
from phalanx_frontend.auth.peers import RoleMiddleware
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_frontend.health import Health, HealthSource, HealthTotals
from phalanx_frontend.images.source import ImageSource
from phalanx_frontend.metrics import CertificateMetrics, Purpose
from phalanx_frontend.openai_responses.conversation_store import Conversations, ConversationStore
from phalanx_frontend.tls import Certificate
from phalanx_frontend.tracing.tracer import Tracer
from phalanx_router.backend import RouterBackend
from phalanx_router.batches.serving import add_batches
from phalanx_router.console.answers import ConsoleAnswers
from phalanx_router.console.endpoint import Console, ConsoleMiddleware
from phalanx_router.links.endpoints import LeaderSource, StaticLeaders
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.links.link_pool import LinkPool
from phalanx_router.metrics import GroupGauges, RouterMetrics
from phalanx_router.migration.manual import ManualMoves
from phalanx_router.operator_endpoint import (
    MOVES_PATH,
    PURGE_PATH,
    STREAMS_PATH,
    Answering,
    InternalRouteMiddleware,
    MovesEndpoint,
    OperatorEndpoint,
    PurgeEndpoint,
    SnapshotEndpoint,
)
from phalanx_router.request_log import RequestLog
from phalanx_router.responses.cache import RouterResponseCache
from phalanx_router.responses.metrics import ResponseCacheMetrics
from phalanx_router.resume.conversations import PeerConversations
from phalanx_router.resume.peers import PeerEndpoint, Peers
from phalanx_router.session import FleetSettings
from phalanx_router.settings import BatchSettings
from phalanx_router.summary import SummaryBuilder

NO_PEERS = StaticLeaders(())


class RouterHealthSource:
    """Health of the API server and its groups."""

    def __init__(self, server: HealthSource, links: LinkPool) -> None:
        self._server = server
        self._links = links

    def health(self) -> Health:
        """Health of the API server."""
        return self._server.health()

    def totals(self) -> HealthTotals:
        """Requests of this router, draft tokens and prefix caches of all groups."""
        counts = [_counts(link) for link in self._links.all()]
        drafted, accepted = sum(sum(c.drafted) for c in counts), sum(sum(c.accepted) for c in counts)
        loads = [link.group_report.load for link in self._links.all()]
        curve = merge_curves(load.cache_curve for load in loads if load is not None)
        return replace(self._server.totals(), drafted=drafted, accepted=accepted, cache_curve=curve)

    def memory(self) -> Sequence[MemoryAccount]:
        """Empty: a router has no rank."""
        return ()

    def kv_bytes_per_token(self) -> int | None:
        """Maximum over the groups."""
        reports = [link.group_report for link in self._links.all()]
        return max((report.served.page_bytes // report.page_size for report in reports), default=0) or None


def _counts(link: LeaderLink) -> SpeculationCounts:
    return link.group_report.load.speculation if link.group_report.load is not None else SpeculationCounts()


def _raise(error: BaseException) -> None:
    raise error


Job = Callable[[], Coroutine[Any, Any, None]]


def _make_lifespan(
    jobs: Sequence[Job], on_error: Callable[[BaseException], None], close: Job
) -> Callable[[Starlette], AbstractAsyncContextManager[None]]:
    """A lifespan that runs `jobs`, then `close`."""

    def report(task: asyncio.Task[None]) -> None:
        error = None if task.cancelled() else task.exception()
        if error is not None:
            on_error(error)

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
            await close()

    return lifespan


def _make_console(
    settings: FleetSettings, backend: RouterBackend, keys: ApiKeys, summaries: SummaryBuilder, endpoint: OperatorEndpoint
) -> Console:
    """Starts to record requests."""
    backend.request_log = RequestLog(time.monotonic)
    answers = ConsoleAnswers(backend, backend.request_log, summaries.summary, settings, endpoint.explanation)
    return Console(backend, answers, summaries.drains, keys, endpoint.notify_if_changed)


def _internal_routes(
    token: ServiceToken, backend: RouterBackend, cache: RouterResponseCache, summaries: SummaryBuilder, endpoint: OperatorEndpoint
) -> dict[str, Answering]:
    moves = ManualMoves(backend.links, backend.sessions, backend.mover, lambda: backend.balancing.policy.budgets.bytes_per_s)
    return {
        SUMMARY_PATH: endpoint.answer,
        SNAPSHOT_PATH: SnapshotEndpoint(token, summaries.summary).answer,
        STREAMS_PATH: SnapshotEndpoint(token, backend.list_streams).answer,
        PURGE_PATH: PurgeEndpoint(token, cache.purge).answer,
        MOVES_PATH: MovesEndpoint(token, moves.start).answer,
    }


def _add_internal(app: Starlette, settings: FleetSettings, peer_route: WebSocketRoute, routes: Mapping[str, Answering]) -> None:
    """Adds the paths for the operator and other routers; with a certificate, to an application of their own."""
    if settings.link.certificate is None:
        app.router.routes.append(peer_route)
        app.add_middleware(InternalRouteMiddleware, routes=routes)
    else:
        inner = InternalRouteMiddleware(Starlette(routes=[peer_route]), routes)
        app.state.internal = RoleMiddleware(inner, (labels.ROUTER_ROLE,), {SUMMARY_PATH: (labels.OPERATOR_ROLE,)})


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterOptions:
    """What a router has beside the groups of its fleet."""

    keys: Sequence[ApiKey] = ()
    """Without keys and `oidc`, requests need none."""
    key_file: KeyFile | None = None
    """Replaces `keys` when it changes."""
    oidc: OidcSettings | None = None
    peers: LeaderSource = NO_PEERS
    """Other routers of the service."""
    certificates: Mapping[Purpose, Certificate] = field(default_factory=dict)
    tracer: Tracer | None = None
    has_console: bool = False
    has_tenant_metrics: bool = False
    batches: BatchSettings | None = None
    """Without them there are no endpoints of batches and files."""
    images: ImageSource | None = None
    on_error: Callable[[BaseException], None] = _raise
    """Receives the error of a background job."""


DEFAULT_OPTIONS = RouterOptions()


@dataclass(frozen=True, slots=True, kw_only=True)
class _Parts:
    """Parts of one router, with the metrics in `registry`."""

    registry: CollectorRegistry
    backend: RouterBackend
    keys: ApiKeys
    cache: RouterResponseCache
    conversations: ConversationStore
    replication: Peers
    summaries: SummaryBuilder
    endpoint: OperatorEndpoint


def make_router(
    settings: FleetSettings, source: LeaderSource, options: RouterOptions = DEFAULT_OPTIONS
) -> tuple[Starlette, RouterBackend]:
    """Returns the application and its backend, which follows `source`.

    With a certificate of the link, `state.internal` is the application for the operator and other routers.
    """
    parts = _make_parts(settings, options)
    backend, token = parts.backend, settings.link.token
    app = _make_app(parts, settings, options, _background_jobs(parts, source, options))
    peer_route = PeerEndpoint(token, backend.stream_registry.copies, parts.cache, parts.conversations).route()
    _add_internal(app, settings, peer_route, _internal_routes(token, backend, parts.cache, parts.summaries, parts.endpoint))
    CertificateMetrics(parts.registry, options.certificates)
    if options.has_console:
        console = _make_console(settings, backend, parts.keys, parts.summaries, parts.endpoint)
        app.add_middleware(ConsoleMiddleware, console=console)
    return app, backend


def _make_parts(settings: FleetSettings, options: RouterOptions) -> _Parts:
    registry = CollectorRegistry()
    metrics, keys = RouterMetrics(registry), accepted_keys(options.keys, options.oidc)
    backend = RouterBackend(settings, metrics, tracer=options.tracer)
    backend.dispatcher.quotas.quota_of = keys.quota_of
    cache = RouterResponseCache(backend, ResponseCacheMetrics(registry))
    backend.stream_registry.replication = replication = Peers(settings.link, backend.stream_registry.open_sessions, cache)
    summaries = SummaryBuilder(backend, metrics, settings.link.router, time.monotonic)
    registry.register(GroupGauges(summaries.groups))
    return _Parts(
        registry=registry,
        backend=backend,
        keys=keys,
        cache=cache,
        conversations=ConversationStore(),
        replication=replication,
        summaries=summaries,
        endpoint=_operator_endpoint(settings, backend, summaries),
    )


def _background_jobs(parts: _Parts, source: LeaderSource, options: RouterOptions) -> list[Job]:
    follow = [certificate.follow for certificate in options.certificates.values()]
    jobs: list[Job] = [partial(parts.backend.run, source), partial(parts.replication.run, options.peers), *follow]
    return jobs if options.key_file is None else [*jobs, partial(options.key_file.follow, parts.keys)]


def _make_app(parts: _Parts, settings: FleetSettings, options: RouterOptions, jobs: list[Job]) -> Starlette:
    """Returns the API server, which runs `jobs` and that of the batches."""
    backend = parts.backend
    app = create_app(
        backend,
        registry=parts.registry,
        limits=settings.limits,
        cache=parts.cache,
        tracer=options.tracer,
        latency_targets=lambda: backend.balancing.policy.objectives,
        lifespan=_make_lifespan(jobs, options.on_error, parts.cache.close),
        keys=parts.keys,
        metrics_prefix="phalanx_router",
        has_tenant_metrics=options.has_tenant_metrics,
        keep_alive_s=settings.keep_alive_s,
        conversations=Conversations(
            parts.conversations, PeerConversations(parts.replication.conversations, parts.replication.hand_over)
        ),
        images=options.images,
        make_health_source=lambda server: RouterHealthSource(ServerHealthSource(server), backend.links),
    )
    if options.batches is not None:
        jobs.append(add_batches(app, backend, parts.keys, options.batches, parts.registry).run)  # before the lifespan starts them
    return app


def _operator_endpoint(settings: FleetSettings, backend: RouterBackend, summaries: SummaryBuilder) -> OperatorEndpoint:
    endpoint = OperatorEndpoint(settings.link.token, backend.balancing.set_policy, summaries.summary, summaries.urgent_state)
    backend.balancing.tick_listeners.append(endpoint.notify_if_changed)
    return endpoint
