"""Whether this process lives, whether it serves, and what it measured. For every pod, with or without a door."""

from collections.abc import Awaitable, Callable
from typing import Any

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.responses import JSONResponse, Response

from phalanx_frontend.errors import ApiError
from phalanx_frontend.openapi import EXPOSITION
from phalanx_frontend.vitals import Health


async def _nothing() -> None:
    pass


def health_routes(
    health: Callable[[], Health], registry: CollectorRegistry, warm: Callable[[], Awaitable[object]] = _nothing
) -> APIRouter:
    """GET /healthz, /readyz, /v1/health, /metrics. `health` says why the process does not live or does not serve, if so.

    `warm` is awaited before the first "ready": what the first request would else wait for.
    """
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz")
    async def healthz() -> dict[str, str]:
        """200 while this process can mend itself, else 503 with the reason: it wants to be started anew."""
        reason = health().not_alive
        if reason is not None:
            raise ApiError(503, reason, code="not_alive")
        return {"status": "ok"}

    @routes.get("/health")
    @routes.get("/readyz")
    async def readyz() -> dict[str, str]:
        """200 while requests can be served, else 503 with the reason. vLLM's clients look for it at /health."""
        reason = health().not_ready
        if reason is not None:
            raise ApiError(503, reason, code="not_ready")
        await warm()
        return {"status": "ok"}

    @routes.get("/v1/health", responses={503: {"description": "Not alive, or not ready."}})
    async def v1_health() -> JSONResponse:
        """Liveness and readiness with their reasons, the incarnation, and every rank that is known."""
        now = health()
        is_well = now.not_alive is None and now.not_ready is None
        return JSONResponse(health_document(now), 200 if is_well else 503)

    @routes.get("/metrics", response_class=Response, responses=EXPOSITION)
    async def metrics(request: Request) -> Response:
        """Metrics, in the text form that the scraper asks for."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return routes


def health_document(health: Health) -> dict[str, Any]:
    """The body of /v1/health."""
    return {
        "alive": health.not_alive is None,
        "ready": health.not_ready is None,
        "reason": health.not_alive or health.not_ready,
        "incarnation": health.incarnation,
        "ranks": [{"rank": rank.rank, "alive": rank.alive, "silent_s": rank.silent_s} for rank in health.ranks],
    }
