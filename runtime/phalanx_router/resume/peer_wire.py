"""Frames between routers: journal copies to one peer, queries to all.

    Greeting -> JournalChanges ...                     every 20 ms in which a journal changed or a response was stored
    Greeting -> JournalQuery -> JournalAnswer          when a client resumes an unknown stream
    Greeting -> ConversationQuery -> ConversationAnswer   when a client continues, reads, ends or deletes a stored response
    Greeting -> ConversationHandOver -> ConversationAnswer   when a router stops that has responses of the background

Msgpack on one WebSocket, authenticated with the service token. Structs are arrays: new fields go at the end and have a default.
"""

import msgspec

from phalanx_api import wire
from phalanx_api.summary import CacheScope
from phalanx_api.wire import PROTOCOL_VERSION

PEER_PATH = "/phalanx/peer"


class JournalCopy(msgspec.Struct, frozen=True, array_like=True):
    """Journal of a stream, complete enough to continue it."""

    request: wire.Request  # with the tokens delivered so far
    model_hash: str = ""  # weights that computed them
    finish: wire.FinishReason | None = None  # of an ended stream
    deaths: int = 0  # groups that died while they computed the stream


class JournalHistory(msgspec.Struct, frozen=True, array_like=True):
    """Groups that a stream has lost or left, in place of those in its copy."""

    epoch: int
    deaths: int
    is_alone: bool


class Greeting(msgspec.Struct, frozen=True, array_like=True, tag="greeting"):
    """First frame of the router that opened the connection."""

    router: str
    instance: str
    version: int = PROTOCOL_VERSION


class JournalEnd(msgspec.Struct, frozen=True, array_like=True):
    """End of a stream."""

    number: int
    finish: wire.FinishReason | None = None
    is_forgotten: bool = False  # cannot be resumed


class SharedResponse(msgspec.Struct, frozen=True, array_like=True, kw_only=True):
    """A stored response, for the response caches of the other routers."""

    key: bytes  # `equality.response_key`
    tokens: list[int]
    finish: wire.FinishReason
    cached_tokens: int
    seconds: float
    revision: str
    scope: CacheScope
    age_s: float
    hops: int  # routers that still lack it
    conversation: bytes = b""  # of its question; empty without one
    question: str = ""
    vector: bytes = b""


class JournalChanges(msgspec.Struct, frozen=True, array_like=True, tag="changes", kw_only=True):
    """Changes since the last frame. The sender numbers its streams."""

    opened: list[tuple[int, JournalCopy]]
    numbers: list[int]
    counts: list[int]  # the next `counts[i]` of `tokens` belong to stream `numbers[i]`
    tokens: list[int]
    closed: list[JournalEnd]
    responses: list[SharedResponse] = []
    replayed: list[tuple[int, JournalHistory]] = []  # by number; a router that does not know the field keeps those of the copy


class JournalQuery(msgspec.Struct, frozen=True, array_like=True, tag="wanted"):
    """Queries streams by request id."""

    ids: list[str]


class JournalAnswer(msgspec.Struct, frozen=True, array_like=True, tag="told"):
    """Journal copies that a peer holds."""

    copies: list[JournalCopy]


class ConversationQuery(msgspec.Struct, frozen=True, array_like=True, tag="conversation"):
    """Queries a response of a tenant and those that it continues, deletes it, or ends it if the peer computes it."""

    tenant: str
    id: str
    is_deletion: bool = False
    is_alone: bool = False  # without those that it continues
    is_cancellation: bool = False
    next_event: int | None = None  # of a running response: its events from this number on alone


class ConversationResponse(msgspec.Struct, frozen=True, array_like=True):
    """A response of the Responses API, as JSON."""

    id: str
    document: bytes
    input_items: bytes
    previous: str | None = None
    events: tuple[bytes, ...] = ()  # of a stream in the background
    is_running: bool = False  # in the background
    first_event: int = 0  # number of the first of `events`


class ConversationAnswer(msgspec.Struct, frozen=True, array_like=True, tag="conversation_answer"):
    """Responses that a peer has, the newest first; the deleted one."""

    responses: list[ConversationResponse]


class ConversationHandOver(msgspec.Struct, frozen=True, array_like=True, tag="conversation_hand_over"):
    """Responses for the peer to store. Its answer, without any, says that it has."""

    responses: list[tuple[str, ConversationResponse]]  # each with its tenant


Frame = Greeting | JournalChanges | JournalQuery | JournalAnswer | ConversationQuery | ConversationAnswer | ConversationHandOver
encode = msgspec.msgpack.Encoder().encode
decode = msgspec.msgpack.Decoder(Frame).decode
"""Raises msgspec.DecodeError."""
decode_copy = msgspec.msgpack.Decoder(JournalCopy).decode
