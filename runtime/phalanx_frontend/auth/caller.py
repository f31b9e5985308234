"""The caller of a request: its id and API key, read before the body, and what they permit."""

import logging
import re
import time
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.errors import ApiError, error_response
from phalanx_frontend.ids import STREAM_NAME_SEPARATOR, draw_id

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics"})
"""Paths that need no key: kubelets and scrapers read them."""
PRIORITIES = range(-(2**31), 2**31)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_SCOPE_KEY = "phalanx.caller"


@dataclass(frozen=True, slots=True, kw_only=True)
class Caller:
    """The sender of one request."""

    request_id: str
    key: ApiKey | None = None
    has_keys: bool = False  # the server has keys, so `key` is the one that authenticated the request
    is_drawn: bool = False  # the server drew `request_id`: 128 random bits
    last_event_id: str = ""  # the header Last-Event-ID

    def stream_name(self, id: str) -> str:
        """Returns an unguessable stream name for an answer with this id."""
        return id if self.is_drawn else draw_id(id + STREAM_NAME_SEPARATOR)

    def tenant(self, tenant: str | None, user: str | None) -> str:
        """Returns the tenant of the request: the key's name; without keys the body's `tenant`, else its `user`, else ""."""
        if self.has_keys:
            return self.key.name if self.key is not None else ""
        return tenant or user or ""

    def priority(self, requested: int | None) -> int:
        """Returns the request's priority (lower is more urgent). Raises ApiError 403 if the key does not allow it."""
        bound = self.key.priority if self.key is not None else None
        if requested is None:
            return max(0, bound or 0)
        if requested not in PRIORITIES:
            raise ApiError(400, f"priority must be between {PRIORITIES[0]} and {PRIORITIES[-1]}", "priority")
        if bound is not None and requested < bound:
            raise ApiError(403, f"this API key allows no priority below {bound}", "priority", "priority_not_allowed")
        return requested


def caller_of(request: Request) -> Caller:
    """Returns the caller that `CallerMiddleware` stored in the request. For FastAPI's Depends."""
    caller: Caller = request.scope[_SCOPE_KEY]
    return caller


class CallerMiddleware:
    """ASGI middleware that gives every request an id, returned in every response, and refuses requests without a valid key.

    A client's id that cannot be logged is replaced.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None = None) -> None:
        self._app = app
        self._keys = keys or ApiKeys([])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request or returns 401. Logs one line in either case, without contents of the body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()
        headers = dict(scope["headers"])
        requested = headers.get(b"x-request-id", b"").decode("latin-1")
        is_drawn = not _REQUEST_ID.fullmatch(requested)
        id = draw_id("") if is_drawn else requested
        status = 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", id.encode("ascii"))]
            await send(message)

        key = self._keys.find(headers.get(b"authorization", b""))
        last_event_id = headers.get(b"last-event-id", b"").decode("latin-1")
        scope[_SCOPE_KEY] = Caller(
            request_id=id, key=key, has_keys=bool(self._keys), is_drawn=is_drawn, last_event_id=last_event_id
        )
        try:
            if self._keys and key is None and scope["path"] not in OPEN_PATHS:
                await error_response(unauthorised(b"authorization" in headers))(scope, receive, named)
            else:
                await self._app(scope, receive, named)
        finally:
            if scope["path"] not in OPEN_PATHS:
                fields = {"request_id": id, "method": scope["method"], "path": _path(scope), "status": status}
                fields |= {"seconds": round(time.perf_counter() - began_s, 4), "api_key": key.name if key is not None else None}
                log.info("request ended", extra=fields)


def unauthorised(has_key: bool) -> ApiError:
    """Returns a 401 in OpenAI's form."""
    message = "Incorrect API key provided." if has_key else "You didn't provide an API key: send Authorization: Bearer <key>."
    return ApiError(401, message, code="invalid_api_key")


def _path(scope: Scope) -> str:
    """Returns the path of the matched route: a client's own path may contain anything."""
    return str(getattr(scope.get("route"), "path", "unknown"))
