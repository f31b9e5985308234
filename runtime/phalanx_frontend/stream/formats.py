"""Interfaces and helpers of response formats.

A choice's format receives every piece of its text once, in order, and may hold some back. Chunks of plain text encode only the
text; the bytes around it are made once per choice.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from phalanx_frontend.errors import ErrorForm
from phalanx_frontend.stream.logprobs import Spelling
from phalanx_frontend.stream.reply import Echo, Reply, ShownFields, ShownToken

DONE = b"data: [DONE]\n\n"
"""The last event of a stream without an error."""
KEEP_ALIVE = b": keep-alive\n"
"""A comment, without an empty line, which the `openai` client would parse as an event."""

Usage = Mapping[str, Any]
"""Token counts of a response."""


def event(document: bytes) -> bytes:
    """Returns one server-sent event."""
    return b"data: " + document + b"\n\n"


def named_event(document: Mapping[str, Any]) -> bytes:
    """Returns one server-sent event, named by the document's `type`."""
    return b"event: %b\ndata: %b\n\n" % (document["type"].encode(), orjson.dumps(document))


class Piece(NamedTuple):
    """A piece of a choice's text, with its tokens."""

    text: str
    tokens: Sequence[ShownToken] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class ChunkHeader:
    """Fields of every chunk, and the token fields to show."""

    id: str
    created: int
    model: str
    has_usage: bool
    spelling: Spelling
    shown: ShownFields = field(default_factory=ShownFields)


class ChoiceFormat(ABC):
    """Writes one choice. Streamed: `opening`, any number of `piece`, `ending`; otherwise `whole`."""

    shows_empty_text = False  # whether tokens without text become a chunk

    @property
    def is_holding(self) -> bool:
        """Whether all text since the last chunk is held back."""
        return False

    def skip(self, text: str, tokens: Sequence[int]) -> None:  # noqa: B027
        """Reads delivered text and tokens."""

    def opening(self) -> bytes:
        """Returns events that precede the first text."""
        return b""

    @abstractmethod
    def piece(self, piece: Piece, usage: Usage | None) -> bytes:
        """Returns the event of a piece, unless it is held back."""

    @abstractmethod
    def ending(self, piece: Piece, usage: Usage | None) -> Sequence[bytes]:
        """Returns the events of the last piece, at least one."""

    @abstractmethod
    def whole(self, piece: Piece) -> dict[str, Any]:
        """Returns the choice of an unstreamed response."""


class AnswerFormat(Protocol):
    """Writes one response."""

    @property
    def done(self) -> bytes:
        """The last bytes of a stream without an error."""
        ...

    @property
    def errors(self) -> ErrorForm:
        """How the API writes errors."""
        ...

    def choice(self, index: int, prompt: Sequence[int], echo: Echo, reply: Reply) -> ChoiceFormat:
        """Returns the format of one choice."""
        ...

    def counts(self, usage: Usage) -> bytes:
        """Returns the event with the usage."""
        ...

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """Returns the document of an unstreamed response."""
        ...


class Envelope:
    """Outer document of a chunk, split at the choice."""

    def __init__(self, head: ChunkHeader, kind: str) -> None:
        self._fields = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
        # {"id":...,"model":"m" without the closing brace
        self._opened = b"data: " + orjson.dumps(self._fields)[:-1] + b',"choices":['
        self._closed = (b'],"usage":null}' if head.has_usage else b"]}") + b"\n\n"

    def chunk(self, choice: Mapping[str, Any], usage: Usage | None) -> bytes:
        """Returns an event with one choice."""
        closed = self._closed if usage is None else b'],"usage":' + orjson.dumps(usage) + b"}\n\n"
        return self._opened + orjson.dumps(choice) + closed

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """Returns the bytes before and after the variable part of a choice."""
        return self._opened + before, after + self._closed

    def counts(self, usage: Usage) -> bytes:
        """Returns an event with the usage alone."""
        return event(orjson.dumps({**self._fields, "choices": [], "usage": usage}))

    def whole(self, kind: str, choices: Sequence[Mapping[str, Any]], usage: Usage, **more: Any) -> bytes:
        """Returns the document of an unstreamed response."""
        return orjson.dumps({**self._fields, "object": kind, "choices": choices, "usage": usage, **more})


def token_fields(tokens: Sequence[ShownToken], shown: ShownFields) -> dict[str, Any]:
    """Returns token ids and gaps, where requested."""
    fields: dict[str, Any] = {}
    if shown.token_ids:
        fields["token_ids"] = [token.id for token in tokens]
    if shown.gaps:
        fields["gaps"] = [None if token.detail is None else token.detail.gap for token in tokens]
    return fields
