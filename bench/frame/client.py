"""Sends one streamed completion to an OpenAI-compatible server and times it.

Times are taken when bytes arrive, before parsing. An event may carry several tokens: token counts come from `usage`, gaps are
between events.
"""

import json
import time
from collections.abc import AsyncIterator

import aiohttp
import msgspec

from phalanx_runtime.terminal.figures import Answer as Answer

_DONE = b"[DONE]"


class _Delta(msgspec.Struct):
    content: str | None = None
    reasoning_content: str | None = None


class _Choice(msgspec.Struct):
    text: str | None = None
    delta: _Delta | None = None


class _Usage(msgspec.Struct):
    prompt_tokens: int = 0
    completion_tokens: int = 0


class _Event(msgspec.Struct):
    choices: list[_Choice] = []
    usage: _Usage | None = None
    error: object = None


_decode = msgspec.json.Decoder(_Event).decode


async def stream_answer(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> Answer:
    """Sends one POST and reads its stream. A failure sets `error`, so that one bad request does not end a run."""
    answer = Answer(started=time.perf_counter())
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            else:
                await _read(response, answer)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.end(time.perf_counter())
    return answer


async def _read(response: aiohttp.ClientResponse, answer: Answer) -> None:
    async for arrived, data in _events(response):
        if data == _DONE:
            return
        event = _decode(data)
        if event.error is not None:
            answer.error = str(event.error)
            return
        text = "".join(_text(choice) for choice in event.choices)
        if text:
            answer.arrivals.append(arrived)
            answer.texts.append(text)
        elif event.choices:
            answer.textless_arrivals.append(arrived)
        if event.usage is not None:
            answer.prompt_tokens, answer.completion_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
    answer.error = "the stream ended without [DONE]"


def _text(choice: _Choice) -> str:
    if choice.delta is None:
        return choice.text or ""
    return (choice.delta.reasoning_content or "") + (choice.delta.content or "")


async def _events(response: aiohttp.ClientResponse) -> AsyncIterator[tuple[float, bytes]]:
    """Yields time of arrival and data of each server-sent event; assumes one data line per event."""
    rest = b""
    async for chunk in response.content.iter_any():
        arrived = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield arrived, line[5:].strip()


def session_for(
    concurrency: int, api_key: str | None, timeout_s: float | None, is_kept_alive: bool = True
) -> aiohttp.ClientSession:
    """Returns a session of `concurrency` connections with a timeout for each request.

    Without `is_kept_alive` each connection serves one request.
    """
    keepalive_s = 60 if is_kept_alive else None
    return aiohttp.ClientSession(
        connector=aiohttp.TCPConnector(limit=concurrency, force_close=not is_kept_alive, keepalive_timeout=keepalive_s),
        headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
        timeout=aiohttp.ClientTimeout(total=timeout_s),
        json_serialize=lambda value: json.dumps(value, ensure_ascii=False),
    )
