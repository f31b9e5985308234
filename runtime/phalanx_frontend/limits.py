"""Bounds on what one request may cost the door before any backend sees it."""

from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from starlette.exceptions import HTTPException
from starlette.types import ASGIApp, Message, Receive, Scope, Send

IDLE_CONNECTION_S = 75
"""For how long a connection without a request is kept: longer than clients and proxies keep theirs (httpx 5 s, aiohttp 15 s, load
balancers 60 s), so that it is they who close it. One that the server closed while a POST was under way cannot be told from a lost
one, and nobody repeats a POST."""


@dataclass(frozen=True, slots=True)
class Limits:
    """`max_body_bytes` of a request; `max_stops` stop strings of up to `max_stop_chars` each, searched at every token;
    `max_choices` of one answer, over all its prompts: each is a request of its own in the engine.

    Too low refuses honest clients; too high lets one client hold the door's memory and processor.
    """

    max_body_bytes: int = 32 * 1024 * 1024
    max_stops: int = 64
    max_stop_chars: int = 1024
    max_choices: int = 1024


class BodyLimit:
    """ASGI middleware: reading more than `max_bytes` of a body raises 413 where it is read."""

    def __init__(self, app: ASGIApp, max_bytes: int) -> None:
        self._app = app
        self._max_bytes = max_bytes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Serves the request with a counted body."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        taken = 0

        async def counted() -> MutableMapping[str, Any]:
            nonlocal taken
            message: Message = await receive()
            taken += len(message.get("body", b""))
            if taken > self._max_bytes:
                raise HTTPException(413, f"the request body has more than {self._max_bytes} bytes")
            return message

        await self._app(scope, counted, send)
