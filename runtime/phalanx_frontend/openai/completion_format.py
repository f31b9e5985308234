"""Responses of /v1/completions in OpenAI's form."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from phalanx_frontend.stream.formats import ChunkHeader, Envelope, Piece, Usage, token_fields
from phalanx_frontend.stream.logprobs import completion_logprobs, prompt_logprobs
from phalanx_frontend.stream.reply import Echo, Reply


class CompletionFormat:
    """Format of one response."""

    def __init__(self, head: ChunkHeader) -> None:
        self._head = head
        self._outer = Envelope(head, "text_completion")

    def choice(self, index: int, prompt: Sequence[int], echo: Echo | None, reply: Reply) -> "CompletionChoice":
        """Returns the format of one choice. `echo` is shown before its text."""
        return CompletionChoice(self._head, self._outer, index, prompt, echo=echo, reply=reply)

    def counts(self, usage: Usage) -> bytes:
        """Returns the event with the usage."""
        return self._outer.counts(usage)

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """Returns the document of a response that is not streamed."""
        return self._outer.whole("text_completion", choices, usage)


class CompletionChoice:
    """Format of one choice. An echo precedes its first piece: the prompt's text, and its tokens if logprobs are shown."""

    def __init__(
        self, head: ChunkHeader, outer: Envelope, index: int, prompt: Sequence[int], echo: Echo | None, reply: Reply
    ) -> None:
        self._head = head
        self._outer = outer
        self._index = index
        self._prompt = prompt
        self._echo = echo
        self._reply = reply
        self._has_begun = False
        before = b'{"index":%d,"text":' % index
        self._before, self._after = outer.around(before, b',"logprobs":null,"finish_reason":null}')
        self._is_plain = not head.wants.has_tokens

    shows_empty_text = False

    @property
    def is_holding(self) -> bool:
        """False: every piece becomes a chunk."""
        return False

    def skip(self, text: str, tokens: Sequence[int]) -> None:
        """Records text that the client already has, so that the echo is not repeated."""
        self._has_begun = self._has_begun or bool(text)

    def opening(self) -> bytes:
        """Returns nothing: the first chunk has text."""
        return b""

    def piece(self, piece: Piece, usage: Usage | None) -> bytes:
        """Returns the event of a piece of text."""
        if self._is_plain and usage is None and (self._has_begun or self._echo is None):
            return self._before + orjson.dumps(piece.text) + self._after
        return self._outer.chunk({**self._fields(piece), "finish_reason": None}, usage)

    def ending(self, piece: Piece, usage: Usage | None) -> Sequence[bytes]:
        """Returns the event of the last piece of text, with the finish reason."""
        return (self._outer.chunk(self.whole(piece), usage),)

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Returns the choice with its finish reason."""
        return {**self._fields(piece), "finish_reason": self._reply.finish, "stop_reason": self._reply.stop_reason}

    def _fields(self, piece: Piece) -> dict[str, Any]:
        wants, text, tokens = self._head.wants, piece.text, piece.tokens
        is_first, self._has_begun = not self._has_begun, True
        offset = 0 if self._echo is None else len(self._echo.text)
        fields: dict[str, Any] = {"index": self._index, "text": text, "logprobs": None}
        if is_first and self._echo is not None:
            fields["text"] = self._echo.text + text
            if wants.logprobs is not None:
                tokens = [*self._echo.tokens(self._prompt, self._reply.prompt_details), *tokens]
        if wants.logprobs is not None:
            fields["logprobs"] = completion_logprobs(tokens, wants, self._head.spelling, offset)
        fields |= token_fields(piece.tokens, wants)
        if is_first and wants.token_ids:
            fields["prompt_token_ids"] = list(self._prompt)
        if is_first and wants.prompt_logprobs is not None:
            details = self._reply.prompt_details
            fields["prompt_logprobs"] = prompt_logprobs(self._prompt, details, wants.prompt_logprobs, self._head.spelling)
        return fields
