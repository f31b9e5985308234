"""Frames of the link between a router and a group's leader, and of the socket between the HTTP process and rank 0.

One WebSocket per router and leader carries them as msgpack; each message is one frame. A router sends what `wire.router` holds,
`Hello` first; a leader sends what `wire.leader` holds, `Welcome` first, then `Tokens` (one per engine step, with the tokens of
all of that router's requests), `Refused`, `Load`, `State` and `Assets`. Both send frames of moves. The engine socket speaks the
same `Submit`, `Abort`, `Tokens`, `Refused`, `Load` and `PageChanges`.

Requests are named by a small integer handle that the sender of `Submit` chooses, unique on its connection. Every token
is (request, epoch, index, token): a receiver delivers it only if the epoch is current and the index is next.

Structs are arrays on the wire: a field is added only at the end and with a default. ADR 0008 tells what may change how.
"""

import msgspec

from phalanx_api import moves
from phalanx_api.wire.leader import (
    Adopted,
    Assets,
    Cached,
    Cause,
    Finished,
    HeavyPrefix,
    Load,
    PageChanges,
    PromptDetails,
    Refused,
    Served,
    State,
    TokenDetail,
    Tokens,
    Welcome,
    make_assets,
)
from phalanx_api.wire.router import (
    CLOSE_WRONG_VERSION,
    HTTP_WRONG_VERSION,
    PROTOCOL_VERSION,
    Abort,
    Adopt,
    Disown,
    Fetch,
    FinishReason,
    Grammar,
    Hello,
    Prepare,
    Request,
    Sampling,
    SendPages,
    Submit,
)

__all__ = [
    "CLOSE_WRONG_VERSION",
    "HTTP_WRONG_VERSION",
    "LINK_PATH",
    "PROTOCOL_VERSION",
    "Abort",
    "Adopt",
    "Adopted",
    "Assets",
    "Cached",
    "Cause",
    "Disown",
    "Fetch",
    "FinishReason",
    "Finished",
    "FromEngine",
    "FromLeader",
    "Grammar",
    "HeavyPrefix",
    "Hello",
    "Load",
    "PageChanges",
    "Prepare",
    "PromptDetails",
    "Refused",
    "Request",
    "Sampling",
    "SendPages",
    "Served",
    "State",
    "Submit",
    "ToEngine",
    "ToLeader",
    "TokenDetail",
    "Tokens",
    "Welcome",
    "decode_from_engine",
    "decode_from_leader",
    "decode_to_engine",
    "decode_to_leader",
    "encode",
    "make_assets",
]

LINK_PATH = "/link"
"""Path of the WebSocket on the leader's HTTP port. The upgrade carries `Authorization: Bearer <service token>`."""

ToLeader = (
    Hello
    | Submit
    | Abort
    | Fetch
    | SendPages
    | Adopt
    | Disown
    | Prepare
    | moves.MoveOut
    | moves.Thaw
    | moves.Release
    | moves.Cancel
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
    | moves.AskRescue
)
ToEngine = Submit | Abort | Prepare | moves.MoveOut | moves.Thaw | moves.Release | moves.Cancel
FromEngine = (
    Tokens | Refused | Load | PageChanges | moves.Prepared | moves.Frozen | moves.Arrived | moves.MoveFailed | moves.AskRescue
)

encode = msgspec.msgpack.Encoder().encode
"""Bytes of any frame."""
decode_to_leader = msgspec.msgpack.Decoder(ToLeader).decode
"""A frame that a router sent. Raises msgspec.DecodeError."""
decode_from_leader = msgspec.msgpack.Decoder(FromLeader).decode
"""A frame that a leader sent. Raises msgspec.DecodeError."""
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
"""A frame for the engine. Raises msgspec.DecodeError."""
decode_from_engine = msgspec.msgpack.Decoder(FromEngine).decode
"""A frame from the engine. Raises msgspec.DecodeError."""
