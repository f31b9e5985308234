"""WebSocket connection from a router to a leader: dialing, handshake, close reasons, and the receiver interface of a request."""

from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

import msgspec
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode

from phalanx_api import wire

MAX_FRAME_BYTES = 1 << 28
"""A tokenizer with 250,000 entries has 30 MB; a frame over this limit is an error."""


class Connection(Protocol):
    """Open connection. Both methods raise websockets' ConnectionClosed after its end."""

    async def send(self, message: bytes, /) -> None:
        """Sends one message; waits while the send buffer is full."""
        ...

    async def recv(self, decode: Literal[False]) -> bytes:
        """Returns the next message as bytes."""
        ...


class Dial(Protocol):
    """Opens a connection to a leader."""

    def __call__(self, address: str, token: str, timeout_s: float, /) -> AbstractAsyncContextManager[Connection]:
        """Returns the connection to `host:port`. Raises OSError (also TimeoutError) or a handshake error of websockets."""
        ...


def dial(address: str, token: str, timeout_s: float, /) -> AbstractAsyncContextManager[Connection]:
    """Opens a WebSocket to the leader's link endpoint."""
    return connect(
        f"ws://{address}{wire.LINK_PATH}",
        additional_headers={"Authorization": f"Bearer {token}"},
        proxy=None,
        compression=None,
        open_timeout=timeout_s,
        ping_interval=None,  # a leader sends a frame every second and the router's watchdog checks for it
        close_timeout=1,
        max_size=MAX_FRAME_BYTES,
    )


# Close reasons.

PROPER_ENDS = frozenset({CloseCode.NORMAL_CLOSURE, CloseCode.GOING_AWAY, CloseCode.SERVICE_RESTART})


class LinkBroken(Exception):
    """The link is unusable, with what the leader did wrong."""


def is_proper_end(error: Exception) -> bool:
    """Returns whether the leader closed the link in a normal server shutdown."""
    return isinstance(error, ConnectionClosed) and error.rcvd is not None and error.rcvd.code in PROPER_ENDS


def explain_end(error: Exception) -> str:
    """Returns one sentence on why the link ended or could not be opened."""
    match error:
        case InvalidStatus() if error.response.status_code in (401, 403):
            return f"the leader refused the service token (HTTP {error.response.status_code})"
        case InvalidStatus():
            return f"the leader answered HTTP {error.response.status_code}"
        case ConnectionClosed() if error.rcvd is not None:
            return f"the leader closed the link ({error.rcvd.code} {error.rcvd.reason})".replace(" )", ")")
        case ConnectionClosed():
            return "the connection broke"
        case msgspec.DecodeError():
            return f"the leader sent an invalid frame: {error}"
        case TimeoutError():
            return "the leader did not answer in time"
        case _:
            return str(error) or type(error).__name__


class Handshake:
    """Performs the handshake with one leader on each connection."""

    def __init__(self, router: str, instance: str) -> None:
        self.unknown = ""
        """Why the leader and this router have different link versions; empty if they agree or before the first handshake."""
        self._router = router
        self._instance = instance

    async def greet(self, connection: Connection) -> wire.Welcome:
        """Returns the leader's first frame. Raises LinkBroken, ConnectionClosed, msgspec.DecodeError."""
        await connection.send(wire.encode(wire.Hello(wire.PROTOCOL_VERSION, self._router, self._instance)))
        try:
            welcome = wire.decode_from_leader(await connection.recv(decode=False))
        except ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == wire.CLOSE_WRONG_VERSION:
                self.unknown = f"{explain_end(error)}; this router supports {wire.PROTOCOL_VERSION}"
                raise LinkBroken(self.unknown) from error
            raise
        if not isinstance(welcome, wire.Welcome):
            raise LinkBroken(f"the leader sent {type(welcome).__name__} before Welcome")
        if welcome.protocol_version != wire.PROTOCOL_VERSION:
            self.unknown = f"the leader supports link version {welcome.protocol_version}, this router {wire.PROTOCOL_VERSION}"
            raise LinkBroken(self.unknown)
        self.unknown = ""
        return welcome


# Receiver of the frames of one request.


class Sink(Protocol):
    """Receives a group's frames about one request. Called on the event loop; must not block."""

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """Receives one token, with log probabilities if requested."""
        ...

    def prompt_details_received(self, details: wire.PromptDetails) -> None:
        """Receives log probabilities of prompt tokens, before the first token."""
        ...

    def cached(self, found: wire.Cached) -> None:
        """Receives the number of prompt tokens found in the prefix cache, before the first token."""
        ...

    def finished(self, end: wire.Finished) -> None:
        """The request finished."""
        ...

    def refused(self, refused: wire.Refused) -> None:
        """The group rejected the request."""
        ...

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """The group no longer runs the request. `is_leave`: it drained as planned. `cause`: why the group failed, if known."""
        ...
