"""Bounds on the cost of one request."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

IDLE_CONNECTION_S = 75
"""Keep-alive timeout, longer than that of clients and proxies (at most 60 s): if the server closes a connection, a client cannot
safely retry its POST."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request. Higher values let one client use more memory and CPU."""

    max_body_bytes: int = 32 * 1024 * 1024
    max_file_bytes: int = 200 * 1024 * 1024  # of POST /v1/files, as OpenAI's
    max_stops: int = 64  # stop strings; each is searched at every token
    max_stop_chars: int = 1024  # per stop string
    max_choices: int = 1024  # over all prompts
    max_inputs: int = 2048  # of an embeddings request, as OpenAI's
    max_concurrent_inputs: int = 64  # of them that one request computes at once


FILES_PATH = "/v1/files"


class BodyLimitMiddleware:
    """ASGI middleware that raises 413 for a body above the limit of its path."""

    def __init__(self, app: ASGIApp, limits: Limits) -> None:
        self._app = app
        self._limits = limits

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        num_bytes = 0
        max_bytes = self._limits.max_file_bytes if scope["path"] == FILES_PATH else self._limits.max_body_bytes

        async def counting_receive() -> MutableMapping[str, Any]:
            nonlocal num_bytes
            message: Message = await receive()
            num_bytes += len(message.get("body", b""))
            if num_bytes > max_bytes:
                raise HTTPException(413, f"the request body has more than {max_bytes} bytes; send a shorter one")
            return message

        await self._app(scope, counting_receive, send)
