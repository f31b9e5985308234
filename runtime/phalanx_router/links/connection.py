"""WebSocket connection to a leader: dialing, handshake, close reasons, receiver of a request's frames."""

import secrets
from collections.abc import Awaitable, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

import msgspec
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed, InvalidStatus
from websockets.frames import CloseCode

from phalanx_api import labels, wire
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_frontend.tls import Certificate, client_arguments
from phalanx_router.links.endpoints import Endpoint

MAX_FRAME_BYTES = 1 << 28
"""A tokenizer with 250,000 entries has 30 MB."""


class Connection(Protocol):
    """Open connection. Methods raise websockets' ConnectionClosed after its end."""

    async def send(self, message: bytes, /) -> None:
        """Sends one message, when the buffer has space."""
        ...

    async def recv(self, decode: Literal[False]) -> bytes:
        """Returns the next message."""
        ...

    async def ping(self) -> Awaitable[float]:
        """Sends a ping. Returns a future of the seconds until the pong, which the peer sends at once."""
        ...


class Dial(Protocol):
    """Opens a connection to a leader."""

    def __call__(
        self, address: str, token: str, timeout_s: float, certificate: Certificate | None, /
    ) -> AbstractAsyncContextManager[Connection]:
        """Connects to `host:port`, by mutual TLS with a certificate. Raises OSError or a handshake error."""
        ...


def dial(
    address: str, token: str, timeout_s: float, certificate: Certificate | None = None, /
) -> AbstractAsyncContextManager[Connection]:
    """Opens a WebSocket to the leader's link endpoint, which proves the role of a group if `certificate` is given."""
    return open_websocket(
        f"{address}{wire.LINK_PATH}",
        token,
        client_arguments(certificate, labels.GROUP_ROLE),
        open_timeout=timeout_s,
        ping_interval=None,  # `LeaderLink` checks for frames
        close_timeout=1,
        max_size=MAX_FRAME_BYTES,
    )


def open_websocket(place: str, token: str, tls: Mapping[str, Any], **options: Any) -> connect:
    """Opens a WebSocket to `host:port/path` with the service token. tls: of `client_arguments`."""
    headers = {"Authorization": f"Bearer {token}"}
    address = f"wss://{place}" if tls else f"ws://{place}"
    return connect(address, **tls, **options, additional_headers=headers, proxy=None, compression=None)


def certificate_for(endpoint: Endpoint, certificate: Certificate | None) -> Certificate | None:
    """Returns the certificate to prove to an endpoint; null if it has no TLS. Raises OSError if this router has none."""
    if endpoint.is_internal and certificate is None:
        raise ConnectionRefusedError(f"{endpoint.address} needs a certificate, which this router does not have")
    return certificate if endpoint.is_internal else None


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSettings:
    """Settings of links."""

    token: ServiceToken
    router: str  # name of this router in the handshake
    heartbeat_timeout_s: float = 3.0
    open_timeout_s: float = 5.0
    assets_timeout_s: float = 30.0  # heartbeat timeout while assets are transferred
    first_retry_s: float = 0.1
    last_retry_s: float = 1.0
    instance: str = field(default_factory=lambda: secrets.token_hex(8))  # differs with each start of the router
    dial: Dial = dial
    certificate: Certificate | None = None  # of this router, for endpoints with mutual TLS


NORMAL_CLOSE_CODES = frozenset({CloseCode.NORMAL_CLOSURE, CloseCode.GOING_AWAY, CloseCode.SERVICE_RESTART})


class LinkBroken(Exception):
    """The leader violated the protocol."""


def is_normal_close(error: Exception) -> bool:
    """Whether the leader shut down normally."""
    return isinstance(error, ConnectionClosed) and error.rcvd is not None and error.rcvd.code in NORMAL_CLOSE_CODES


def explain_close(error: Exception) -> str:
    """Why the link ended or could not be opened."""
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
    """Performs the handshake on each connection to one leader."""

    def __init__(self, router: str, instance: str) -> None:
        self.version_error = ""
        self._router = router
        self._instance = instance

    async def run(self, connection: Connection) -> wire.Welcome:
        """Returns the leader's first frame. Raises LinkBroken, ConnectionClosed, msgspec.DecodeError."""
        await connection.send(
            wire.encode(wire.Hello(wire.PROTOCOL_VERSION, self._router, self._instance, reads_adapter_changes=True))
        )
        try:
            welcome = wire.decode_from_leader(await connection.recv(decode=False))
        except ConnectionClosed as error:
            if error.rcvd is not None and error.rcvd.code == wire.CLOSE_WRONG_VERSION:
                self.version_error = f"{explain_close(error)}; this router supports {wire.PROTOCOL_VERSION}"
                raise LinkBroken(self.version_error) from error
            raise
        if not isinstance(welcome, wire.Welcome):
            raise LinkBroken(f"the leader sent {type(welcome).__name__} before Welcome")
        if welcome.protocol_version != wire.PROTOCOL_VERSION:
            versions = f"{welcome.protocol_version}, this router {wire.PROTOCOL_VERSION}"
            self.version_error = f"the leader supports link version {versions}"
            raise LinkBroken(self.version_error)
        self.version_error = ""
        return welcome


class Sink(Protocol):
    """Receives a group's frames about one request. Must not block."""

    def token(self, epoch: int, index: int, token: int, detail: wire.TokenDetail | None = None) -> None:
        """Delivers one token."""
        ...

    def prompt_details(self, details: wire.PromptDetails) -> None:
        """Details of prompt tokens."""
        ...

    def cached(self, frame: wire.Cached) -> None:
        """Number of cached prompt tokens."""
        ...

    def finished(self, end: wire.Finished) -> None:
        """The request finished."""
        ...

    def refused(self, refused: wire.Refused) -> None:
        """The group rejected the request."""
        ...

    def lost(self, epoch: int, why: str, is_drain: bool = False, cause: wire.EndCause = "") -> None:
        """The group no longer runs the request. `is_drain`: it drained."""
        ...


class FrameDecoder:
    """Decodes the frames of one connection. An idle group repeats its last load report, which is decoded once."""

    def __init__(self) -> None:
        self._message = b""
        self._load: wire.Load | None = None

    def decode(self, message: bytes) -> wire.FromLeader:
        """Returns the frame of a message. Raises msgspec.DecodeError."""
        if self._load is not None and message == self._message:
            return self._load
        frame: wire.FromLeader = wire.decode_from_leader(message)
        if isinstance(frame, wire.Load):
            self._message, self._load = message, frame
        return frame
