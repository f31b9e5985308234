"""What the pods of a group say when they meet, and the connection that carries it.

    leader: Challenge -> pod: Join with its proof -> leader: Welcome with its own -> Start, Stop, Serve one way
                                                                        -> Ready, Failed, Leaving the other; Ping both ways

Both sides prove the service's token over both nonces before anything else is believed. A frame is four bytes of length and
msgpack. Either side is lost when it is silent for `silence_s`: a node that vanishes sends no reset.
Who says what when is in `rendezvous`.
"""

import asyncio
import hashlib
import hmac
from dataclasses import dataclass

import msgspec

from phalanx_api.wire.leader import MemoryAccount

VERSION = 1
MAX_FRAME_BYTES = 1 << 16


class Challenge(msgspec.Struct, frozen=True, array_like=True, tag="challenge"):
    """First frame of the leader."""

    version: int
    nonce: bytes


class Join(msgspec.Struct, frozen=True, array_like=True, tag="join"):
    """A pod names itself, proves the token and asks for the leader's proof."""

    version: int
    pod: int
    num_pods: int
    nonce: bytes
    proof: bytes


class Welcome(msgspec.Struct, frozen=True, array_like=True, tag="welcome"):
    """The leader's proof; or, with a reason, why the pod is turned away."""

    proof: bytes
    refused: str = ""


class Start(msgspec.Struct, frozen=True, array_like=True, tag="start"):
    """Start the ranks of this incarnation. The key between ranks comes from the token and `nonce`: see `rank_key`.

    without_draft: why nothing drafts in it, where something failed before.
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
    """All ranks of this pod have loaded; where their memory goes."""

    incarnation: int
    memory: list[MemoryAccount] = []


class Failed(msgspec.Struct, frozen=True, array_like=True, tag="failed"):
    """Ranks of this pod ended. `is_draft`: what drafts failed."""

    incarnation: int
    why: str
    is_echo: bool
    is_draft: bool = False


class Leaving(msgspec.Struct, frozen=True, array_like=True, tag="leaving"):
    """This pod was told to end, and waits for Stop: the group's open streams need its ranks until then."""

    why: str


class Ping(msgspec.Struct, frozen=True, array_like=True, tag="ping"):
    """I am here."""


Frame = Challenge | Join | Welcome | Start | Serve | Stop | Ready | Failed | Leaving | Ping
Command = Start | Serve | Stop
_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Frame).decode


class Refused(Exception):
    """The other side does not know the token, speaks another version, or is no pod of this group."""


@dataclass(frozen=True, slots=True)
class Timing:
    """How often each side speaks, and after what silence the other takes it for lost. Seconds."""

    ping_s: float = 2.0
    silence_s: float = 10.0
    first_retry_s: float = 0.2
    max_retry_s: float = 5.0


DEFAULT_TIMING = Timing()


def prove(token: str, role: str, *parts: bytes) -> bytes:
    """What only a holder of the token can say in this role about these nonces."""
    return hmac.digest(token.encode(), msgspec.msgpack.encode([role, *parts]), hashlib.sha256)


def group_token(service_token: str, group_key: str) -> str:
    """What the pods of one StatefulSet prove to one another: pods of another one of that name have another key. Without a key the
    service's token."""
    return prove(service_token, "group", group_key.encode()).hex() if group_key else service_token


def rank_key(token: str, incarnation: int, nonce: bytes) -> str:
    """The key that ranks of one incarnation prove to one another, in hex. A rank left over from an earlier one has another."""
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
        """Our address as the other side reached it."""
        return str(self._writer.get_extra_info("sockname")[0])

    def send(self, frame: Frame) -> None:
        """Queues a frame; on a lost connection it goes nowhere, and `receive` tells."""
        body = _encode(frame)
        self._writer.write(len(body).to_bytes(4, "big") + body)

    async def receive(self) -> Frame:
        """The next frame that is no Ping. Raises ConnectionError when the other side is lost, silent or talks nonsense."""
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
        """Says Ping for ever."""
        while True:
            await asyncio.sleep(self._timing.ping_s)
            self.send(Ping())

    def close(self) -> None:
        """Ends the connection without waiting for the other side."""
        self._writer.transport.abort()
