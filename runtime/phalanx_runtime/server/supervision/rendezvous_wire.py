"""Frames and connection of the rendezvous between the pods of a group.

    leader: Challenge -> pod: Join with proof -> leader: Welcome with proof -> Start, Stop, Serve one way
                                                                        -> Ready, Failed, Leaving the other; Ping both ways

Each side proves the service's token over both nonces before it accepts any other frame. A frame is a four-byte big-endian length
and msgpack. A side that sends nothing for `silence_s` counts as lost: a node that fails sends no TCP reset.
"""

import asyncio
import hashlib
import hmac
from dataclasses import dataclass

import msgspec

from phalanx_api.wire.leader import MemoryAccount

MAX_FRAME_BYTES = 1 << 16


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """First frame of the leader."""

    version: int
    nonce: bytes


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join", kw_only=True):
    """Names the pod, proves the token and requests the leader's proof."""

    version: int
    pod: int
    num_pods: int
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The leader's proof, or in `refused` the reason for a rejection."""

    proof: bytes
    refused: str = ""


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Start the ranks of this incarnation. `rank_key` derives the key between ranks from the token and `nonce`.

    without_draft: reason for running without speculation, after an earlier draft failure.
    """

    incarnation: int
    hosts: list[str]
    nonce: bytes
    without_draft: str = ""


class Serve(msgspec.Struct, frozen=True, array_like=True, tag="serve"):
    """All ranks of all pods are ready."""

    incarnation: int


class Stop(msgspec.Struct, frozen=True, array_like=True, tag="stop"):
    """Kill the ranks."""

    incarnation: int
    why: str


class Ready(msgspec.Struct, frozen=True, array_like=True, tag="ready"):
    """All ranks of this pod have loaded. `memory`: one account per rank."""

    incarnation: int
    memory: list[MemoryAccount] = []


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Ranks of this pod exited. `is_draft`: a draft failure caused the exit."""

    incarnation: int
    why: str
    is_echo: bool
    is_draft: bool = False


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """This pod received SIGTERM and waits for Stop: the group's open streams need its ranks until then."""

    why: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """Keeps the connection alive."""


Frame = Challenge | Join | Welcome | Start | Serve | Stop | Ready | Failed | Leaving | Ping
Command = Start | Serve | Stop
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode


class JoinRefused(Exception):
    """The other side does not know the token, uses another protocol version, or is no pod of this group."""


@dataclass(frozen=True, slots=True)
class Timing:
    """Ping interval, silence after which the other side counts as lost, and bounds of the reconnect back-off, in seconds."""

    ping_s: float = 2.0
    silence_s: float = 10.0
    first_retry_s: float = 0.2
    max_retry_s: float = 5.0


DEFAULT_TIMING = Timing()


def prove(token: str, role: str, *parts: bytes) -> bytes:
    """HMAC-SHA256 of `role` and `parts` (the nonces) under the token."""
    return hmac.digest(token.encode(), msgspec.msgpack.encode([role, *parts]), hashlib.sha256)


def group_token(service_token: str, group_key: str) -> str:
    """Token that the pods of one StatefulSet share; without `group_key` it is the service's token.

    Pods of an earlier StatefulSet with the same name have another key."""
    return prove(service_token, "group", group_key.encode()).hex() if group_key else service_token


def rank_key(token: str, incarnation: int, nonce: bytes) -> str:
    """Hex key that ranks of one incarnation prove to one another. A process of an earlier incarnation has another key."""
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
    def own_host(self) -> str:
        """Own address as the other side reached it."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, frame: Frame) -> None:
        """Queues a frame. On a lost connection the frame is dropped and `receive` raises."""
        body = _encode(frame)
        self._writer.write(len(body).to_bytes(4, "big") + body)

    async def receive(self) -> Frame:
        """Returns the next frame except Ping. Raises ConnectionError when the other side is lost, silent or sends an invalid
        frame."""
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
        """Sends Ping every `ping_s` until cancelled."""
        while True:
            await asyncio.sleep(self._timing.ping_s)
            self.send(Ping())

    def close(self) -> None:
        """Ends the connection without waiting for the other side."""
        self._writer.transport.abort()
