"""HTTP endpoints with the service token, outside of the clients' API.

`POST /phalanx/summary` is the operator's long poll, which carries the balancing policy: the response follows when the urgent
state changes, else after the requested wait. `POST /phalanx/summary/now` answers at once and changes nothing.
`POST /phalanx/cache/purge` drops all stored responses. `POST /phalanx/moves` moves streams of a group. `POST /phalanx/streams`
answers with open streams.
"""

import asyncio
import logging
import math
import time
from collections.abc import Awaitable, Callable, Mapping

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx_api.summary import MAX_ORDERED_MOVES, BalancePolicy, RouterSummary, StartedMoves, StreamList, SummaryRequest
from phalanx_api.wire import HTTP_WRONG_VERSION, PROTOCOL_VERSION
from phalanx_frontend.auth.audit import audited
from phalanx_frontend.auth.caller import audit_refusal, safe_request_id
from phalanx_frontend.auth.service_token import ServiceToken, is_bearer
from phalanx_frontend.body import decode_body, read_body
from phalanx_frontend.errors import ApiError, error_response
from phalanx_router.migration.manual import GroupMoveOrder
from phalanx_router.summary import UrgentState

log = logging.getLogger(__name__)

ADMINISTRATOR = "service token"
"""Caller of orders with the service token, whose file only users read that may exec into the service's pods."""
PURGE_PATH = "/phalanx/cache/purge"
MOVES_PATH = "/phalanx/moves"
STREAMS_PATH = "/phalanx/streams"
MAX_BODY_BYTES = 1 << 20
MAX_WAIT_S = 60.0
Answering = Callable[[Request], Awaitable[Response]]
_decode = msgspec.json.Decoder(SummaryRequest).decode
_decode_order = msgspec.json.Decoder(GroupMoveOrder).decode


class OperatorEndpoint:
    """Answers the operator's polls."""

    def __init__(
        self,
        token: ServiceToken,
        set_policy: Callable[[BalancePolicy], None],
        summary: Callable[[], RouterSummary],
        urgent_state: Callable[[], UrgentState],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._token = token
        self._set_policy = set_policy
        self._summary = summary
        self._urgent_state = urgent_state
        self._clock = clock
        self._last_sent: UrgentState | None = None
        self._changed = asyncio.Event()
        self._explanation: list[str] = []
        self._explained_at = -math.inf

    def explanation(self) -> list[str]:
        """Returns what limits the service, by a recent poll; empty without one."""
        return self._explanation if self._clock() - self._explained_at < 2 * MAX_WAIT_S else []

    def notify_if_changed(self) -> None:
        """Ends the waiting poll if the urgent state has changed."""
        if self._urgent_state() != self._last_sent:
            self._changed.set()

    async def answer(self, request: Request) -> Response:
        """Answers one poll. Raises ApiError."""
        check_internal(request, self._token)
        poll = await _read(request)
        if poll.version != PROTOCOL_VERSION:
            log.warning("rejected a poll", extra={"why": f"version {poll.version}, this router supports {PROTOCOL_VERSION}"})
            message = f"this router supports summary version {PROTOCOL_VERSION}, the operator sent {poll.version}"
            raise ApiError(HTTP_WRONG_VERSION, message, code="unknown_version")
        self._set_policy(poll.policy)
        self._explanation, self._explained_at = poll.explanation, self._clock()
        self.notify_if_changed()
        try:
            async with asyncio.timeout(min(max(poll.wait_s, 0.0), MAX_WAIT_S)):
                await self._changed.wait()
        except TimeoutError:
            self.notify_if_changed()  # an abandoned poll ends here too and must not hide a change from the next one
        self._changed.clear()
        self._last_sent = self._urgent_state()
        return Response(msgspec.json.encode(self._summary()), media_type="application/json")


class SnapshotEndpoint:
    """Answers with the present summary, or with the present streams."""

    def __init__(self, token: ServiceToken, read: Callable[[], RouterSummary | StreamList]) -> None:
        self._token = token
        self._read = read

    async def answer(self, request: Request) -> Response:
        """Returns the record. Raises ApiError."""
        check_internal(request, self._token)
        return Response(msgspec.json.encode(self._read()), media_type="application/json")


class PurgeEndpoint:
    """Purges the response cache."""

    def __init__(self, token: ServiceToken, purge: Callable[[], int]) -> None:
        self._token = token
        self._purge = purge

    async def answer(self, request: Request) -> Response:
        """Returns the number of dropped responses. Raises ApiError."""
        check_internal(request, self._token)
        with audited("purge", ADMINISTRATOR, _request_id(request)) as entry:
            entry.subject = "responses"
            count = self._purge()
            entry.detail = {"responses": count}
        return Response(msgspec.json.encode({"purged": count}), media_type="application/json")


class MovesEndpoint:
    """Executes orders of an administrator to move streams."""

    def __init__(self, token: ServiceToken, start: Callable[[GroupMoveOrder], StartedMoves]) -> None:
        self._token = token
        self._start = start

    async def answer(self, request: Request) -> Response:
        """Returns the moves that the router started. Raises ApiError."""
        check_internal(request, self._token)
        with audited("move", ADMINISTRATOR, _request_id(request)) as entry:
            order = decode_body(_decode_order, await read_body(request, MAX_BODY_BYTES), "a valid order of moves")
            entry.subject = f"groups/{order.group}"
            if not 1 <= order.count <= MAX_ORDERED_MOVES:
                raise ApiError(400, f"count is {order.count}: expected 1 to {MAX_ORDERED_MOVES}", "count")
            started = self._start(order)
            entry.detail = {"targets": started.targets, "obstacles": started.obstacles}
        return Response(msgspec.json.encode(started), media_type="application/json")


def _request_id(request: Request) -> str:
    return safe_request_id(request.headers.get("x-request-id", "").encode())


def check_internal(request: Request, token: ServiceToken) -> None:
    """Raises ApiError unless it is a POST with the service token."""
    authorization = request.headers.get("authorization", "").encode()
    if not is_bearer(authorization, token.accepted):
        raise ApiError(401, "this path is internal: send the service token as bearer token", code="invalid_token")
    if request.method != "POST":
        raise ApiError(405, f"{request.url.path} accepts POST only", code="method_not_allowed")


async def _read(request: Request) -> SummaryRequest:
    return decode_body(_decode, await read_body(request, MAX_BODY_BYTES), "a valid poll")


class InternalRouteMiddleware:
    """ASGI middleware: answers the paths of `routes`, without API keys."""

    def __init__(self, app: ASGIApp, routes: Mapping[str, Answering]) -> None:
        self._app = app
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handles the request."""
        answer = self._routes.get(scope["path"]) if scope["type"] == "http" else None
        if answer is None:
            await self._app(scope, receive, send)
            return
        try:
            response = await answer(Request(scope, receive))
        except ApiError as error:
            if error.status == 401:
                audit_refusal(error, None, _request_id(Request(scope)), scope["path"])
            response = error_response(error)
        await response(scope, receive, send)
