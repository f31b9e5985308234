"""A client of completions that knows how to resume: it keeps what it has, and the id up to which it has it."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import httpx

PATIENCE_S = 60.0


@dataclass(slots=True)
class Told:
    """What a client got: texts, ends, and tokens that came with logprobs, by choice, the last id, and the error, if one came."""

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
    told: Told | None = None,
    stop: Callable[[Told], bool] = lambda told: False,
    key: str = "sk-1",
) -> Told:
    """Reads a stream to its end, its server's end or `stop`; from where `told` came to, if it is given."""
    headers = {"authorization": f"Bearer {key}"}
    told = told or Told({}, {})
    if told.last:
        headers["last-event-id"] = told.last
    with suppress(httpx.TransportError):  # its server was killed
        async with (
            asyncio.timeout(PATIENCE_S),
            httpx.AsyncClient(trust_env=False, timeout=PATIENCE_S) as http,
            http.stream("POST", f"{url}/v1/completions", json=dict(body), headers=headers) as answer,
        ):
            told.status = answer.status_code
            if answer.status_code == 200:
                await _hear(answer.aiter_lines(), told, stop)
            else:
                told.error = json.loads(await answer.aread())["error"]
    return told


async def _hear(lines: AsyncIterator[str], told: Told, stop: Callable[[Told], bool]) -> None:
    id = ""
    async for line in lines:
        if line.startswith("id: "):
            id = line.removeprefix("id: ")
        if line == "data: [DONE]":
            told.is_done = True
        elif line.startswith("data: "):
            document = json.loads(line.removeprefix("data: "))
            told.error = document.get("error")
            for choice in document.get("choices", ()):
                told.texts[choice["index"]] = told.texts.get(choice["index"], "") + choice["text"]
                if choice.get("logprobs"):
                    told.tokens.setdefault(choice["index"], []).extend(choice["logprobs"]["tokens"])
                if choice["finish_reason"]:
                    told.ends[choice["index"]] = choice["finish_reason"]
            told.last = id or told.last
            if stop(told):
                return


def chars(count: int) -> Callable[[Told], bool]:
    return lambda told: told.num_chars >= count
