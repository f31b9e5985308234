"""Frames of the rendezvous: a four-byte big-endian length and msgpack.

    handshake       leader: Challenge -> pod: Join with proof -> leader: Welcome with proof
    leader -> pod   Start, Stop, Serve, FetchAdapter, Ping
    pod -> leader   Ready, Failed, Leaving, Devices, AdapterFetched, Ping

Each side proves the group's token over both nonces. A node that fails sends no TCP reset: silence counts as a loss.
"""

import asyncio
import hashlib
import hmac
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import msgspec

from phalanx_api.wire.adapters import DeclaredAdapter
from phalanx_api.wire.leader import NO_POWER, DevicePower, DeviceProblem, MemoryAccount
from phalanx_frontend.tls import peer_role

MAX_FRAME_BYTES = 1 << 16


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """First frame of the leader."""

    version: int
    nonce: bytes


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join", kw_only=True):
    """The pod's proof."""

    version: int
    pod: int
    num_pods: int
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The leader's proof, or a rejection."""

    proof: bytes
    refused: str = ""
    """Reason of a refusal; empty otherwise."""


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Start the ranks."""

    incarnation: int
    hosts: list[str]
    nonce: bytes
    """Input of `rank_key`."""
    without_draft: str = ""
    """Reason to omit the draft."""
    token_id: str = ""
    """`token_id` of the token in `rank_key`: pods read a rotated token at different times."""


class Serve(msgspec.Struct, frozen=True, array_like=True, tag="serve"):
    """All ranks are ready."""

    incarnation: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Kill the ranks."""

    incarnation: int
    why: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """The pod's ranks have loaded."""

    incarnation: int
    memory: list[MemoryAccount] = []
    """One account per rank."""


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """The pod's ranks exited."""

    incarnation: int
    why: str
    is_echo: bool
    """Each only lost a peer."""
    is_draft: bool = False
    """A draft failed."""


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """The pod received SIGTERM; its ranks continue until Stop."""

    why: str


class Devices(msgspec.Struct, frozen=True, array_like=True, tag="devices"):
    """Present problems of the pod's devices, their power and energy."""

    problems: list[DeviceProblem]
    power: DevicePower = NO_POWER
    energy_j: float | None = None  # used since the pod's start; null unless all of them count it


class FetchAdapter(msgspec.Struct, frozen=True, array_like=True, tag="fetch_adapter"):
    """Download an adapter; the response is `AdapterFetched`."""

    number: int
    adapter: DeclaredAdapter


class AdapterFetched(msgspec.Struct, frozen=True, array_like=True, tag="adapter_fetched"):
    """The pod has the adapter, in the same folder as the leader."""

    number: int
    why: str = ""
    """It has not; empty: it has."""


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Keeps the connection alive."""


Command = Start | Serve | Stop | FetchAdapter
Report = Ready | Failed | Leaving | Devices | AdapterFetched
Frame = Challenge | Join | Welcome | Command | Report | Ping
encode_frame = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode


GroupTokens = Callable[[], Sequence[str]]
"""Returns the tokens that pods accept from one another; the first is the one to send."""


class JoinRefused(Exception):
    """Wrong token, version or group."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Intervals and timeouts in seconds."""

    ping_s: float = 2.0
    silence_s: float = 10.0
    """Longest silence of the other side."""
    first_retry_s: float = 0.2
    """Backoff of reconnects, doubled each time."""
    max_retry_s: float = 5.0


DEFAULT_TIMING = Timing()


def prove(token: str, role: str, *parts: bytes) -> bytes:
    """HMAC-SHA256 of `role` and the nonces."""
    return hmac.digest(token.encode(), msgspec.msgpack.encode([role, *parts]), hashlib.sha256)


def group_token(service_token: str, group_key: str) -> str:
    """Token of one StatefulSet, different from that of an earlier one."""
    return prove(service_token, "group", group_key.encode()).hex() if group_key else service_token


def token_id(token: str) -> str:
    """Hex digits that name a token, which does not follow from them."""
    return prove(token, "id")[:8].hex()


def find_token(tokens: Sequence[str], id: str) -> str | None:
    """The token with this id; the first for an empty one."""
    return next((token for token in tokens if id in ("", token_id(token))), None)


def rank_key(token: str, incarnation: int, nonce: bytes) -> str:
    """Hex key of the ranks of one incarnation."""
    return prove(token, f"ranks {incarnation}", nonce).hex()


class Connection:
    """Frames over one TCP connection."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, timing: Timing) -> None:
        self._reader = reader
        self._writer = writer
        self._timing = timing

    @property
    def peer_host(self) -> str:
        """Address of the other side."""
        return str(self._writer.get_extra_info("peername")[0])

    @property
    def peer_role(self) -> str:
        """Role in the certificate of the other side; empty without one."""
        return peer_role(self._writer.get_extra_info("ssl_object"))

    @property
    def own_host(self) -> str:
        """Own address, as reached by the other side."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, frame: Frame) -> None:
        """Queues a frame."""
        body = encode_frame(frame)
        self._writer.write(len(body).to_bytes(4, "big") + body)

    async def receive(self) -> Frame:
        """The next frame except Ping. Raises ConnectionError on loss or an invalid frame."""
        while True:
            try:
                async with asyncio.timeout(self._timing.silence_s):
                    size = int.from_bytes(await self._reader.readexactly(4), "big")
                    if size > MAX_FRAME_BYTES:
                        raise ConnectionError(f"a frame of {size} bytes, at most {MAX_FRAME_BYTES} are expected")
                    frame: Frame = _decode(await self._reader.readexactly(size))
            except TimeoutError as error:
                raise ConnectionError(f"silent for {self._timing.silence_s:g} s") from error
            except (asyncio.IncompleteReadError, ConnectionResetError, BrokenPipeError) as error:
                raise ConnectionError("the connection was closed") from error
            except msgspec.DecodeError as error:
                raise ConnectionError(f"not a frame of the rendezvous: {error}") from error
            if not isinstance(frame, Ping):
                return frame

    async def keep_alive(self) -> None:
        """Sends Pings until cancelled."""
        while True:
            await asyncio.sleep(self._timing.ping_s)
            self.send(Ping())

    def close(self) -> None:
        """Ends the connection."""
        self._writer.transport.abort()
