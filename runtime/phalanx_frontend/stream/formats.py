"""Interfaces and helpers of response formats, shared by completions and chat.

One `AnswerFormat` writes a response, one `ChoiceFormat` each of its choices. A choice's format receives every piece of its text
once, in order, and may hold some back for the next chunk. Chunks of plain text encode only the text; the bytes around it are made
once per choice.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from phalanx_frontend.stream.logprobs import Spelling
from phalanx_frontend.stream.reply import Echo, Reply, ShownFields, ShownToken

DONE = b"data: [DONE]\n\n"
"""The last event of a stream without an error."""
KEEP_ALIVE = b": keep-alive\n"
"""A comment, which clients skip and which keeps proxies from closing the connection.

It has no empty line: after the first id of a stream the `openai` client parses any empty line as an event."""

Usage = Mapping[str, Any]
"""Token counts: `usage` of a response."""


def event(document: bytes) -> bytes:
    """Returns one server-sent event. JSON has no raw newlines, so one line is enough."""
    return b"data: " + document + b"\n\n"


class Piece(NamedTuple):
    """A piece of a choice's text, and the tokens shown with it. A tuple for speed: one is made per chunk."""

    text: str
    tokens: Sequence[ShownToken] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader:
    """Fields that precede the choices in every chunk, and the token fields to show."""

    id: str
    created: int
    model: str
    has_usage: bool
    spelling: Spelling
    wants: ShownFields = field(default_factory=ShownFields)


class ChoiceFormat(Protocol):
    """Writes one choice. Streamed: `opening`, any number of `piece`, `ending`; otherwise `whole`."""

    shows_empty_text: bool  # whether tokens that add no text become a chunk of their own

    @property
    def is_holding(self) -> bool:
        """Whether text is held back since the last chunk; then nothing of the pieces since then was written."""
        ...

    def skip(self, text: str, tokens: Sequence[int]) -> None:
        """Reads text and tokens that the client already has."""
        ...

    def opening(self) -> bytes:
        """Returns events that precede the first text."""
        ...

    def piece(self, piece: Piece, usage: Usage | None) -> bytes:
        """Returns the event of a piece, with `usage` if not None. Empty if the piece is held back."""
        ...

    def ending(self, piece: Piece, usage: Usage | None) -> Sequence[bytes]:
        """Returns the events of the last piece, with the finish reason; at least one."""
        ...

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Returns the choice of a response that is not streamed."""
        ...


class AnswerFormat(Protocol):
    """Writes one response."""

    def choice(self, index: int, prompt: Sequence[int], echo: Echo | None, reply: Reply) -> ChoiceFormat:
        """Returns the format of one choice. `echo` is shown before its text."""
        ...

    def counts(self, usage: Usage) -> bytes:
        """Returns the event with the usage, for stream_options.include_usage."""
        ...

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """Returns the document of a response that is not streamed."""
        ...


class Envelope:
    """The outer document of a chunk, split at the position of the choice."""

    def __init__(self, head: ChunkHeader, kind: str) -> None:
        self._fields = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
        # {"id":...,"model":"m" without the closing brace: choices follow.
        self._opened = b"data: " + orjson.dumps(self._fields)[:-1] + b',"choices":['
        self._closed = (b'],"usage":null}' if head.has_usage else b"]}") + b"\n\n"

    def chunk(self, choice: Mapping[str, Any], usage: Usage | None) -> bytes:
        """Returns an event with one choice."""
        closed = self._closed if usage is None else b'],"usage":' + orjson.dumps(usage) + b"}\n\n"
        return self._opened + orjson.dumps(choice) + closed

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """Returns the bytes before and after the variable part of a choice. `before`, `after`: its constant parts."""
        return self._opened + before, after + self._closed

    def counts(self, usage: Usage) -> bytes:
        """Returns an event with the usage and no choice."""
        return event(orjson.dumps({**self._fields, "choices": [], "usage": usage}))

    def whole(self, kind: str, choices: Sequence[Mapping[str, Any]], usage: Usage, **more: Any) -> bytes:
        """Returns the document of a response that is not streamed."""
        return orjson.dumps({**self._fields, "object": kind, "choices": choices, "usage": usage, **more})


def token_fields(tokens: Sequence[ShownToken], wants: ShownFields) -> dict[str, Any]:
    """Returns the token fields of both endpoints other than logprobs: ids and gaps."""
    fields: dict[str, Any] = {}
    if wants.token_ids:
        fields["token_ids"] = [token.id for token in tokens]
    if wants.gaps:
        fields["gaps"] = [None if token.detail is None else token.detail.gap for token in tokens]
    return fields
