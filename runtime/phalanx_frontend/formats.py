"""Answers as OpenAI spells them. Per chunk only the text is encoded: what surrounds it is made once per request."""

from collections.abc import Mapping
from typing import Any, Protocol

import orjson

from phalanx_frontend.reply import Reply

DONE = b"data: [DONE]\n\n"
"""The last event of a stream that ended well."""
KEEP_ALIVE = b": keep-alive\n\n"
"""A comment: clients skip it, proxies see that the connection lives."""


def event(document: bytes) -> bytes:
    """One server-sent event. JSON has no raw line ends, so one line is enough."""
    return b"data: " + document + b"\n\n"


def usage(num_prompt_tokens: int, reply: Reply) -> dict[str, Any]:
    """Token counts of a request."""
    return {
        "prompt_tokens": num_prompt_tokens,
        "completion_tokens": reply.completion_tokens,
        "total_tokens": num_prompt_tokens + reply.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": reply.cached_tokens},
    }


class Format(Protocol):
    """How one request's answer is written."""

    def opening(self) -> bytes:
        """Events before the first text."""
        ...

    def text(self, text: str) -> bytes:
        """The event of a piece of text."""
        ...

    def ending(self, text: str, reply: Reply) -> bytes:
        """The event of the last piece of text, with the reason."""
        ...

    def counts(self, usage: Mapping[str, Any]) -> bytes:
        """The event with the usage, asked for by stream_options.include_usage."""
        ...

    def whole(self, text: str, reply: Reply, usage: Mapping[str, Any]) -> bytes:
        """The document of an answer that is not streamed."""
        ...


class _Surroundings:
    """What completions and chat share: the outer document, split where the text goes."""

    def __init__(self, id: str, kind: str, created: int, model: str, has_usage: bool) -> None:
        self._head = {"id": id, "object": kind, "created": created, "model": model}
        # {"id":...,"model":"m" without the closing brace: choices follow.
        self._opened = b"data: " + orjson.dumps(self._head)[:-1] + b',"choices":['
        self._closed = (b'],"usage":null}' if has_usage else b"]}") + b"\n\n"

    def choice(self, choice: Mapping[str, Any]) -> bytes:
        return self._opened + orjson.dumps(choice) + self._closed

    def around(self, before: bytes, after: bytes) -> tuple[bytes, bytes]:
        return self._opened + before, after + self._closed

    def counts(self, usage: Mapping[str, Any]) -> bytes:
        return event(orjson.dumps({**self._head, "choices": [], "usage": usage}))

    def whole(self, kind: str, choice: Mapping[str, Any], usage: Mapping[str, Any]) -> bytes:
        return orjson.dumps({**self._head, "object": kind, "choices": [choice], "usage": usage})


class CompletionFormat:
    """Answers of /v1/completions."""

    def __init__(self, id: str, created: int, model: str, has_usage: bool) -> None:
        self._outer = _Surroundings(id, "text_completion", created, model, has_usage)
        self._before, self._after = self._outer.around(b'{"index":0,"text":', b',"logprobs":null,"finish_reason":null}')

    def opening(self) -> bytes:
        """Nothing: the first chunk has text."""
        return b""

    def text(self, text: str) -> bytes:
        """The event of a piece of text."""
        return self._before + orjson.dumps(text) + self._after

    def ending(self, text: str, reply: Reply) -> bytes:
        """The event of the last piece of text, with the reason."""
        return self._outer.choice(self._choice(text, reply))

    def counts(self, usage: Mapping[str, Any]) -> bytes:
        """The event with the usage."""
        return self._outer.counts(usage)

    def whole(self, text: str, reply: Reply, usage: Mapping[str, Any]) -> bytes:
        """The document of an answer that is not streamed."""
        return self._outer.whole("text_completion", self._choice(text, reply), usage)

    def _choice(self, text: str, reply: Reply) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": reply.finish, "stop_reason": reply.stop_reason}


class ChatFormat:
    """Answers of /v1/chat/completions."""

    def __init__(self, id: str, created: int, model: str, has_usage: bool) -> None:
        self._outer = _Surroundings(id, "chat.completion.chunk", created, model, has_usage)
        self._before, self._after = self._outer.around(
            b'{"index":0,"delta":{"content":', b'},"logprobs":null,"finish_reason":null}'
        )

    def opening(self) -> bytes:
        """The role, before any text."""
        delta = {"role": "assistant", "content": ""}
        return self._outer.choice({"index": 0, "delta": delta, "logprobs": None, "finish_reason": None})

    def text(self, text: str) -> bytes:
        """The event of a piece of text."""
        return self._before + orjson.dumps(text) + self._after

    def ending(self, text: str, reply: Reply) -> bytes:
        """The event of the last piece of text, with the reason."""
        return self._outer.choice({"index": 0, "delta": {"content": text} if text else {}, **self._end(reply)})

    def counts(self, usage: Mapping[str, Any]) -> bytes:
        """The event with the usage."""
        return self._outer.counts(usage)

    def whole(self, text: str, reply: Reply, usage: Mapping[str, Any]) -> bytes:
        """The document of an answer that is not streamed."""
        message = {"role": "assistant", "content": text, "refusal": None}
        return self._outer.whole("chat.completion", {"index": 0, "message": message, **self._end(reply)}, usage)

    def _end(self, reply: Reply) -> dict[str, Any]:
        return {"logprobs": None, "finish_reason": reply.finish, "stop_reason": reply.stop_reason}
