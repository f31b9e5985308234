"""Sends one streamed completion to an OpenAI-compatible server and times it.

Times are taken when bytes arrive, before parsing. An event may carry several tokens: token counts come from `usage`, gaps are
between events.
"""

import json
import time

import aiohttp
import msgspec

from phalanx_runtime.terminal.figures import Answer as Answer
from phalanx_runtime.terminal.load import read_stream


async def stream_answer(session: aiohttp.ClientSession, url: str, body: dict[str, object]) -> Answer:
    """Sends one POST and reads its stream. A failure sets `error`, so that one bad request does not end a run."""
    answer = Answer(started=time.perf_counter())
    try:
        async with session.post(url, json=body) as response:
            if response.status != 200:
                answer.error = f"HTTP {response.status}: {(await response.text())[:300]}"
            else:
                await read_stream(response.content.iter_any(), answer)
    except (aiohttp.ClientError, TimeoutError, msgspec.DecodeError, OSError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.end(time.perf_counter())
    return answer


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
