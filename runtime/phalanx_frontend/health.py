"""Liveness, readiness and metrics routes of every pod."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.openmetrics import exposition as openmetrics
from starlette.responses import JSONResponse, Response

from phalanx_api.cache_curve import NO_CURVE, CacheCurve
from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.errors import ApiError
from phalanx_frontend.fields import EXPOSITION

OPENMETRICS = "application/openmetrics-text"
VERSION = "0.1.0"
"""As in pyproject.toml."""


@dataclass(frozen=True, slots=True)
class RankHealth:
    """Health of one rank."""

    rank: int
    alive: bool  # its process runs
    silent_s: float | None = None  # since its last heartbeat, if any


@dataclass(frozen=True, slots=True)
class Health:
    """Health of this process."""

    not_alive: str | None = None  # reason to restart the container
    not_ready: str | None = None  # reason that no request can be served
    incarnation: int | None = None
    ranks: Sequence[RankHealth] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthTotals:
    """Counts over ended requests since the process started, and the curve of the prefix cache."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    latency_s: float = 0.0
    drafted: int = 0  # draft tokens; at a router of all engines
    accepted: int = 0  # accepted draft tokens
    cache_curve: CacheCurve = NO_CURVE  # of the engine now; at a router of all groups


class HealthSource(Protocol):
    """State behind /v1/health and /v1/metrics. No call blocks."""

    def health(self) -> Health:
        """Returns the state of process and ranks."""
        ...

    def totals(self) -> HealthTotals:
        """Returns counts over all requests."""
        ...

    def memory(self) -> Sequence[MemoryAccount]:
        """Returns the known memory accounts."""
        ...

    def kv_bytes_per_token(self) -> int | None:
        """Returns KV cache bytes per token over all ranks, if known."""
        ...


async def _no_warmup() -> None:
    pass


def health_routes(
    health: Callable[[], Health], registry: CollectorRegistry, warm: Callable[[], Awaitable[object]] = _no_warmup
) -> APIRouter:
    """Builds the health routes. `warm` runs before the first "ready" response."""
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Liveness: 200, or 503 with the reason to restart the container."""
        reason = health().not_alive
        if reason is not None:
            raise ApiError(503, reason, code="not_alive")
        return {"status": "ok"}

    @routes.get("/health")
    @routes.get("/ping")
    @routes.get("/readyz")
    async def readyz() -> dict[str, str]:
        """Readiness: 200, or 503 with the reason. /health and /ping are vLLM's names of this route."""
        reason = health().not_ready
        if reason is not None:
            raise ApiError(503, reason, code="not_ready")
        await warm()
        return {"status": "ok"}

    @routes.get("/version")
    async def version() -> dict[str, str]:
        """Version of Phalanx."""
        return {"version": VERSION}

    @routes.get("/v1/health", responses={503: {"description": "Not alive, or not ready."}})
    async def v1_health() -> JSONResponse:
        """Liveness and readiness with their reasons, the incarnation, and every known rank."""
        now = health()
        is_well = now.not_alive is None and now.not_ready is None
        return JSONResponse(health_document(now), 200 if is_well else 503)

    @routes.get("/metrics", response_class=Response, responses=EXPOSITION)
    async def metrics(request: Request) -> Response:
        """Metrics, in the exposition format that the scraper accepts."""
        page, content_type = exposition(registry, request.headers.get("accept", ""))
        return Response(page, headers={"content-type": content_type})

    return routes


def exposition(registry: CollectorRegistry, accept: str) -> tuple[bytes, str]:
    """Returns the metrics in an accepted format, and its content type.

    All names have only characters that every Prometheus reads, colons included; the library replaces colons in OpenMetrics unless
    any character is allowed.
    """
    encode, content_type = choose_encoder(accept)
    if content_type.startswith(OPENMETRICS):
        page: bytes = openmetrics.generate_latest(registry, escaping=openmetrics.ALLOWUTF8)  # type: ignore[no-untyped-call]
        return page, openmetrics.CONTENT_TYPE_LATEST
    return encode(registry), content_type


def health_document(health: Health) -> dict[str, Any]:
    """Returns the body of /v1/health."""
    return {
        "alive": health.not_alive is None,
        "ready": health.not_ready is None,
        "reason": health.not_alive or health.not_ready,
        "incarnation": health.incarnation,
        "ranks": [{"rank": rank.rank, "alive": rank.alive, "silent_s": rank.silent_s} for rank in health.ranks],
    }
