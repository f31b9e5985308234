"""The FastAPI application."""

import asyncio
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, nullcontext

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter
from starlette.exceptions import HTTPException
from starlette.responses import Response
from starlette.types import Scope

from phalanx_api.summary import LatencyObjectives
from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.anthropic.models import model_routes
from phalanx_frontend.anthropic.routes import anthropic_routes
from phalanx_frontend.auth.api_keys import ApiKeys, TokenVerifier
from phalanx_frontend.auth.caller import TRACED_PATHS, CallerMiddleware, caller_of
from phalanx_frontend.backend import Backend, BackendError
from phalanx_frontend.body import BodyLimitMiddleware
from phalanx_frontend.errors import ApiError, api_error_of_backend, api_error_of_validation, error_response, internal_error
from phalanx_frontend.fields import ANTHROPIC_RESPONSES, ERRORS
from phalanx_frontend.health import Health, HealthSource, HealthTotals, health_routes
from phalanx_frontend.images.budget import ImageLeaseMiddleware
from phalanx_frontend.images.source import ImageSource
from phalanx_frontend.limits import DEFAULT_LIMITS, Limits
from phalanx_frontend.metrics import ApiMetrics, response_counter
from phalanx_frontend.native.routes import native_routes
from phalanx_frontend.objectives import ObjectiveCounter, no_targets
from phalanx_frontend.openai.context import ServerContext
from phalanx_frontend.openai.routes import openai_routes
from phalanx_frontend.openai.served_model import ModelCache
from phalanx_frontend.openai_responses.conversation_store import Conversations, ConversationStore, NoOtherServers
from phalanx_frontend.openai_responses.routes import openai_responses_routes
from phalanx_frontend.stream.response_cache import NO_RESPONSE_CACHE, ResponseCache
from phalanx_frontend.tracing.tracer import Tracer

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


class ServerHealthSource:
    """Health of the API server alone."""

    def __init__(self, server: ServerContext) -> None:
        self._server = server

    def health(self) -> Health:
        """Returns the backend's readiness."""
        return Health(not_ready=self._server.backend.not_ready())

    def totals(self) -> HealthTotals:
        """Returns the counts of this server's requests."""
        return self._server.metrics.request_totals.totals()

    def memory(self) -> Sequence[MemoryAccount]:
        """Returns nothing: there is no rank."""
        return ()

    def kv_bytes_per_token(self) -> int | None:
        """Returns null: unknown here."""
        return None


def create_app(
    backend: Backend,
    *,
    registry: CollectorRegistry | None = None,
    limits: Limits = DEFAULT_LIMITS,
    lifespan: Lifespan | None = None,
    keys: ApiKeys | None = None,
    make_health_source: Callable[[ServerContext], HealthSource] = ServerHealthSource,
    metrics_prefix: str = "phalanx",
    has_tenant_metrics: bool = False,
    keep_alive_s: float = 5.0,
    cache: ResponseCache = NO_RESPONSE_CACHE,
    tracer: Tracer | None = None,
    latency_targets: Callable[[], LatencyObjectives] = no_targets,
    conversations: Conversations | None = None,
    images: ImageSource | None = None,
) -> FastAPI:
    """Creates the API server; `lifespan` starts and stops the backend. Each app needs its own `registry`."""
    conversations = conversations if conversations is not None else Conversations(ConversationStore(), NoOtherServers())
    images = images or ImageSource()
    registry = registry if registry is not None else CollectorRegistry()
    keys = keys if keys is not None else ApiKeys()
    responses = response_counter(registry, metrics_prefix)
    objectives = ObjectiveCounter(registry, metrics_prefix, latency_targets)
    metrics = ApiMetrics(registry, responses, metrics_prefix, objectives, has_tenants=has_tenant_metrics)
    server = ServerContext(
        backend=backend,
        metrics=metrics,
        limits=limits,
        cache=cache,
        keep_alive_s=keep_alive_s,
        models=ModelCache(images),
    )
    lifespan = _with_background(_with_tokens(lifespan, keys.tokens), conversations)
    app = _make_app(responses, lifespan, metrics.objectives)
    app.add_middleware(ImageLeaseMiddleware, budget=images.budget, tenant_of=_tenant_of)
    app.add_middleware(BodyLimitMiddleware, limits=limits, tenant_of=_tenant_of)
    app.add_middleware(CallerMiddleware, keys=keys, tracer=tracer, responded=metrics.tenants.responded)
    source = make_health_source(server)
    app.include_router(openai_routes(server), responses=ERRORS)  # the first, as a request is matched with each route in order
    app.include_router(health_routes(source.health, registry, warm=server.warm), responses=ERRORS)
    app.include_router(native_routes(server, source), responses=ERRORS)
    app.include_router(model_routes(server), responses=ERRORS)
    app.include_router(openai_responses_routes(server, conversations), responses=ERRORS)
    app.include_router(anthropic_routes(server), responses=ANTHROPIC_RESPONSES)
    return app


def create_health_app(
    health: Callable[[], Health], *, registry: CollectorRegistry | None = None, lifespan: Lifespan | None = None
) -> FastAPI:
    """Creates an app with health and metrics only."""
    registry = registry if registry is not None else CollectorRegistry()
    app = _make_app(response_counter(registry, "phalanx"), lifespan)
    app.add_middleware(CallerMiddleware, keys=ApiKeys())
    app.include_router(health_routes(health, registry), responses=ERRORS)
    return app


def _tenant_of(scope: Scope) -> str:
    """Returns the tenant of a request's API key; empty without keys."""
    return caller_of(Request(scope)).tenant(None, None)


def _with_tokens(lifespan: Lifespan | None, tokens: TokenVerifier | None) -> Lifespan | None:
    """Returns a lifespan that also follows the keys of the tokens' issuer."""
    if tokens is None:
        return lifespan

    @asynccontextmanager
    async def both(app: FastAPI) -> AsyncIterator[None]:
        following = asyncio.create_task(tokens.follow())
        try:
            async with lifespan(app) if lifespan is not None else nullcontext():
                yield
        finally:
            following.cancel()
            await asyncio.gather(following, return_exceptions=True)

    return both


def _with_background(lifespan: Lifespan | None, conversations: Conversations) -> Lifespan:
    """Returns a lifespan that ends responses in the background before the backend stops."""

    @asynccontextmanager
    async def both(app: FastAPI) -> AsyncIterator[None]:
        async with lifespan(app) if lifespan is not None else nullcontext():
            try:
                yield
            finally:
                await conversations.stop()

    return both


def _make_app(responses: Counter, lifespan: Lifespan | None, objectives: ObjectiveCounter | None = None) -> FastAPI:
    """Creates an app without routes, with errors in OpenAI's form."""
    app = FastAPI(title="Phalanx", lifespan=lifespan)

    async def answer(request: Request, error: Exception) -> Response:
        api_error = api_error_of_exception(error, request)
        route = getattr(request.scope.get("route"), "path", "unknown")
        responses.labels(route, str(api_error.status)).inc()
        if objectives is not None and route in TRACED_PATHS:  # others count no success either
            objectives.failed(api_error.status, api_error.code)
        response = error_response(api_error, request.scope)
        if isinstance(error, HTTPException):
            response.headers.update(error.headers or {})
        if api_error.code == "internal_error":  # sent outside `CallerMiddleware`
            response.headers["x-request-id"] = caller_of(request).request_id
        return response

    for kind in (ApiError, BackendError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
    return app


def api_error_of_exception(error: Exception, request: Request) -> ApiError:
    """Converts an exception; unexpected types are bugs."""
    match error:
        case ApiError():
            return error
        case BackendError():
            return api_error_of_backend(error)
        case RequestValidationError():
            return api_error_of_validation(error.errors())
        case HTTPException():
            return api_error_of_http(error, request)
        case _:
            return internal_error()


_SPEECH = "models of speech, such as Whisper, are encoder-decoders, and the engine computes decoders and encoders"
_ASLEEP = "a service scales to zero, and starts with its next request"
NOT_SERVED = {
    "/v1/audio/transcriptions": _SPEECH,
    "/v1/audio/translations": _SPEECH,
    "/v1/audio/speech": "the engine makes no sound",
    "/v1/images/generations": "the engine makes no images",
    "/v1/images/edits": "the engine makes no images",
    "/v1/moderations": "serve a classifier, and send texts to /v1/classify",
    "/pooling": "send texts to /v1/embeddings or /v1/classify",
    "/load": "the numbers of running and waiting requests are in /metrics",
    "/sleep": _ASLEEP,
    "/wake_up": _ASLEEP,
    "/is_sleeping": _ASLEEP,
    "/reset_prefix_cache": "requests with another cache_salt share no cached tokens with earlier ones",
    "/collective_rpc": "ranks take no calls of clients",
    "/v1/responses/compact": "models here read no compacted conversation; send truncation: auto, or fewer items",
}
"""Endpoints of OpenAI and vLLM that clients know, and why they are refused."""


def api_error_of_http(error: HTTPException, request: Request) -> ApiError:
    """Converts errors of the framework."""
    path = request.url.path
    match error.status_code:
        case 404 | 405 if path in NOT_SERVED:  # `compact` has the form of a response's id
            return ApiError(404, f"{path} is not served: {NOT_SERVED[path]}; see /openapi.json", code="not_found")
        case 404:
            return ApiError(404, f"no such path: {path}; see /openapi.json", code="not_found")
        case 405:
            return ApiError(405, f"{path} does not accept {request.method}; see /openapi.json", code="method_not_allowed")
        case 408:
            return ApiError(408, str(error.detail), code="request_timeout")
        case 413:
            return ApiError(413, str(error.detail), code="request_too_large")
        case 429:
            return ApiError(429, str(error.detail), code="body_memory_full", retry_after_s=1.0)
        case status:
            return ApiError(status, str(error.detail))
