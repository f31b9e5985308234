"""Responses of the native API. A stream ends with the whole document."""

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from phalanx_frontend.errors import OPENAI_ERRORS
from phalanx_frontend.metrics import Clock
from phalanx_frontend.stream.formats import DONE, ChoiceFormat, Piece, Usage, event
from phalanx_frontend.stream.reply import Echo, Reply, ShownFields

TOKEN_IDS = ShownFields(token_ids=True)
"""Token fields of every response."""


class GenerationFormat:
    """Format of one response."""

    done = DONE
    errors = OPENAI_ERRORS

    def __init__(self, id: str, arrived_s: float, clock: Clock) -> None:
        self.id = id
        self._arrived_s = arrived_s
        self._clock = clock

    def choice(self, index: int, prompt: Sequence[int], echo: Echo, reply: Reply) -> "GenerationChoice":
        """Returns the format of its single choice."""
        return GenerationChoice(self, len(prompt), reply)

    def latency_s(self) -> float:
        """Returns the time since the request arrived."""
        return self._clock() - self._arrived_s

    def counts(self, usage: Usage) -> bytes:
        """Returns nothing: the document has the counts."""
        return b""

    def whole(self, choices: Sequence[Mapping[str, Any]], usage: Usage) -> bytes:
        """Returns the document."""
        return orjson.dumps(choices[0])


class GenerationChoice(ChoiceFormat):
    """Format of the choice, which collects all text and tokens."""

    shows_empty_text = True

    def __init__(self, outer: GenerationFormat, num_prompt_tokens: int, reply: Reply) -> None:
        self._outer = outer
        self._num_prompt_tokens = num_prompt_tokens
        self._reply = reply
        self._texts: list[str] = []
        self._tokens: list[int] = []

    def skip(self, text: str, tokens: Sequence[int]) -> None:
        """Adds delivered text and tokens to the document."""
        self._texts.append(text)
        self._tokens.extend(tokens)

    def piece(self, piece: Piece, usage: Usage | None) -> bytes:
        """Returns the event of a piece, if not empty."""
        tokens = [token.id for token in piece.tokens]
        self.skip(piece.text, tokens)
        if not (piece.text or tokens):
            return b""
        return event(orjson.dumps({"request_id": self._outer.id, "text": piece.text, "token_ids": tokens}))

    def ending(self, piece: Piece, usage: Usage | None) -> Sequence[bytes]:
        """Returns the event of the last piece, if not empty, and that of the document."""
        last = self.piece(piece, usage)
        document = event(orjson.dumps(self._document()))
        return (last, document) if last else (document,)

    def whole(self, piece: Piece) -> dict[str, Any]:
        """Returns the document, which ends with `piece`."""
        self.skip(piece.text, [token.id for token in piece.tokens])
        return self._document()

    def _document(self) -> dict[str, Any]:
        latency_s = self._outer.latency_s()
        return {
            "request_id": self._outer.id,
            "prompt_tokens": self._num_prompt_tokens,
            "generated_tokens": len(self._tokens),
            "text": "".join(self._texts),
            "token_ids": self._tokens,
            "latency_ms": latency_s * 1000,
            "throughput_tokens_per_sec": len(self._tokens) / latency_s if latency_s > 0 else 0.0,
            "finish_reason": self._reply.finish,
        }
