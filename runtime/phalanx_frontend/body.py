"""Bodies of requests: their bounds, and small JSON bodies outside of the OpenAI API."""

import asyncio
from collections import Counter
from collections.abc import Callable, MutableMapping
from typing import Any, TypeVar

import msgspec
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from phalanx_frontend.errors import ApiError, error_response
from phalanx_frontend.limits import Limits, MemoryBudget

T = TypeVar("T")
FILES_PATH = "/v1/files"
NO_MEMORY = "bodies of open requests use the memory that this server has for them, or for those of one tenant: retry"


class BodyLimitMiddleware:
    """ASGI middleware that raises 413 for a body above the limit of its path, and 429 if open requests leave no memory for it.

    It answers an upload too many with 429, and raises 408 for a slow one: their bodies are on the disk.
    """

    def __init__(self, app: ASGIApp, limits: Limits, tenant_of: Callable[[Scope], str]) -> None:
        """`tenant_of`: the tenant of a request's key or token; empty: none."""
        self._app = app
        self._tenant_of = tenant_of
        self._limits = limits
        self._memory = MemoryBudget(limits.max_open_bytes)
        self._uploads: Counter[str] = Counter()  # by tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
        elif scope["path"] == FILES_PATH and scope["method"] == "POST":
            await self._upload(scope, receive, send)
        else:
            await self._hold(scope, receive, send)

    async def _hold(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves a request, whose body stays in memory until the end of the answer."""
        tenant, counted, num_held = self._tenant_of(scope), _counted(receive, self._limits.max_body_bytes), 0

        async def held_receive() -> MutableMapping[str, Any]:
            nonlocal num_held
            message = await counted()
            if size := len(message.get("body", b"")):
                if not self._memory.take(tenant, size):
                    raise HTTPException(429, NO_MEMORY)
                num_held += size
            return message

        try:
            await self._app(scope, held_receive, send)
        finally:
            self._memory.give_back(tenant, num_held)

    async def _upload(self, scope: Scope, receive: Receive, send: Send) -> None:
        tenant = self._tenant_of(scope)
        if (why := self._no_room(tenant)) is not None:
            await error_response(ApiError(429, why, code="too_many_uploads", retry_after_s=5.0))(scope, receive, send)
            return
        self._uploads[tenant] += 1
        try:
            await self._app(scope, self._hurried(receive), send)
        finally:
            self._uploads[tenant] -= 1
            self._uploads += Counter()  # without those at 0

    def _no_room(self, tenant: str) -> str | None:
        limits = self._limits
        if self._uploads.total() >= limits.max_uploads:
            return f"{limits.max_uploads} files are being uploaded; upload this one later"
        if tenant and self._uploads[tenant] >= limits.max_tenant_uploads:
            return f"{limits.max_tenant_uploads} files of {tenant} are being uploaded; upload this one later"
        return None

    def _hurried(self, receive: Receive) -> Receive:
        """Returns `receive` of an upload, which raises HTTPException 413 for a long body and 408 for a slow one."""
        limits, counted = self._limits, _counted(receive, self._limits.max_file_bytes)
        clock = asyncio.get_running_loop().time
        until, is_whole = clock() + limits.upload_s, False

        async def receive_piece() -> MutableMapping[str, Any]:
            nonlocal is_whole
            if is_whole:  # what follows is the end of the connection
                return await counted()
            left_s = until - clock()
            try:
                async with asyncio.timeout(min(limits.upload_pause_s, left_s)):
                    message = await counted()
            except TimeoutError as error:
                is_paused = limits.upload_pause_s < left_s
                why = (
                    f"made no progress for {limits.upload_pause_s:g} s" if is_paused else f"takes more than {limits.upload_s:g} s"
                )
                raise HTTPException(408, f"the upload {why}") from error
            is_whole = not message.get("more_body", False)
            return message

        return receive_piece


def _counted(receive: Receive, max_bytes: int) -> Receive:
    """Returns `receive`, which raises HTTPException 413 after `max_bytes`."""
    num_bytes = 0

    async def counting_receive() -> MutableMapping[str, Any]:
        nonlocal num_bytes
        message: Message = await receive()
        num_bytes += len(message.get("body", b""))
        if num_bytes > max_bytes:
            raise HTTPException(413, f"the request body has more than {max_bytes} bytes; send a shorter one")
        return message

    return counting_receive


async def read_body(request: Request, max_bytes: int) -> bytes:
    """Returns the body. Raises ApiError 413 beyond `max_bytes`."""
    body = bytearray()
    async for piece in request.stream():
        body += piece
        if len(body) > max_bytes:
            raise ApiError(413, f"the body is longer than {max_bytes} bytes", code="request_too_large")
    return bytes(body)


def decode_body(decode: Callable[[bytes], T], body: bytes, name: str) -> T:
    """Returns the decoded body. Raises ApiError 400 that says the body is not `name`."""
    try:
        return decode(body)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:  # the latter: a string that is not UTF-8
        raise ApiError(400, f"the body is not {name}: {error}") from error
