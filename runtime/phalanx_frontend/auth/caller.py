"""Who asks: the request's id and API key, found before its body is read, and what they let the request be."""

import logging
import re
import time
from dataclasses import dataclass

from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.errors import ApiError, error_response
from phalanx_frontend.ids import NAME_END, draw_id

log = logging.getLogger(__name__)

OPEN_PATHS = frozenset({"/health", "/healthz", "/readyz", "/metrics"})
"""What kubelets and scrapers read needs no key."""
PRIORITIES = range(-(2**31), 2**31)
_REQUEST_ID = re.compile(r"[A-Za-z0-9._:/+=@-]{1,128}")
_SCOPE_KEY = "phalanx.caller"


@dataclass(frozen=True, slots=True)
class Caller:
    """One request's sender. `has_keys`: whether the door knows keys at all; then `key` is the one that was proved.

    `is_drawn`: the request's id is ours, of 128 random bits. `last_event_id`: the header of that name, "" without one.
    """

    request_id: str
    key: ApiKey | None = None
    has_keys: bool = False
    is_drawn: bool = False
    last_event_id: str = ""

    def stream_name(self, id: str) -> str:
        """The name of a stream whose answer has this id: one that nobody can guess."""
        return id if self.is_drawn else draw_id(id + NAME_END)

    def tenant(self, tenant: str | None, user: str | None) -> str:
        """Whose the request is: the key's name; without keys the body's `tenant`, else its `user`, else nobody's."""
        if self.has_keys:
            return self.key.name if self.key is not None else ""
        return tenant or user or ""

    def priority(self, asked: int | None) -> int:
        """The request's priority (lower goes first). Raises ApiError 403 for one that the key does not allow."""
        bound = self.key.priority if self.key is not None else None
        if asked is None:
            return max(0, bound or 0)
        if asked not in PRIORITIES:
            raise ApiError(400, f"priority must be between {PRIORITIES[0]} and {PRIORITIES[-1]}", "priority")
        if bound is not None and asked < bound:
            raise ApiError(403, f"this API key allows no priority below {bound}", "priority", "priority_not_allowed")
        return asked


def caller_of(request: Request) -> Caller:
    """The caller of a request that came through the gate. For FastAPI's Depends."""
    caller: Caller = request.scope[_SCOPE_KEY]
    return caller


class Gate:
    """ASGI middleware: every request has an id, which every answer carries; without a key nothing but health is served.

    An id that a client sent and that cannot be logged is replaced by one of ours.
    """

    def __init__(self, app: ASGIApp, keys: ApiKeys | None = None) -> None:
        self._app = app
        self._keys = keys or ApiKeys([])

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request, or answers 401. Logs one line either way, of nothing that the body says."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began_s = time.perf_counter()
        headers = dict(scope["headers"])
        asked = headers.get(b"x-request-id", b"").decode("latin-1")
        is_drawn = not _REQUEST_ID.fullmatch(asked)
        id = draw_id("") if is_drawn else asked
        status = 0

        async def named(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                message["headers"] = [*message["headers"], (b"x-request-id", id.encode("ascii"))]
            await send(message)

        key = self._keys.find(headers.get(b"authorization", b""))
        last_event_id = headers.get(b"last-event-id", b"").decode("latin-1")
        scope[_SCOPE_KEY] = Caller(id, key, bool(self._keys), is_drawn, last_event_id)
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
    """A 401 as OpenAI's clients know it."""
    message = "Incorrect API key provided." if has_key else "You didn't provide an API key: send Authorization: Bearer <key>."
    return ApiError(401, message, code="invalid_api_key")


def _path(scope: Scope) -> str:
    """The route's own path where one was found: what a client writes into a path may be anything."""
    return str(getattr(scope.get("route"), "path", "unknown"))
