"""What routers say to one another: copies of their journals go to one peer, and anyone may be asked for a stream.

    Greeting -> Changes, every 20 ms in which something changed        to the peer, for as long as both live
    Greeting -> Wanted -> Told                                         to all, when a client resumes what is not here

Frames of one WebSocket at `PEER_PATH` of a router's HTTP port, as msgpack, behind the service token. Arrays on the wire: fields
are added at the end and with a default.
"""

import msgspec

from phalanx_api import wire

PEER_PATH = "/phalanx/peer"


class Copy(msgspec.Struct, frozen=True, array_like=True):
    """All that is needed to go on with a stream: its request with the tokens so far, and why it ended, if it did.

    `model_hash`: of the weights that drew them. `deaths`: groups that died while they computed it.
    """

    request: wire.Request
    model_hash: str = ""
    finish: wire.FinishReason | None = None
    deaths: int = 0


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="greeting"):
    """First frame of who opened the connection, who speaks the versions from `oldest_version` (0: no other) to `version`."""

    router: str
    instance: str
    version: int = 1
    oldest_version: int = 0


class Ended(msgspec.Struct, frozen=True, array_like=True):
    """A stream is over; without a reason nobody may resume it when it is `forgotten`."""

    number: int
    finish: wire.FinishReason | None = None
    forgotten: bool = False


class Changes(msgspec.Struct, frozen=True, array_like=True, tag="changes"):
    """What became of journals since the last frame, in this order: new ones, tokens, ends. The sender numbers its streams.

    `numbers`, `counts` are parallel: so many of `tokens` belong to that stream.
    """

    begun: list[tuple[int, Copy]]
    numbers: list[int]
    counts: list[int]
    tokens: list[int]
    ended: list[Ended]


class Wanted(msgspec.Struct, frozen=True, array_like=True, tag="wanted"):
    """Asks for the streams of these request ids."""

    ids: list[str]


class Told(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """Those of them that are known."""

    copies: list[Copy]


encode = msgspec.msgpack.Encoder().encode
"""Bytes of any frame."""
decode = msgspec.msgpack.Decoder(Greeting | Changes | Wanted | Told).decode
"""A frame that a router sent. Raises msgspec.DecodeError."""
decode_copy = msgspec.msgpack.Decoder(Copy).decode
"""A copy that was encoded alone."""
