"""Requests to the API server of this process, without a socket."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from starlette.types import ASGIApp, Message, Scope

from phalanx_frontend.auth.caller import Caller, with_caller

log = logging.getLogger(__name__)

Call = Callable[[str, bytes, Caller], Awaitable["LocalAnswer"]]
"""Returns the answer to a POST of a JSON body to a path."""


@dataclass(slots=True)
class LocalAnswer:
    """A whole response."""

    status: int = 500
    headers: dict[bytes, bytes] = field(default_factory=dict)
    body: bytes = b""

    @property
    def retry_after_s(self) -> float | None:
        """Seconds of Retry-After."""
        text = self.headers.get(b"retry-after", b"").decode("latin-1")
        return float(text) if text.isdecimal() else None


async def call(app: ASGIApp, path: str, body: bytes, caller: Caller) -> LocalAnswer:
    """Returns the answer. Cancelling it is a client that disconnects."""
    answer, pieces, is_sent = LocalAnswer(), list[bytes](), False
    scope: Scope = {
        "type": "http",
        "asgi": {"version": "3.0", "spec_version": "2.3"},
        "http_version": "1.1",
        "method": "POST",
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": b"",
        "root_path": "",
        "headers": [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())],
        "client": None,
        "server": None,
    }

    async def receive() -> Message:
        nonlocal is_sent
        if is_sent:
            await asyncio.Event().wait()  # the client stays connected
        is_sent = True
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(message: Message) -> None:
        if message["type"] == "http.response.start":
            answer.status, answer.headers = message["status"], dict(message["headers"])
        elif message["type"] == "http.response.body":
            pieces.append(message.get("body", b""))

    try:
        await app(with_caller(scope, caller), receive, send)
    except Exception:  # the application has sent a 500 before it raises
        log.exception("a request of this process failed", extra={"path": path})
    answer.body = b"".join(pieces)
    return answer
