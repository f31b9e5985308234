"""How a router opens a connection to a leader: a WebSocket. Whoever has no network gives another."""

from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

from websockets.asyncio.client import connect

from phalanx_api import wire

MAX_FRAME_BYTES = 1 << 28
"""A tokenizer of 250,000 words has 30 MB; a frame beyond this is a mistake."""


class Connection(Protocol):
    """An open connection. Both calls raise websockets' ConnectionClosed once it has ended."""

    async def send(self, message: bytes, /) -> None:
        """Sends one message; waits while too many wait to be sent."""
        ...

    async def recv(self, decode: Literal[False]) -> bytes:
        """The next message, as bytes whatever its type."""
        ...


class Dial(Protocol):
    """Opens a connection to a leader, and closes it in the end."""

    def __call__(self, address: str, token: str, timeout_s: float, /) -> AbstractAsyncContextManager[Connection]:
        """The connection to `host:port`. Raises OSError, TimeoutError among them, or what websockets raises at a handshake."""
        ...


def dial(address: str, token: str, timeout_s: float, /) -> AbstractAsyncContextManager[Connection]:
    """A WebSocket to the leader's link."""
    return connect(
        f"ws://{address}{wire.LINK_PATH}",
        additional_headers={"Authorization": f"Bearer {token}"},
        proxy=None,
        compression=None,
        open_timeout=timeout_s,
        ping_interval=None,  # a leader speaks every second, the router's watchdog listens
        close_timeout=1,
        max_size=MAX_FRAME_BYTES,
    )
