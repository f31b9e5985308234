"""Answers of /v1/chat/completions, as OpenAI spells them."""

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import orjson

from phalanx_frontend.shown import Echo, ShownToken
from phalanx_frontend.stream.formats import ChoiceFormat, Envelope, Head, Piece, Usage, token_fields
from phalanx_frontend.stream.logprobs import chat_logprobs, prompt_logprobs
from phalanx_frontend.stream.reply import Reply


class MakeChoice(Protocol):
    """Makes the format of one choice."""

    def __call__(self, head: Head, outer: Envelope, index: int, prompt: Sequence[int], reply: Reply) -> ChoiceFormat:
        """The format of choice `index` of an answer to this prompt."""
        ...


class ChatFormat:
    """One answer. Its choices have one prompt, so what is shown of that stands beside them."""

    def __init__(self, head: Head, make_choice: MakeChoice) -> None:
        self._head = head
        self._make_choice = make_choice
        self._outer = Envelope(head, "chat.completion.chunk")
        self._prompt: Sequence[int] = ()
        self._first: Reply | None = None

    def choice(self, index: int, prompt: Sequence[int], echo: Echo | None, reply: Reply) -> ChoiceFormat:
        """The format of one choice. A chat echoes nothing."""
        if self._first is None:
            self._prompt, self._first = prompt, reply
        return self._make_choice(self._head, self._outer, index, prompt, reply)

    def counts(self, usage: Usage) -> bytes:
        """The event with the usage."""
        return self._outer.counts(usage)

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """The document of an answer that is not streamed."""
        wants, more = self._head.wants, {}
        if wants.token_ids:
            more["prompt_token_ids"] = list(self._prompt)
        if wants.prompt_logprobs is not None and self._first is not None:
            details = self._first.prompt_details
            more["prompt_logprobs"] = prompt_logprobs(self._prompt, details, wants.prompt_logprobs, self._head.spelling)
        return self._outer.whole("chat.completion", choices, usage, **more)


class ChatChoice:
    """One choice: the message, or its deltas."""

    def __init__(self, head: Head, outer: Envelope, index: int, prompt: Sequence[int], reply: Reply) -> None:
        self._head = head
        self._outer = outer
        self._index = index
        self._prompt = prompt
        self._reply = reply
        before = b'{"index":%d,"delta":{"content":' % index
        self._before, self._after = outer.around(before, b'},"logprobs":null,"finish_reason":null}')
        self._is_plain = not head.wants.tokens

    @property
    def is_holding(self) -> bool:
        """Never: every piece is a chunk."""
        return False

    def skip(self, text: str) -> None:
        """Takes text that the client has already."""

    def opening(self) -> bytes:
        """The role, before any text."""
        shown = {"prompt_token_ids": list(self._prompt)} if self._head.wants.token_ids else {}
        delta = {"role": "assistant", "content": ""}
        return self._outer.chunk({"index": self._index, "delta": delta, "logprobs": None, "finish_reason": None, **shown}, None)

    def piece(self, piece: Piece, usage: Usage | None) -> bytes:
        """The event of a piece of text."""
        if self._is_plain and usage is None:
            return self._before + orjson.dumps(piece.text) + self._after
        delta = {"content": piece.text}
        return self._outer.chunk({"index": self._index, "delta": delta, **self.shown(piece.tokens), "finish_reason": None}, usage)

    def ending(self, piece: Piece, usage: Usage | None) -> bytes:
        """The event of the last piece of text, with the reason."""
        delta = {"content": piece.text} if piece.text else {}
        return self._outer.chunk({"index": self._index, "delta": delta, **self.shown(piece.tokens), **self._end()}, usage)

    def whole(self, piece: Piece) -> dict[str, Any]:
        """The choice in an answer that is not streamed."""
        message = {"role": "assistant", "content": piece.text, "refusal": None}
        return {"index": self._index, "message": message, **self.shown(piece.tokens), **self._end()}

    def shown(self, tokens: Sequence[ShownToken]) -> dict[str, Any]:
        """What is shown of these tokens."""
        wants = self._head.wants
        logprobs = None
        if wants.logprobs is not None:
            logprobs = chat_logprobs(tokens, wants, self._head.spelling)
        return {"logprobs": logprobs, **token_fields(tokens, wants)}

    def _end(self) -> dict[str, Any]:
        return {"finish_reason": self._reply.finish, "stop_reason": self._reply.stop_reason}
