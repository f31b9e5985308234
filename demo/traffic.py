"""Users of the show: conversations in streams, which are resumed after a lost connection."""

import asyncio
import itertools
import json
import random
import time
from collections import Counter, deque
from collections.abc import AsyncIterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from tools.errors import Failed

TRIES = 30
"""Maximum connections per answer."""
_TIMEOUT = httpx.Timeout(60, connect=5)
_RETRY_S = 1.0
_TURNS = 3
_OPENINGS = (
    "Tell me a story about a lighthouse keeper.",
    "How do I grow tomatoes on a balcony?",
    "Plan a weekend in a small town by the sea.",
    "Explain how a sailing boat can go against the wind.",
    "Write a letter to a friend whom I have not seen for years.",
)
_FOLLOW_UPS = ("Tell me more about the beginning.", "Say it again for a child.", "What happens next?")


@dataclass(frozen=True, slots=True)
class Tenant:
    """A tenant with its API key. All its conversations begin with the same instruction."""

    name: str
    key: str
    instruction: str
    max_tokens: int


@dataclass(slots=True)
class Outcome:
    """What the users got so far."""

    ends: Counter[str] = field(default_factory=Counter)
    """Answers: `complete`, or the error."""
    resumed: int = 0
    first_token_s: deque[float] = field(default_factory=lambda: deque(maxlen=20))
    """Of the last answers, from the request."""


async def converse(url: str, model: str, tenant: Tenant, seed: int, outcome: Outcome) -> None:
    """Runs conversations of one user until it is cancelled."""
    rng = random.Random(seed)
    async with httpx.AsyncClient(base_url=url, headers={"Authorization": f"Bearer {tenant.key}"}, timeout=_TIMEOUT) as client:
        for _ in itertools.count():
            messages = [{"role": "system", "content": tenant.instruction}]
            for turn in range(_TURNS):
                question = rng.choice(_FOLLOW_UPS if turn else _OPENINGS)
                messages.append({"role": "user", "content": question})
                body = {"model": model, "messages": messages, "stream": True, "max_tokens": tenant.max_tokens, "temperature": 0.7}
                answer = await counted(client, body | {"seed": rng.getrandbits(30)}, outcome)
                if answer is None:
                    break
                messages.append({"role": "assistant", "content": answer})
                await asyncio.sleep(rng.uniform(0.5, 2))


async def counted(client: httpx.AsyncClient, body: Mapping[str, Any], outcome: Outcome) -> str | None:
    """Returns the text of an answer, or `None` if it has failed; counts its end."""
    try:
        answer = await streamed(client, body, outcome)
    except Failed as error:
        outcome.ends[str(error)] += 1
        return None
    outcome.ends["complete"] += 1
    return answer


async def streamed(client: httpx.AsyncClient, body: Mapping[str, Any], outcome: Outcome) -> str:
    """Returns the text of an answer; resumes the stream where its connection was lost. Raises Failed with the reason."""
    text, last_id, asked_s = "", "", time.monotonic()
    for _ in range(TRIES):
        headers = {"Last-Event-ID": last_id} if last_id else {}
        try:
            async with client.stream("POST", "/v1/chat/completions", json=body, headers=headers) as response:
                if response.status_code != 200:
                    await response.aread()
                    if response.status_code != 503:  # a router that starts
                        raise Failed(f"HTTP {response.status_code}")
                    await asyncio.sleep(_RETRY_S)
                    continue
                outcome.resumed += bool(last_id)
                async for line in lines_of(response):
                    if line.startswith("id: "):
                        last_id = line.removeprefix("id: ")
                    elif line == "data: [DONE]":
                        return text
                    elif line.startswith("data: "):
                        piece = _text_of(json.loads(line.removeprefix("data: ")))
                        if piece and not text:
                            outcome.first_token_s.append(time.monotonic() - asked_s)
                        text += piece
        except httpx.TransportError:
            await asyncio.sleep(_RETRY_S)
    raise Failed("lost")


def _text_of(event: dict[str, Any]) -> str:
    if "error" in event:
        raise Failed(f"error {event['error'].get('code')}")
    return "".join(choice["delta"].get("content") or "" for choice in event["choices"])


async def lines_of(response: httpx.Response) -> AsyncIterator[str]:
    """Yields whole lines. Only a newline ends a line, unlike in `str.splitlines`."""
    rest = b""
    async for chunk in response.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            yield line.decode()
