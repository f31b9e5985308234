"""A model behind any OpenAI-compatible URL."""

import json
from collections.abc import Generator, Iterable, Iterator
from typing import Any

import httpx
import msgspec

from phalanx_runtime.settings import AnswerOptions
from phalanx_runtime.terminal.conversation import ChatError, ChatMessage, TextPiece

CONNECT_S = 10.0
"""Timeout of a connection. Answers have none: a queue may be long, and Ctrl-C ends the wait."""


class ChatDelta(msgspec.Struct):
    """Text of a streamed event. vLLM names the reasoning `reasoning` since 0.11, others `reasoning_content`."""

    content: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None


class ChatEventChoice(msgspec.Struct):
    """The choice of a streamed event."""

    delta: ChatDelta = msgspec.field(default_factory=ChatDelta)


class ChatEvent(msgspec.Struct):
    """One streamed event."""

    choices: list[ChatEventChoice] = []
    error: Any = None


_decode = msgspec.json.Decoder(ChatEvent).decode


def api_base(url: str) -> str:
    """Returns the URL with one `/v1`."""
    return url.rstrip("/").removesuffix("/v1") + "/v1"


class RemoteModel:
    """Implements `ChatModel`."""

    def __init__(self, url: str, name: str | None, api_key: str | None) -> None:
        """Without `name` the first model of the server answers. Raises ChatError."""
        headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
        timeout = httpx.Timeout(None, connect=CONNECT_S)
        try:
            self._http = httpx.Client(base_url=api_base(url), headers=headers, timeout=timeout)
        except httpx.InvalidURL as error:
            raise ChatError(f"{url}: {error}") from error
        self.name = name or self._first_name()

    def close(self) -> None:
        """Closes the connections."""
        self._http.close()

    def stream(self, messages: list[ChatMessage], options: AnswerOptions) -> Generator[TextPiece]:
        """Yields the answer; closing the iterator closes its connection. Raises ChatError."""
        chosen = {"max_tokens": options.max_tokens, "temperature": options.temperature, "seed": options.seed}
        body = {"model": self.name, "messages": messages, "stream": True}
        body |= {name: value for name, value in chosen.items() if value is not None}
        try:
            with self._http.stream("POST", "/chat/completions", json=body) as response:
                if response.status_code != httpx.codes.OK:
                    response.read()
                    raise ChatError(reason_of(response))
                yield from _pieces(_lines(response.iter_bytes()))
        except httpx.HTTPError as error:
            raise ChatError(f"{self._http.base_url}: {error or type(error).__name__}") from error

    def _first_name(self) -> str:
        try:
            response = self._http.get("/models")
            if response.status_code != httpx.codes.OK:
                raise ChatError(reason_of(response))
            return str(response.json()["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise ChatError(f"{response.url} lists no model; name it by --model") from error
        except httpx.HTTPError as error:
            raise ChatError(f"{self._http.base_url}: {error or type(error).__name__}") from error


def _lines(chunks: Iterable[bytes]) -> Iterator[bytes]:
    """Yields lines, which only a newline ends: `iter_lines` of httpx splits at U+2028 and others too, which JSON may contain."""
    rest = b""
    for chunk in chunks:
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines


def _pieces(lines: Iterable[bytes]) -> Iterator[TextPiece]:
    for line in lines:
        if not line.startswith(b"data:"):
            continue
        data = line[5:].strip()
        if data == b"[DONE]":
            return
        try:
            event = _decode(data)
        except msgspec.DecodeError as error:
            raise ChatError(f"the server sent an event that is no chunk of a chat: {error}") from error
        if event.error is not None:
            raise ChatError(_message(event.error))
        for choice in event.choices:
            delta = choice.delta
            if text := delta.reasoning_content or delta.reasoning:
                yield TextPiece(text, is_reasoning=True)
            if delta.content:
                yield TextPiece(delta.content)
    raise ChatError("the connection ended before the answer did")


def reason_of(response: httpx.Response) -> str:
    """Returns the reason of a failed request whose body has been read."""
    try:
        return f"HTTP {response.status_code}: {_message(response.json()['error'])}"
    except (ValueError, LookupError, TypeError):
        return f"HTTP {response.status_code}: {response.text[:300]}"


def _message(error: Any) -> str:
    return str(error["message"]) if isinstance(error, dict) and "message" in error else json.dumps(error)
