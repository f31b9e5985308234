"""Frames of the link between a router and a group's leader, and of the socket between the HTTP process and rank 0.

Each WebSocket message is one msgpack frame. A router sends frames of `wire.router`, `Hello` first; a leader sends frames of
`wire.leader`, `Welcome` first; both send frames of `moves`. The sender of `Submit` chooses the request's handle, unique on its
connection. A token is delivered only if its epoch is current and its index the next.

Structs are arrays on the wire: new fields go to the end, with a default (ADR 8).
"""

import msgspec

from phalanx_api import moves
from phalanx_api.wire.adapters import (
    AdapterLoaded,
    AdaptersChanged,
    DeclareAdapters,
    DeclaredAdapter,
    LoadAdapter,
    RequireAdapter,
    UnloadAdapter,
)
from phalanx_api.wire.images import (
    IMAGES_FILE,
    MAX_PIXEL_BYTES,
    MAX_TILE_EDGE,
    Image,
    ImageInput,
    image_digest,
    placeholder_numbers,
    refused_images,
    whole_tokens,
)
from phalanx_api.wire.leader import (
    CLASSIFICATION_FILE,
    EMBEDDING_FILE,
    MAX_TENANT_NAME,
    MAX_TENANTS,
    NO_POWER,
    OTHER_TENANTS,
    PARSERS_FILE,
    TEMPLATE_KWARGS_FILE,
    Activation,
    AdapterSlots,
    Adopted,
    Assets,
    Cached,
    Classification,
    DevicePower,
    DeviceProblem,
    Embedding,
    EndCause,
    Finished,
    HotPrefix,
    Load,
    PageChanges,
    ParserNames,
    PromptDetails,
    Refused,
    RefusedAdapter,
    Served,
    State,
    TenantUse,
    TokenDetail,
    Tokens,
    Welcome,
    hash_files,
    make_assets,
    with_adapters,
)
from phalanx_api.wire.router import (
    CLOSE_WRONG_VERSION,
    HTTP_WRONG_VERSION,
    PROTOCOL_VERSION,
    Abort,
    Adapter,
    Adopt,
    Disown,
    Fetch,
    FinishReason,
    Grammar,
    Hello,
    Pooling,
    Prepare,
    Request,
    Sampling,
    SendPages,
    Share,
    Submit,
)

__all__ = [
    "CLASSIFICATION_FILE",
    "CLOSE_WRONG_VERSION",
    "EMBEDDING_FILE",
    "HTTP_WRONG_VERSION",
    "IMAGES_FILE",
    "LINK_PATH",
    "MAX_PIXEL_BYTES",
    "MAX_TENANTS",
    "MAX_TENANT_NAME",
    "MAX_TILE_EDGE",
    "NO_POWER",
    "OTHER_TENANTS",
    "PARSERS_FILE",
    "PROTOCOL_VERSION",
    "TEMPLATE_KWARGS_FILE",
    "Abort",
    "Activation",
    "Adapter",
    "AdapterLoaded",
    "AdapterSlots",
    "AdaptersChanged",
    "Adopt",
    "Adopted",
    "Assets",
    "Cached",
    "Classification",
    "DeclareAdapters",
    "DeclaredAdapter",
    "DevicePower",
    "DeviceProblem",
    "Disown",
    "Embedding",
    "EndCause",
    "Fetch",
    "FinishReason",
    "Finished",
    "FromEngine",
    "FromLeader",
    "Grammar",
    "Hello",
    "HotPrefix",
    "Image",
    "ImageInput",
    "Load",
    "LoadAdapter",
    "PageChanges",
    "ParserNames",
    "Pooling",
    "Prepare",
    "PromptDetails",
    "Refused",
    "RefusedAdapter",
    "Request",
    "RequireAdapter",
    "Sampling",
    "SendPages",
    "Served",
    "Share",
    "State",
    "Submit",
    "TenantUse",
    "ToEngine",
    "ToLeader",
    "TokenDetail",
    "Tokens",
    "UnloadAdapter",
    "Welcome",
    "decode_from_engine",
    "decode_from_leader",
    "decode_to_engine",
    "decode_to_leader",
    "encode",
    "hash_files",
    "image_digest",
    "make_assets",
    "placeholder_numbers",
    "refused_images",
    "whole_tokens",
    "with_adapters",
]

LINK_PATH = "/link"
"""Path of the WebSocket on the leader's HTTP port, authenticated by `Authorization: Bearer <service token>`."""

ToLeader = (
    Hello
    | Submit
    | Abort
    | Fetch
    | SendPages
    | Adopt
    | Share
    | Disown
    | Prepare
    | moves.MoveOut
    | moves.SendPrefix
    | moves.Thaw
    | moves.Release
    | moves.Cancel
    | DeclareAdapters
    | RequireAdapter
)
FromLeader = (
    Welcome
    | Tokens
    | Refused
    | Load
    | State
    | Assets
    | PageChanges
    | Adopted
    | moves.Prepared
    | moves.Frozen
    | moves.Arrived
    | moves.MoveFailed
    | moves.RescueRequest
    | AdaptersChanged
)
ToEngine = (
    Submit
    | Abort
    | Prepare
    | LoadAdapter
    | UnloadAdapter
    | moves.MoveOut
    | moves.SendPrefix
    | moves.Thaw
    | moves.Release
    | moves.Cancel
)
FromEngine = (
    Tokens
    | Refused
    | Load
    | PageChanges
    | AdapterLoaded
    | moves.Prepared
    | moves.Frozen
    | moves.Arrived
    | moves.MoveFailed
    | moves.RescueRequest
)

encode = msgspec.msgpack.Encoder().encode

# Decoders raise msgspec.DecodeError.
decode_to_leader = msgspec.msgpack.Decoder(ToLeader).decode
decode_from_leader = msgspec.msgpack.Decoder(FromLeader).decode
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
