"""Responses of /v1/completions."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from phalanx_frontend.errors import OPENAI_ERRORS
from phalanx_frontend.stream.formats import DONE, ChoiceFormat, ChunkHeader, Envelope, Piece, Usage, token_fields
from phalanx_frontend.stream.logprobs import completion_logprobs, prompt_logprobs
from phalanx_frontend.stream.reply import Echo, Reply


class CompletionFormat:
    """Format of one response."""

    done = DONE
    errors = OPENAI_ERRORS

    def __init__(self, head: ChunkHeader) -> None:
        self._head = head
        self._outer = Envelope(head, "text_completion")

    def choice(self, index: int, prompt: Sequence[int], echo: Echo, reply: Reply) -> "CompletionChoice":
        """Returns the format of one choice."""
        return CompletionChoice(self._head, self._outer, index, prompt, echo=echo, reply=reply)

    def counts(self, usage: Usage) -> bytes:
        """Returns the event with the usage."""
        return self._outer.counts(usage)

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """Returns the document."""
        return self._outer.whole("text_completion", choices, usage)


class CompletionChoice(ChoiceFormat):
    """Format of one choice. The echo precedes its first piece."""

    def __init__(self, head: ChunkHeader, outer: Envelope, index: int, prompt: Sequence[int], echo: Echo, reply: Reply) -> None:
        self._head = head
        self._outer = outer
        self._index = index
        self._prompt = prompt
        self._echo = echo
        self._reply = reply
        self._has_started = False
        before = b'{"index":%d,"text":' % index
        self._before, self._after = outer.around(before, b',"logprobs":null,"finish_reason":null}')
        self._is_plain = not head.shown.has_tokens

    def skip(self, text: str, tokens: Sequence[int]) -> None:
        """Notes that the echo was delivered."""
        self._has_started = self._has_started or bool(text)

    def piece(self, piece: Piece, usage: Usage | None) -> bytes:
        """Returns the event of a piece."""
        if self._is_plain and usage is None and (self._has_started or not self._echo.text):
            return self._before + orjson.dumps(piece.text) + self._after
        return self._outer.chunk({**self._fields(piece), "finish_reason": None}, usage)

    def ending(self, piece: Piece, usage: Usage | None) -> Sequence[bytes]:
        """Returns the event of the last piece."""
        return (self._outer.chunk(self.whole(piece), usage),)

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Returns the whole choice."""
        return {**self._fields(piece), "finish_reason": self._reply.finish, "stop_reason": self._reply.stop_reason}

    def _fields(self, piece: Piece) -> dict[str, Any]:
        shown, text, tokens = self._head.shown, piece.text, piece.tokens
        is_first, self._has_started = not self._has_started, True
        fields: dict[str, Any] = {"index": self._index, "text": text, "logprobs": None}
        if is_first:
            fields["text"] = self._echo.text + text
            if shown.logprobs is not None:
                tokens = [*self._echo.tokens(self._prompt, self._reply.prompt_details), *tokens]
        if shown.logprobs is not None:
            fields["logprobs"] = completion_logprobs(tokens, shown, self._head.spelling, offset=len(self._echo.text))
        fields |= token_fields(piece.tokens, shown)
        if is_first and shown.token_ids:
            fields["prompt_token_ids"] = list(self._prompt)
        if is_first and shown.prompt_logprobs is not None:
            details = self._reply.prompt_details
            fields["prompt_logprobs"] = prompt_logprobs(self._prompt, details, shown.prompt_logprobs, self._head.spelling)
        return fields
