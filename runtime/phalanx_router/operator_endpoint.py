"""The operator's door to a router: `POST /phalanx/summary`, with the service token, outside of the clients' API keys.

The question carries the policy to follow; the answer comes when something that the operator should know has changed since the
last answer, else after the time that it gave. A waiting question holds nothing up: streams do not know of it.
"""

import asyncio
import hmac
import logging
from collections.abc import Callable

import msgspec
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx_api.summary import SUMMARY_PATH, Asked, BalancePolicy, RouterSummary
from phalanx_api.wire.versions import HTTP_WRONG_VERSION, SUMMARY
from phalanx_frontend.errors import ApiError, error_response
from phalanx_router.summary import Crossing

log = logging.getLogger(__name__)

MOST_BYTES = 1 << 20
LONGEST_S = 60.0
_decode = msgspec.json.Decoder(Asked).decode


class SummaryDoor:
    """Answers questions. Call `looked` after each tick: it notices what has changed."""

    def __init__(
        self,
        token: str,
        obey: Callable[[BalancePolicy], None],
        summary: Callable[[], RouterSummary],
        crossing: Callable[[], Crossing],
    ) -> None:
        self._token = f"Bearer {token}".encode()
        self._obey = obey
        self._summary = summary
        self._crossing = crossing
        self._told: Crossing | None = None
        self._changed = asyncio.Event()

    def looked(self) -> None:
        """Wakes who waits when something is not as it was last told."""
        if self._crossing() != self._told:
            self._changed.set()

    async def answer(self, request: Request) -> Response:
        """The answer to one question. Raises ApiError."""
        offered = request.headers.get("authorization", "").encode()
        if not hmac.compare_digest(offered, self._token):
            raise ApiError(401, "this is the operator's: it needs the service token", code="invalid_token")
        if request.method != "POST":
            raise ApiError(405, f"{SUMMARY_PATH} answers POST", code="method_not_allowed")
        asked = await _read(request)
        version = SUMMARY.agreed(asked.version, asked.oldest_version)
        if version is None:
            log.warning("question refused", extra={"why": f"version {asked.version}, this router speaks {SUMMARY}"})
            message = f"this router answers questions of version {SUMMARY}, the operator's is {asked.version}"
            raise ApiError(HTTP_WRONG_VERSION, message, code="unknown_version")
        self._obey(asked.policy)
        self.looked()
        try:
            async with asyncio.timeout(min(max(asked.wait_s, 0.0), LONGEST_S)):
                await self._changed.wait()
        except TimeoutError:
            self.looked()  # a question that its asker gave up ends so too, and must not keep news from the one that followed
        self._changed.clear()
        self._told = self._crossing()
        summary = msgspec.structs.replace(self._summary(), version=version)
        return Response(msgspec.json.encode(summary), media_type="application/json")


async def _read(request: Request) -> Asked:
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > MOST_BYTES:
            raise ApiError(413, f"the body is longer than {MOST_BYTES} bytes", code="request_too_large")
    try:
        return _decode(bytes(body))
    except msgspec.DecodeError as error:
        raise ApiError(400, f"the body is no question: {error}") from error


class BesideTheDoor:
    """ASGI middleware: the path of summaries goes to `SummaryDoor`, all else to the clients' door."""

    def __init__(self, app: ASGIApp, door: SummaryDoor) -> None:
        self._app = app
        self._door = door

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request."""
        if scope["type"] != "http" or scope["path"] != SUMMARY_PATH:
            await self._app(scope, receive, send)
            return
        try:
            response = await self._door.answer(Request(scope, receive))
        except ApiError as error:
            response = error_response(error)
        await response(scope, receive, send)
