"""Makes seeded prompts, sends them in streamed requests to an OpenAI-compatible URL, and times their events.

Prompts have words that nearly every vocabulary encodes as one token. Times are taken when bytes arrive, before parsing. Token
counts come from `usage`.
"""

import asyncio
import json
import random
import time
from collections.abc import AsyncIterable, AsyncIterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass

import httpx
import msgspec

from phalanx_runtime.terminal.figures import Answer
from phalanx_runtime.terminal.remote import ChatDelta, reason_of


class LoadUsage(msgspec.Struct):
    """Counts of one request."""

    prompt_tokens: int = 0
    completion_tokens: int = 0


class LoadChoice(msgspec.Struct):
    """Text of a completion or a chat."""

    text: str | None = None
    delta: ChatDelta | None = None

    def shown(self) -> str:
        """Returns the text, reasoning included."""
        if self.delta is None:
            return self.text or ""
        return (self.delta.reasoning_content or self.delta.reasoning or "") + (self.delta.content or "")


class LoadEvent(msgspec.Struct):
    """One streamed event."""

    choices: list[LoadChoice] = []
    usage: LoadUsage | None = None
    error: object = None


_decode = msgspec.json.Decoder(LoadEvent).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """Requests and their pace."""

    url: str
    """Of the endpoint."""
    bodies: Sequence[dict[str, object]]
    api_key: str | None
    rate: float = float("inf")
    """Mean requests per second, with exponential gaps; infinite: as many as `concurrency` permits."""
    concurrency: int | None = None
    """Maximum requests in flight; null: no bound."""
    seed: int = 0
    timeout_s: float = 600.0
    """Of one request without any byte."""


async def run_load(load: LoadPlan) -> tuple[list[Answer], float]:
    """Returns all answers in request order, and the seconds from the first request to the last answer."""
    headers = {"Authorization": f"Bearer {load.api_key}"} if load.api_key else {}
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    slots = nullcontext() if load.concurrency is None else asyncio.Semaphore(load.concurrency)
    gaps = random.Random(load.seed)
    async with httpx.AsyncClient(headers=headers, limits=limits, timeout=load.timeout_s) as http:

        async def send(body: dict[str, object]) -> Answer:
            async with slots:
                return await stream_answer(http, load.url, body)

        started, tasks, due = time.perf_counter(), list[asyncio.Task[Answer]](), 0.0
        for body in load.bodies:
            if load.rate != float("inf"):
                await asyncio.sleep(started + due - time.perf_counter())
                due += gaps.expovariate(load.rate)
            tasks.append(asyncio.create_task(send(body)))
        answers = await asyncio.gather(*tasks)
        return answers, time.perf_counter() - started


async def stream_answer(http: httpx.AsyncClient, url: str, body: dict[str, object]) -> Answer:
    """Sends one request and reads its stream. A failure sets `error`, so that one bad request does not end a run."""
    answer = Answer(started=time.perf_counter())
    try:
        async with http.stream("POST", url, content=json.dumps(body), headers={"content-type": "application/json"}) as response:
            if response.status_code == httpx.codes.OK:
                await read_stream(response.aiter_bytes(), answer)
            else:
                await response.aread()
                answer.error = reason_of(response)
    except (httpx.HTTPError, msgspec.DecodeError) as error:
        answer.error = f"{type(error).__name__}: {error}"
    answer.end(time.perf_counter())
    return answer


async def read_stream(chunks: AsyncIterable[bytes], answer: Answer) -> None:
    """Adds the events of a streamed answer, as they arrive. Raises msgspec.DecodeError, and the errors of `chunks`."""
    async for arrived, data in _events(chunks):
        if data == b"[DONE]":
            return
        event = _decode(data)
        if event.error is not None:
            answer.error = str(event.error)
            return
        text = "".join(choice.shown() for choice in event.choices)
        if text:
            answer.arrivals.append(arrived)
            answer.texts.append(text)
        elif event.choices:
            answer.textless_arrivals.append(arrived)
        if event.usage is not None:
            answer.prompt_tokens, answer.completion_tokens = event.usage.prompt_tokens, event.usage.completion_tokens
    answer.error = "the stream ended without [DONE]"


async def _events(chunks: AsyncIterable[bytes]) -> AsyncIterator[tuple[float, bytes]]:
    """Yields time of arrival and data of each server-sent event; assumes one data line per event."""
    rest = b""
    async for chunk in chunks:
        arrived = time.perf_counter()
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line.startswith(b"data:"):
                yield arrived, line[5:].strip()


_WORDS = (
    "the of and to in a is that for it as was with be by on not he his but at are this have from or had an they which you were"
    " her all she there would their we him been has when who will more no if out so said what up its about into than them can"
    " only other new some could time these two may then do first any my now such like our over man me even most made after also"
    " did many before must through back years where much your way well down should because each just those people how too little"
    " state good very make world still own see men work long get here between both life being under never day same another know"
    " while last might us great old year off come since against go came right used take three"
).split()


def words(rng: random.Random, count: int) -> str:
    """Returns a random text of about `count` tokens."""
    return " ".join(rng.choice(_WORDS) for _ in range(count))


def texts(seed: int, num_prompts: int, shortest: int, longest: int) -> list[str]:
    """Returns prompts of mixed length in words."""
    rng = random.Random(seed)
    return [words(rng, rng.randint(shortest, longest)) for _ in range(num_prompts)]
