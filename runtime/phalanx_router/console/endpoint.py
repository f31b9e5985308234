"""HTTP of the console: the page at `/ui`, open to all, and its data below `/ui/api/`, which needs a key of the API.

A key that may write can move a stream, and request the drain of a group from the operator. Keys are bearer tokens, never cookies,
so another site cannot send them.
"""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx_api.pages.static_files import API, HEADERS, PATH, StaticFile, static_files
from phalanx_frontend.auth.api_keys import ApiKey, ApiKeys
from phalanx_frontend.auth.audit import AuditEntry, audited
from phalanx_frontend.auth.caller import audit_refusal, authenticate, safe_request_id
from phalanx_frontend.body import decode_body, read_body
from phalanx_frontend.errors import ApiError, error_response
from phalanx_router.backend import RouterBackend
from phalanx_router.console.answers import Answer, ConsoleAnswers
from phalanx_router.console.records import Viewer
from phalanx_router.drain_requests import DrainRequests
from phalanx_router.request_log import RequestTimeline

REQUEST_PATH = f"{API}requests/"
MAX_BODY_BYTES = 1 << 14
JSON = "application/json"


class DrainOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a drain."""

    group: str


class MoveOrder(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Body of a move."""

    instance: str
    """That of the list with the request."""
    request: int
    """Its number."""
    target: str
    """Name of a group."""


_decode_drain = msgspec.json.Decoder(DrainOrder).decode
_decode_move = msgspec.json.Decoder(MoveOrder).decode


@dataclass(frozen=True, slots=True)
class Console:
    """Answers the requests of the page."""

    backend: RouterBackend
    answers: ConsoleAnswers
    drains: DrainRequests
    keys: ApiKeys
    drain_requested: Callable[[], None]
    """Called after a drain was requested."""

    async def data(self, request: Request) -> Response:
        """Answers a path below `/ui/api/`. Raises ApiError."""
        authorization = request.headers.get("authorization", "").encode()
        id = safe_request_id(request.headers.get("x-request-id", "").encode())
        key, refusal = await authenticate(self.keys, authorization, time.time())
        if refusal is not None:
            audit_refusal(refusal, key, id, "console")
            raise refusal
        viewer = viewer_of(key, bool(self.keys))
        name = request.url.path.removeprefix(API)
        orders = {"drain": self._drain, "move": self._move}
        if name in orders:
            _check_method(request, "POST")
            with audited(name, viewer.tenant, id, outcome="accepted") as entry:
                return orders[name](await _order(request, viewer), entry)
        _check_method(request, "GET")
        return self._read(request, name, viewer)

    def _read(self, request: Request, name: str, viewer: Viewer) -> Response:
        tenant = None if viewer.sees_all else viewer.tenant
        match name:
            case "viewer":
                return Response(msgspec.json.encode(viewer), media_type=JSON)
            case "fleet":
                return _cached(request, (self.answers.explained_fleet if viewer.sees_all else self.answers.fleet).get())
            case "settings":
                return _cached(request, self.answers.settings.get())
            case "requests":
                return _cached(request, self.answers.requests(tenant).get())
        if request.url.path.startswith(REQUEST_PATH):
            found = self._find(request.url.path.removeprefix(REQUEST_PATH), tenant)
            return Response(self.answers.details(found), media_type=JSON)
        raise ApiError(404, f"no such path: {request.url.path}", code="not_found")

    def _find(self, id: str, tenant: str | None) -> RequestTimeline:
        """Raises ApiError 404, also for a request of another tenant."""
        found = self.answers.find(id, tenant)
        if found is None:
            message = "no such request: it ended too long ago, is at another router, or belongs to another key"
            raise ApiError(404, message, code="unknown_request")
        return found

    def _drain(self, body: bytes, entry: AuditEntry) -> Response:
        group = decode_body(_decode_drain, body, "a valid drain").group
        entry.subject = f"groups/{group}"
        draining = {link.endpoint.group: self.backend.links.fleet_view.is_leaving(link) for link in self.backend.links.all()}
        if group not in draining:
            raise ApiError(404, f"no group {group[:100]}", "group", "unknown_group")
        if draining[group]:
            raise ApiError(409, f"{group} is draining already", "group", "already_draining")
        if not self.drains.add(group):
            raise ApiError(429, "too many drains are requested: wait until they begin", "group", "too_many_drains", 5.0)
        self.drain_requested()
        return Response(msgspec.json.encode({"group": group, "requested": True}), 202, media_type=JSON)

    def _move(self, body: bytes, entry: AuditEntry) -> Response:
        order = decode_body(_decode_move, body, "a valid move")
        entry.subject, entry.detail = f"requests/{order.request}", {"target": order.target[:100]}
        if order.instance != self.answers.instance:
            raise ApiError(409, "another router answers now, whose requests have other numbers", "instance", "another_router")
        session = self._find(str(order.request), None).session
        if session is None:
            raise ApiError(409, f"request {order.request} has ended", "request", "not_moved")
        link = next((link for link in self.backend.links.staying() if link.endpoint.group == order.target), None)
        if link is None:
            raise ApiError(404, f"no group {order.target[:100]} serves, or it drains", "target", "unknown_group")
        obstacle = self.backend.mover.move(session, link.key, "precopy", "manual")
        if obstacle is not None:
            raise ApiError(409, obstacle, "request", "not_moved")
        return Response(msgspec.json.encode({"request": order.request, "target": order.target}), 202, media_type=JSON)


async def _order(request: Request, viewer: Viewer) -> bytes:
    """Returns the body of an order. Raises ApiError 403 for a viewer that may not write."""
    if not viewer.may_write:
        why = "this API key may only read the console" if viewer.has_keys else "without API keys the console is read-only"
        raise ApiError(403, f'{why}: give a key "console": "write" in the keys file', code="console_read_only")
    return await read_body(request, MAX_BODY_BYTES)


def viewer_of(key: ApiKey | None, has_keys: bool) -> Viewer:
    """Returns what a caller may see and do. A tenant sees its own requests; without keys all are seen and none may write."""
    may_write = key is not None and key.may_write_console
    return Viewer(
        tenant=key.name if key is not None else "", has_keys=has_keys, may_write=may_write, sees_all=may_write or not has_keys
    )


class ConsoleMiddleware:
    """ASGI middleware: answers `/ui` and all paths below."""

    def __init__(self, app: ASGIApp, console: Console) -> None:
        self._app = app
        self._answer = console.data
        self._files = static_files(__package__)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles the request."""
        path = scope["path"] if scope["type"] == "http" else ""
        if path != PATH and not path.startswith(f"{PATH}/"):
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        answer: Callable[[Request], Awaitable[Response]] = self._answer if path.startswith(API) else self._file
        try:
            response = await answer(request)
        except ApiError as error:
            response = error_response(error)
        response.headers.update(HEADERS)
        response.headers.setdefault("cache-control", "no-store")
        await response(scope, receive, send)

    async def _file(self, request: Request) -> Response:
        file = self._files.get(request.url.path)
        if file is None:
            raise ApiError(404, f"no such path: {request.url.path}", code="not_found")
        _check_method(request, "GET", "HEAD")
        return _static(request, file)


def _static(request: Request, file: StaticFile) -> Response:
    headers = {"etag": file.etag, "cache-control": "no-cache"}
    if request.headers.get("if-none-match") == file.etag:
        return Response(status_code=304, headers=headers)
    return Response(file.content, headers=headers, media_type=file.media_type)


def _cached(request: Request, answer: Answer) -> Response:
    headers = {"etag": answer.etag, "cache-control": "private, no-cache"}
    if request.headers.get("if-none-match") == answer.etag:
        return Response(status_code=304, headers=headers)
    return Response(answer.content, headers=headers, media_type=JSON)


def _check_method(request: Request, *methods: str) -> None:
    if request.method not in methods:
        raise ApiError(405, f"{request.url.path} accepts {' and '.join(methods)} only", code="method_not_allowed")
