"""Frames between routers: journal copies go to one peer, and every router can be queried for a stream.

    Greeting -> JournalChanges, every 20 ms in which a journal changed to the peer, while both run
    Greeting -> JournalQuery -> JournalAnswer                          to all routers, when a client resumes an unknown stream

Msgpack frames on one WebSocket at `PEER_PATH` of a router's HTTP port, authenticated with the service token. Structs are arrays
on the wire: new fields go at the end and have a default.
"""

import msgspec

from phalanx_api import wire
from phalanx_api.wire import PROTOCOL_VERSION

PEER_PATH = "/phalanx/peer"


class JournalCopy(msgspec.Struct, frozen=True, array_like=True):
    """Journal of a stream, complete enough to continue it."""

    # With the tokens delivered so far.
    request: wire.Request
    # Weights that computed them.
    model_hash: str = ""
    # Set when the stream has ended.
    finish: wire.FinishReason | None = None
    # Number of groups that died while they computed the stream.
    deaths: int = 0


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="greeting"):
    """First frame of the router that opened the connection."""

    router: str
    instance: str
    version: int = PROTOCOL_VERSION


class JournalEnd(msgspec.Struct, frozen=True, array_like=True):
    """End of a stream; a `forgotten` one cannot be resumed."""

    number: int
    finish: wire.FinishReason | None = None
    forgotten: bool = False


class JournalChanges(msgspec.Struct, frozen=True, array_like=True, tag="changes", kw_only=True):
    """Changes of journals since the last frame: new journals, then tokens, then ends. The sender numbers its streams.

    `numbers` and `counts` are parallel: the next `counts[i]` of `tokens` belong to stream `numbers[i]`.
    """

    begun: list[tuple[int, JournalCopy]]
    numbers: list[int]
    counts: list[int]
    tokens: list[int]
    ended: list[JournalEnd]


class JournalQuery(msgspec.Struct, frozen=True, array_like=True, tag="wanted"):
    """Queries the streams with these request ids."""

    ids: list[str]


class JournalAnswer(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """Answer to a JournalQuery: the known copies."""

    copies: list[JournalCopy]


encode = msgspec.msgpack.Encoder().encode
"""Encodes any frame."""
decode = msgspec.msgpack.Decoder(Greeting | JournalChanges | JournalQuery | JournalAnswer).decode
"""Decodes a frame of another router. Raises msgspec.DecodeError."""
decode_copy = msgspec.msgpack.Decoder(JournalCopy).decode
"""Decodes a copy that was encoded alone."""
