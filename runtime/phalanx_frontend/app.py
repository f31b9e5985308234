"""The application: routes, health, errors in OpenAI's form, limits."""

from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from prometheus_client import CollectorRegistry, Counter
from starlette.exceptions import HTTPException
from starlette.responses import Response

from phalanx_api.wire.leader import MemoryAccount
from phalanx_frontend.auth.api_keys import ApiKeys
from phalanx_frontend.auth.caller import Gate, caller_of
from phalanx_frontend.backend import Backend, BackendError
from phalanx_frontend.errors import ApiError, error_response, internal_error, of_backend, of_validation
from phalanx_frontend.fields import ERRORS
from phalanx_frontend.health import Health, Totals, Vitals, health_routes
from phalanx_frontend.limits import BodyLimit, Limits
from phalanx_frontend.metrics import DoorMetrics, response_counter
from phalanx_frontend.native.routes import native_routes
from phalanx_frontend.openai.context import Door
from phalanx_frontend.openai.routes import openai_routes

Lifespan = Callable[[FastAPI], AbstractAsyncContextManager[None]]


class DoorVitals:
    """Implements `Vitals` from what the door itself knows."""

    def __init__(self, door: Door) -> None:
        self._door = door

    def health(self) -> Health:
        """The backend's readiness."""
        return Health(not_ready=self._door.backend.not_ready())

    def totals(self) -> Totals:
        """The door's own requests."""
        return self._door.metrics.tally.totals()

    def memory(self) -> Sequence[MemoryAccount]:
        """Nothing: a door has no rank."""
        return ()

    def kv_bytes_per_token(self) -> int | None:
        """Unknown."""
        return None


def create_app(
    backend: Backend,
    *,
    registry: CollectorRegistry | None = None,
    limits: Limits | None = None,
    lifespan: Lifespan | None = None,
    keys: ApiKeys | None = None,
    vitals: Callable[[Door], Vitals] = DoorVitals,
    metrics_prefix: str = "phalanx",
    keep_alive_s: float = 5.0,
) -> FastAPI:
    """The OpenAI server over a backend, with health and metrics.

    Starting and ending the backend is the caller's, for which `lifespan` is handed to FastAPI. `registry` may hold the
    caller's own metrics too; one registry serves one app. Without `keys` anyone may ask. `vitals` makes what is told
    of health and of counts; without it the door tells the backend's readiness and its own counts.
    """
    registry = registry if registry is not None else CollectorRegistry()
    limits = limits if limits is not None else Limits()
    responses = response_counter(registry, metrics_prefix)
    door = Door(backend, DoorMetrics(registry, responses, metrics_prefix), limits, keep_alive_s=keep_alive_s)
    app = _make_app(responses, lifespan)
    app.add_middleware(BodyLimit, max_bytes=limits.max_body_bytes)
    app.add_middleware(Gate, keys=keys)
    told = vitals(door)
    app.include_router(health_routes(told.health, registry, warm=door.warm), responses=ERRORS)
    app.include_router(native_routes(door, told), responses=ERRORS)
    app.include_router(openai_routes(door), responses=ERRORS)
    return app


def create_health_app(
    health: Callable[[], Health], *, registry: CollectorRegistry | None = None, lifespan: Lifespan | None = None
) -> FastAPI:
    """Only /healthz, /readyz, /v1/health and /metrics: for pods that have no door. Every error has the OpenAI form."""
    registry = registry if registry is not None else CollectorRegistry()
    app = _make_app(response_counter(registry, "phalanx"), lifespan)
    app.add_middleware(Gate)
    app.include_router(health_routes(health, registry), responses=ERRORS)
    return app


def _make_app(responses: Counter, lifespan: Lifespan | None) -> FastAPI:
    """An application without routes, whose errors have OpenAI's form and are counted."""
    app = FastAPI(title="Phalanx", lifespan=lifespan)

    async def answer(request: Request, error: Exception) -> Response:
        told = of_exception(error, request)
        route = getattr(request.scope.get("route"), "path", "unknown")
        responses.labels(route, str(told.status)).inc()
        response = error_response(told)
        if isinstance(error, HTTPException):
            response.headers.update(error.headers or {})
        if told.code == "internal_error":  # answered outside of the gate
            response.headers["x-request-id"] = caller_of(request).request_id
        return response

    for kind in (ApiError, BackendError, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, answer)
    return app


def of_exception(error: Exception, request: Request) -> ApiError:
    """What the client is told of any exception. Those of no known kind are bugs, which the server logs."""
    match error:
        case ApiError():
            return error
        case BackendError():
            return of_backend(error)
        case RequestValidationError():
            return of_validation(error.errors())
        case HTTPException():
            return of_http(error, request)
        case _:
            return internal_error()


def of_http(error: HTTPException, request: Request) -> ApiError:
    """What the framework refuses: unknown paths and methods, unreadable bodies."""
    match error.status_code:
        case 404:
            return ApiError(404, f"there is nothing at {request.url.path}", code="not_found")
        case 405:
            return ApiError(405, f"{request.url.path} does not answer {request.method}", code="method_not_allowed")
        case 413:
            return ApiError(413, str(error.detail), code="request_too_large")
        case status:
            return ApiError(status, str(error.detail))
