"""HTTP application of a pod, and its lifespan."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from fastapi import FastAPI
from prometheus_client import CollectorRegistry
from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.app import Lifespan, create_app
from phalanx_frontend.auth.api_keys import ApiKeys
from phalanx_frontend.auth.caller import OPEN_PATHS, audit_refusal, safe_request_id
from phalanx_frontend.auth.service_token import ServiceToken, is_bearer
from phalanx_frontend.errors import ApiError, error_response
from phalanx_frontend.fields import ERRORS
from phalanx_frontend.health import Health, HealthSource, HealthTotals, RankHealth
from phalanx_frontend.images.source import ImageSource
from phalanx_frontend.metrics import RequestTotals
from phalanx_frontend.tracing.tracer import Tracer
from phalanx_runtime.engine.adapters.on_demand import OnDemandAdapters
from phalanx_runtime.engine.backend import LocalBackend
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.errors import ModelError
from phalanx_runtime.server.devices.monitor import DeviceMonitor, DeviceReport
from phalanx_runtime.server.http.adapters import AdapterFolders, adapter_routes
from phalanx_runtime.server.link.connection import LinkSettings
from phalanx_runtime.server.link.endpoint import LinkEndpoint
from phalanx_runtime.server.supervision.supervisor import SupervisorStatus

log = logging.getLogger(__name__)

STATE_PATHS = OPEN_PATHS | {"/v1/health", "/v1/metrics"}
"""Paths that show the state of a group, and nothing of requests."""


class Supervisor(Protocol):
    """A supervisor, as used here."""

    async def run(self) -> None:
        """Runs until cancelled."""
        ...

    def status(self) -> SupervisorStatus:
        """Whether the pod serves."""
        ...

    def stuck_reason(self) -> str | None:
        """Reason for a restart, if so."""
        ...

    def devices_changed(self, report: DeviceReport) -> None:
        """Receives reports of the device monitor."""
        ...

    def ranks(self) -> list[RankHealth]:
        """Health of the ranks."""
        ...

    def memory(self) -> list[MemoryAccount]:
        """Memory accounts of ready ranks."""
        ...


class PodHealthSource:
    """Implements `HealthSource`."""

    def __init__(self, supervisor: Supervisor, totals: RequestTotals) -> None:
        self._supervisor = supervisor
        self._totals = totals

    def health(self) -> Health:
        """Liveness and readiness."""
        status = self._supervisor.status()
        return Health(
            not_alive=self._supervisor.stuck_reason(),
            not_ready=None if status.ready else status.reason,
            incarnation=status.incarnation,
            ranks=self._supervisor.ranks(),
        )

    def totals(self) -> HealthTotals:
        """Totals of the engine."""
        return self._totals.totals()

    def memory(self) -> Sequence[MemoryAccount]:
        """Memory accounts of ready ranks."""
        return self._supervisor.memory()

    def kv_bytes_per_token(self) -> int | None:
        """Sum over ready ranks."""
        return sum(account.kv_bytes_per_token for account in self.memory()) or None


class ServiceTokenMiddleware:
    """ASGI middleware: answers requests without the service's token with 401, except for the state of the group.

    Routers check API keys, their models and quotas; a client that reaches the group itself would have no limits.
    """

    def __init__(self, app: ASGIApp, token: ServiceToken) -> None:
        self._app = app
        self._token = token

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles the request; links prove the token themselves."""
        if scope["type"] != "http" or scope["path"] in STATE_PATHS:
            await self._app(scope, receive, send)
            return
        headers = Request(scope).headers
        if is_bearer(headers.get("authorization", "").encode(), self._token.accepted):
            await self._app(scope, receive, send)
            return
        message = "a group answers its routers only: send requests to the Service of the InferenceService"
        refusal = ApiError(401, message, code="invalid_token")
        audit_refusal(refusal, None, safe_request_id(headers.get("x-request-id", "").encode()), "group")
        await error_response(refusal, scope)(scope, receive, send)


def make_leader_app(
    health: HealthSource,
    client: EngineClient,
    link: LinkSettings | None,
    registry: CollectorRegistry,
    lifespan: Lifespan,
    keys: ApiKeys | None = None,
    tracer: Tracer | None = None,
    adapters: AdapterFolders | None = None,
    declared: OnDemandAdapters | None = None,
    images: ImageSource | None = None,
    is_for_routers: bool = False,
) -> FastAPI:
    """The OpenAI API over the local engine, and the link endpoint. `is_for_routers`: clients need the token of the link.

    `adapters`: those that requests may load, if any. `declared`: those that routers order, if there are slots.
    """
    app = create_app(
        LocalBackend(client, tracer=tracer),
        registry=registry,
        lifespan=lifespan,
        make_health_source=lambda _: health,
        keys=keys,
        tracer=tracer,
        images=images,
    )
    if adapters is not None:
        app.include_router(adapter_routes(client, adapters), responses=ERRORS)
    if link is not None:
        app.router.routes.append(LinkEndpoint(client, link, declared).route())
        if is_for_routers:
            app.add_middleware(ServiceTokenMiddleware, token=link.token)
    return app


def supervised(
    supervisor: Supervisor,
    failed: Callable[[BaseException], None],
    ended: Callable[[], None],
    monitor: DeviceMonitor | None = None,
) -> Lifespan:
    """A lifespan that runs the supervisor. Calls `failed` if it ends by itself, `ended` after the ranks have ended.

    Logs the error, except for a ModelError, whose reason `serve` logs last. `monitor`: of the pod's devices, if it has any.
    """

    def report_failure(task: asyncio.Task[None]) -> None:
        if not task.cancelled():
            error = task.exception() or RuntimeError("the supervisor returned")
            if not isinstance(error, ModelError):
                log.error("the supervisor ended", exc_info=error)
            failed(error)

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        task = asyncio.create_task(supervisor.run())
        task.add_done_callback(report_failure)
        if monitor is not None:
            monitor.start(supervisor.devices_changed)
        try:
            yield
        finally:
            if monitor is not None:
                monitor.stop()
            task.cancel()
            try:
                await asyncio.wait([task])  # `report_failure` logs its error
            finally:
                ended()

    return lifespan
