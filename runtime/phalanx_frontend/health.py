"""Liveness, readiness and metrics routes of every pod, with or without an API server."""

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.responses import JSONResponse, Response

from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.errors import ApiError
from phalanx_frontend.fields import EXPOSITION

# State of the engine for /v1/health and /v1/metrics. The runtime and the router each implement `HealthSource`.


@dataclass(frozen=True, slots=True)
class RankHealth:
    """Health of one rank."""

    rank: int
    alive: bool  # its process runs
    silent_s: float | None = None  # seconds since its last heartbeat; None before the first


@dataclass(frozen=True, slots=True)
class Health:
    """Health of this process."""

    not_alive: str | None = None  # reason to restart the container, or None
    not_ready: str | None = None  # reason that no request can be served, or None
    incarnation: int | None = None
    ranks: Sequence[RankHealth] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthTotals:
    """Counts over ended requests since this process started."""

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    latency_s: float = 0.0
    proposed: int = 0  # draft tokens; at a router those of all its engines, since each engine started
    accepted: int = 0  # draft tokens that the target accepted


class HealthSource(Protocol):
    """State behind /v1/health and /v1/metrics. No call blocks."""

    def health(self) -> Health:
        """Returns the state of the process and of the known ranks."""
        ...

    def totals(self) -> HealthTotals:
        """Returns counts over all requests served, through any route."""
        ...

    def memory(self) -> Sequence[MemoryAccount]:
        """Returns the memory account of each rank that reported one."""
        ...

    def kv_bytes_per_token(self) -> int | None:
        """Returns bytes per token in the KV caches of all ranks of a group; None until a group reported it."""
        ...


async def _no_warmup() -> None:
    pass


def health_routes(
    health: Callable[[], Health], registry: CollectorRegistry, warm: Callable[[], Awaitable[object]] = _no_warmup
) -> APIRouter:
    """Builds GET /healthz, /readyz, /v1/health and /metrics.

    `warm` is awaited before the first "ready" response; it does work that the first request would otherwise wait for.
    """
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz")
    async def healthz() -> dict[str, str]:
        """Liveness: 200, or 503 with the reason if the container must be restarted."""
        reason = health().not_alive
        if reason is not None:
            raise ApiError(503, reason, code="not_alive")
        return {"status": "ok"}

    @routes.get("/health")
    @routes.get("/readyz")
    async def readyz() -> dict[str, str]:
        """Readiness: 200, or 503 with the reason. /health is the name that vLLM's clients use."""
        reason = health().not_ready
        if reason is not None:
            raise ApiError(503, reason, code="not_ready")
        await warm()
        return {"status": "ok"}

    @routes.get("/v1/health", responses={503: {"description": "Not alive, or not ready."}})
    async def v1_health() -> JSONResponse:
        """Liveness and readiness with their reasons, the incarnation, and every known rank."""
        now = health()
        is_well = now.not_alive is None and now.not_ready is None
        return JSONResponse(health_document(now), 200 if is_well else 503)

    @routes.get("/metrics", response_class=Response, responses=EXPOSITION)
    async def metrics(request: Request) -> Response:
        """Metrics, in the exposition format that the scraper accepts."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return routes


def health_document(health: Health) -> dict[str, Any]:
    """Returns the body of /v1/health."""
    return {
        "alive": health.not_alive is None,
        "ready": health.not_ready is None,
        "reason": health.not_alive or health.not_ready,
        "incarnation": health.incarnation,
        "ranks": [{"rank": rank.rank, "alive": rank.alive, "silent_s": rank.silent_s} for rank in health.ranks],
    }
