"""Whether this process is well, whether it serves, and what it measured. For every pod, with or without a door."""

from collections.abc import Awaitable, Callable

from fastapi import APIRouter, Request
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from starlette.responses import Response

from phalanx_frontend.errors import ApiError


async def _nothing() -> None:
    pass


def health_routes(
    not_ready: Callable[[], str | None], registry: CollectorRegistry, warm: Callable[[], Awaitable[object]] = _nothing
) -> APIRouter:
    """GET /healthz, /readyz, /metrics. `not_ready` says why the pod cannot serve, or None.

    `warm` is awaited before the first "ready": what the first request would else wait for.
    """
    routes = APIRouter(tags=["health"])

    @routes.get("/healthz")
    async def healthz() -> dict[str, str]:
        """200 while this process answers."""
        return {"status": "ok"}

    @routes.get("/v1/health")
    @routes.get("/readyz")
    async def readyz() -> dict[str, str]:
        """200 while requests can be served, else 503 with the reason."""
        reason = not_ready()
        if reason is not None:
            raise ApiError(503, reason, code="not_ready")
        await warm()
        return {"status": "ok"}

    @routes.get("/metrics")
    async def metrics(request: Request) -> Response:
        """Metrics, in the text form that the scraper asks for."""
        encode, content_type = choose_encoder(request.headers.get("accept", ""))
        return Response(encode(registry), headers={"content-type": content_type})

    return routes
