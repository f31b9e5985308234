"""What the answers of completions and chats have in common. Per chunk of mere text only the text is encoded: what surrounds it
is made once per choice.

One `AnswerFormat` writes a request's answer, with one `ChoiceFormat` for each of its choices. A choice's format is where text
becomes fields: it sees every piece of the choice's text once, in order, and may keep some back for the next.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import orjson

from phalanx_frontend.stream.logprobs import Spelling
from phalanx_frontend.stream.reply import Echo, Reply, ShownToken, Wants

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that ended well."""
KEEP_ALIVE = b": keep-alive\n"
"""A comment: clients skip it, proxies see that the connection lives.

No empty line ends it: after the first id of a stream the `openai` client takes any empty line for an event."""

Usage = Mapping[str, Any]
"""Token counts, as `usage` of an answer."""


def event(document: bytes) -> bytes:
    """One server-sent event. JSON has no raw line ends, so one line is enough."""
    return b"data: " + document + b"\n\n"


class Piece(NamedTuple):
    """A piece of a choice's text, and the tokens to be shown with it, if any are. A tuple: one is made per chunk."""

    text: str
    tokens: Sequence[ShownToken] = ()


@dataclass(frozen=True, slots=True)
class Head:
    """What stands before the choices of every chunk: the answer's id, when it was made, the model's name. `wants` and `spelling`
    say what is shown of tokens and how."""

    id: str
    created: int
    model: str
    has_usage: bool
    spelling: Spelling
    wants: Wants = field(default_factory=Wants)


class ChoiceFormat(Protocol):
    """How one choice of an answer is written. Streamed: `opening`, `piece`s, `ending`; else `whole`."""

    @property
    def is_holding(self) -> bool:
        """Whether some of the pieces given so far was not written yet: then nothing of them was."""
        ...

    def skip(self, text: str) -> None:
        """Takes text that the client has already."""
        ...

    def opening(self) -> bytes:
        """Events before the first text."""
        ...

    def piece(self, piece: Piece, usage: Usage | None) -> bytes:
        """The event of a piece, with the counts so far if each chunk shall have them. Empty when it waits for the next."""
        ...

    def ending(self, piece: Piece, usage: Usage | None) -> bytes:
        """The events of the last piece, with the reason."""
        ...

    def whole(self, piece: Piece) -> dict[str, Any]:
        """The choice in an answer that is not streamed."""
        ...


class AnswerFormat(Protocol):
    """How one request's answer is written."""

    def choice(self, index: int, prompt: Sequence[int], echo: Echo | None, reply: Reply) -> ChoiceFormat:
        """The format of one choice. `echo` is shown before its own text."""
        ...

    def counts(self, usage: Usage) -> bytes:
        """The event with the usage, asked for by stream_options.include_usage."""
        ...

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """The document of an answer that is not streamed."""
        ...


class Envelope:
    """The outer document of a chunk, split where the choice goes."""

    def __init__(self, head: Head, kind: str) -> None:
        self._fields = {"id": head.id, "object": kind, "created": head.created, "model": head.model}
        # {"id":...,"model":"m" without the closing brace: choices follow.
        self._opened = b"data: " + orjson.dumps(self._fields)[:-1] + b',"choices":['
        self._closed = (b'],"usage":null}' if head.has_usage else b"]}") + b"\n\n"

    def chunk(self, choice: Mapping[str, Any], usage: Usage | None) -> bytes:
        """An event with one choice in it."""
        closed = self._closed if usage is None else b'],"usage":' + orjson.dumps(usage) + b"}\n\n"
        return self._opened + orjson.dumps(choice) + closed

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        """The bytes before and after what varies in a choice that is written by hand."""
        return self._opened + before, after + self._closed

    def counts(self, usage: Usage) -> bytes:
        """An event with no choice, only the usage."""
        return event(orjson.dumps({**self._fields, "choices": [], "usage": usage}))

    def whole(self, kind: str, choices: Sequence[Mapping[str, Any]], usage: Usage, **more: Any) -> bytes:
        """The document of an answer that is not streamed."""
        return orjson.dumps({**self._fields, "object": kind, "choices": choices, "usage": usage, **more})


def token_fields(tokens: Sequence[ShownToken], wants: Wants) -> dict[str, Any]:
    """What both endpoints show of tokens beside logprobs: their ids and gaps."""
    fields: dict[str, Any] = {}
    if wants.token_ids:
        fields["token_ids"] = [token.id for token in tokens]
    if wants.gaps:
        fields["gaps"] = [None if token.detail is None else token.detail.gap for token in tokens]
    return fields
