"""Connections of uvicorn: HTTP with bounds on the head of a request, its line, headers and trailers, and binary WebSockets.

uvicorn has no such bounds: it buffers a head until it is complete, before the API key is checked.
"""

import asyncio
from typing import Any

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect
from uvicorn.config import WS_PROTOCOLS
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol

MAX_HEAD_BYTES = 64 << 10
IDLE_CONNECTION_S = 75
"""Keep-alive timeout, longer than that of clients and proxies (at most 60 s): if the server closes a connection, a client cannot
safely retry its POST."""


class BoundedHttpProtocol(HttpToolsProtocol):
    """Closes a connection on which `MAX_HEAD_BYTES` arrive without a piece of a body or the end of a request.

    The answer is 431, unless another response is on its way. It also closes a connection whose next head takes longer than it may
    be idle.
    """

    _num_bytes = 0
    _waiting: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Waits for the first head."""
        super().connection_made(transport)
        self._wait_for_head()

    def connection_lost(self, exc: Exception | None) -> None:
        """Ends the wait."""
        self._end_wait()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        """Parses data."""
        self._num_bytes += len(data)
        super().data_received(data)
        if self._num_bytes > MAX_HEAD_BYTES and not self.transport.is_closing():
            self._refuse()

    def on_message_begin(self) -> None:
        """Waits for the rest of a head."""
        super().on_message_begin()
        self._wait_for_head()

    def on_headers_complete(self) -> None:
        """Ends the wait for the head."""
        self._end_wait()
        super().on_headers_complete()

    def on_body(self, body: bytes) -> None:
        """Counts bytes from here: bodies have a bound of their own."""
        self._num_bytes = 0
        super().on_body(body)

    def on_message_complete(self) -> None:
        """Counts the bytes of the next head from here."""
        self._num_bytes = 0
        super().on_message_complete()

    @property
    def _is_answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    def _wait_for_head(self) -> None:
        self._end_wait()
        self._waiting = self.loop.call_later(self.timeout_keep_alive, self._wait_ended)

    def _end_wait(self) -> None:
        if self._waiting is not None:
            self._waiting.cancel()
            self._waiting = None

    def _wait_ended(self) -> None:
        if self._is_answering:  # a pipelined request, whose head may wait for this answer
            self._wait_for_head()
        else:
            self.transport.close()

    def _refuse(self) -> None:
        if not self._is_answering:
            why = f"the request line and headers have more than {MAX_HEAD_BYTES} bytes\n".encode()
            headers = b"content-type: text/plain; charset=utf-8\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(why)
            self.transport.write(STATUS_LINE[431] + headers + why)
        self.transport.close()


async def receive_binary(websocket: WebSocket) -> bytes:
    """Returns the next message. Raises WebSocketDisconnect and msgspec.DecodeError."""
    message = await websocket.receive()
    if message["type"] == "websocket.disconnect":
        raise WebSocketDisconnect(message["code"], message.get("reason"))
    data = message.get("bytes")
    if not isinstance(data, bytes):
        raise msgspec.DecodeError("a text message; send binary messages only")
    return data


CONNECTION_OPTIONS: dict[str, Any] = {
    "http": BoundedHttpProtocol,
    "ws": "websockets-sansio" if "websockets-sansio" in WS_PROTOCOLS else "auto",
    "timeout_keep_alive": IDLE_CONNECTION_S,
    "log_config": None,
    "access_log": False,
}
"""Options of `uvicorn.Config` for the servers of all programs."""
