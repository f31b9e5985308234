"""Whether this process lives, whether it serves, and what it measured. For every pod, with or without a door."""

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

# What a door tells of the engine behind it, at /v1/health and /v1/metrics. The runtime and the router each implement it.


@dataclass(frozen=True, slots=True)
class RankHealth:
    """One rank: whether its process lives, and how long its heartbeat has been silent (None: it has never spoken)."""

    rank: int
    alive: bool
    silent_s: float | None = None


@dataclass(frozen=True, slots=True)
class Health:
    """Whether this process can mend itself, and whether requests are served. `not_alive`, `not_ready`: why not, or None."""

    not_alive: str | None = None
    not_ready: str | None = None
    incarnation: int | None = None
    ranks: Sequence[RankHealth] = ()


@dataclass(frozen=True, slots=True)
class Totals:
    """Counts since the start of this process: requests that ended, and what they were given.

    proposed, accepted: tokens that were proposed, and those of them that were drawn too; at a router by the engines behind it,
    since each of them started.
    """

    requests: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    generated_tokens: int = 0
    latency_s: float = 0.0
    proposed: int = 0
    accepted: int = 0


class Vitals(Protocol):
    """What the door asks when somebody asks it. All calls return at once."""

    def health(self) -> Health:
        """The state of the process and of the ranks that it knows."""
        ...

    def totals(self) -> Totals:
        """What was served, by whichever door it came."""
        ...

    def memory(self) -> Sequence[MemoryAccount]:
        """The account of each rank that has told one."""
        ...

    def kv_bytes_per_token(self) -> int | None:
        """Bytes of one token in the KV caches of all ranks of a group; None while no group has told."""
        ...


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
