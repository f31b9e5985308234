"""How a router opens a connection to a leader: a WebSocket. Whoever has no network gives another."""

from contextlib import AbstractAsyncContextManager
from typing import Literal, Protocol

import msgspec
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode

from phalanx_api import wire
from phalanx_api.wire.versions import CLOSE_WRONG_VERSION, LINK

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


# Why a link ended, and whether that was in order.

PROPER_ENDS = frozenset({CloseCode.NORMAL_CLOSURE, CloseCode.GOING_AWAY, CloseCode.SERVICE_RESTART})


class LinkBroken(Exception):
    """The link is of no use: what the leader did."""


def is_proper_end(error: Exception) -> bool:
    """Whether the leader closed the link as a server does that stops."""
    return isinstance(error, ConnectionClosed) and error.rcvd is not None and error.rcvd.code in PROPER_ENDS


def explain(error: Exception) -> str:
    """One sentence on why there is no link."""
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
            return f"the leader sent no frame of the link: {error}"
        case TimeoutError():
            return "the leader did not answer in time"
        case _:
            return str(error) or type(error).__name__


# The handshake with a leader: which version of the link is spoken, or why none is.
# A leader of the release before this one knows a single version, and closes a link whose Hello names another. So after such a
# refusal the next connection offers our oldest version, and the one after that our newest again.


class Greeter:
    """Says Hello to one leader, connection after connection."""

    def __init__(self, router: str, instance: str) -> None:
        self.unknown = ""
        """Why this leader and this router share no version; empty while they do, or nobody knows yet."""
        self._router = router
        self._instance = instance
        self._offered = LINK.newest

    async def greet(self, connection: Connection) -> wire.Welcome:
        """The leader's first frame. Raises LinkBroken, ConnectionClosed, msgspec.DecodeError."""
        await connection.send(wire.encode(wire.Hello(self._offered, self._router, self._instance, LINK.oldest)))
        try:
            welcome = wire.decode_from_leader(await connection.recv(decode=False))
        except ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == CLOSE_WRONG_VERSION:
                raise LinkBroken(self._refused(explain(error))) from error
            raise
        if not isinstance(welcome, wire.Welcome):
            raise LinkBroken(f"the leader said {type(welcome).__name__} before Welcome")
        if welcome.protocol_version > self._offered or welcome.protocol_version not in LINK:
            self.unknown = f"the leader speaks link version {welcome.protocol_version}, this router {LINK}"
            raise LinkBroken(self.unknown)
        self.unknown = ""
        return welcome

    def _refused(self, why: str) -> str:
        """What to say of a leader that refused the version that was offered; the next connection offers another."""
        if self._offered == LINK.oldest and not self.unknown:
            self.unknown = f"{why}; this router speaks {LINK}"
        self._offered = LINK.oldest if self._offered == LINK.newest else LINK.newest
        return self.unknown or why


# Who hears what a group says of one request.


class Sink(Protocol):
    """Takes what a group says of one request. Called on the event loop; never blocks."""

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """One token, with what was asked about it."""
        ...

    def prompt_told(self, told: wire.PromptDetails) -> None:
        """What was asked about tokens of the prompt, before the first token."""
        ...

    def cached(self, found: wire.Cached) -> None:
        """What was found of its prompt in the prefix cache, before the first token."""
        ...

    def finished(self, end: wire.Finished) -> None:
        """The request ended by itself."""
        ...

    def refused(self, refused: wire.Refused) -> None:
        """The request does not run there."""
        ...

    def lost(self, epoch: int, why: str, is_leave: bool = False, cause: wire.Cause = "") -> None:
        """The group no longer works on it; a leave is what a group that drained does in order. `cause` of its end, if known."""
        ...
