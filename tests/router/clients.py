"""A client of completions that resumes streams with Last-Event-ID."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE_S = 60.0


@dataclass(slots=True)
class ReceivedStream:
    """Received texts, finish reasons and tokens with logprobs by choice, the last event id, and the error."""

    texts: dict[int, str]
    ends: dict[int, str]
    last: str = ""
    error: Any = None
    status: int = 200
    is_done: bool = False
    tokens: dict[int, list[str]] = field(default_factory=dict)

    @property
    def num_chars(self) -> int:
        return sum(map(len, self.texts.values()))


async def read(
    url: str,
    body: Mapping[str, Any],
    received: ReceivedStream | None = None,
    stop: Callable[[ReceivedStream], bool] = lambda received: False,
    key: str = "sk-1",
    traceparent: str = "",
    patience_s: float = PATIENCE_S,
) -> ReceivedStream:
    """Reads a stream until its end, the loss of its server, or `stop`; resumes after `received`, if given."""
    headers = {"authorization": f"Bearer {key}"} | ({"traceparent": traceparent} if traceparent else {})
    received = received or ReceivedStream({}, {})
    if received.last:
        headers["last-event-id"] = received.last
    with suppress(httpx.TransportError):  # the server was killed
        async with (
            asyncio.timeout(patience_s),
            httpx.AsyncClient(trust_env=False, timeout=patience_s) as http,
            http.stream("POST", f"{url}/v1/completions", json=dict(body), headers=headers) as answer,
        ):
            received.status = answer.status_code
            if answer.status_code == 200:
                await _read_lines(answer.aiter_lines(), received, stop)
            else:
                received.error = json.loads(await answer.aread())["error"]
    return received


async def _read_lines(lines: AsyncIterator[str], received: ReceivedStream, stop: Callable[[ReceivedStream], bool]) -> None:
    id = ""
    async for line in lines:
        if line.startswith("id: "):
            id = line.removeprefix("id: ")
        if line == "data: [DONE]":
            received.is_done = True
        elif line.startswith("data: "):
            document = json.loads(line.removeprefix("data: "))
            received.error = document.get("error")
            for choice in document.get("choices", ()):
                received.texts[choice["index"]] = received.texts.get(choice["index"], "") + choice["text"]
                if choice.get("logprobs"):
                    received.tokens.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"])
                if choice["finish_reason"]:
                    received.ends[choice["index"]] = choice["finish_reason"]
            received.last = id or received.last
            if stop(received):
                return


def chars(count: int) -> Callable[[ReceivedStream], bool]:
    return lambda received: received.num_chars >= count
