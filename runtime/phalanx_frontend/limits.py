"""Bounds on the cost of one request at the API server, before a backend receives it."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

IDLE_CONNECTION_S = 75
"""Keep-alive timeout: longer than that of clients and proxies (httpx 5 s, aiohttp 15 s, load balancers 60 s), so that they close
the connection. If the server closes it while a POST is under way, the client sees a lost connection and cannot safely retry."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Limits of a request. Too low refuses honest clients; too high lets one client take the server's memory and CPU."""

    max_body_bytes: int = 32 * 1024 * 1024
    max_stops: int = 64  # stop strings; each is searched at every token
    max_stop_chars: int = 1024  # per stop string
    max_choices: int = 1024  # over all prompts of the request; each choice is a request in the engine


class BodyLimitMiddleware:
    """ASGI middleware that raises 413 when the application reads more than `max_bytes` of a body."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request and counts the bytes of its body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        taken = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal taken
            message: Message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                raise HTTPException(413, f"the request body has more than {self._max_bytes} bytes; send a shorter one")
            return message

        await self._app(scope, counted, send)
