"""Messages between clients and routers in virtual time, in place of HTTP: one call per connection."""

from typing import Literal

import msgspec

from phalanx_api import wire


class Call(msgspec.Struct, frozen=True, array_like=True):
    """A request, or the operator's poll in `body`. `num_delivered`: tokens that a client has that resumes; -1: it does not."""

    kind: Literal["generate", "poll"]
    request: wire.Request | None = None
    num_delivered: int = -1
    body: bytes = b""


class Chunk(msgspec.Struct, frozen=True, array_like=True):
    """A part of the answer. Without tokens, end and error it keeps the connection alive."""

    index: int = 0
    tokens: list[int] = []
    finish: wire.FinishReason | None = None
    status: int = 200
    code: str = ""
    can_resume: bool = False
    retry_after_s: float = 0.0
    body: bytes = b""


encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(Call).decode
decode_chunk = msgspec.msgpack.Decoder(Chunk).decode
