"""Requests at given times, whatever the answers do, from several client processes."""

import asyncio
import multiprocessing
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path

from bench.frame.client import Answer, session_for, stream_answer
from bench.router.replay import Arrival, read_trace

TRACES = ("../shared/traces", "shared/traces")
TRACE_FILE = "AzureLLMInferenceTrace_conv.csv"
FIRST_TOKEN = 300
START_S = 1.0
"""Time for the client processes to connect before the first request."""


def conversation(count: int, max_prompt: int, root: Path = Path()) -> tuple[list[Arrival], str]:
    """Returns requests of a conversation trace and its name: a file below `root` if there is one, else synthetic."""
    for folder in TRACES:
        path = root / folder / TRACE_FILE
        if path.is_file():
            return [_cut(one, max_prompt) for one in islice(read_trace(path), count)], TRACE_FILE
    return [_cut(one, max_prompt) for one in synthetic(count)], "synthetic: lognormal lengths, exponential gaps"


def synthetic(count: int, seed: int = 0) -> list[Arrival]:
    """Returns requests with the medians of the conversation trace: about 1,000 prompt and 130 output tokens, 5 per second."""
    rng, at_s, found = random.Random(seed), 0.0, list[Arrival]()
    for _ in range(count):
        at_s += rng.expovariate(5.0)
        found.append(Arrival(at_s, max(1, round(rng.lognormvariate(6.9, 0.9))), max(1, round(rng.lognormvariate(4.9, 0.8)))))
    return found


def _cut(arrival: Arrival, max_prompt: int) -> Arrival:
    output = min(arrival.output_tokens, max_prompt // 2)
    return replace(arrival, input_tokens=min(arrival.input_tokens, max_prompt), output_tokens=output, blocks=())


def paced(arrivals: Sequence[Arrival], rate: float) -> list[Arrival]:
    """Returns the requests with the gaps between them scaled to a mean of `rate` requests per second."""
    first, last = arrivals[0].at_s, arrivals[-1].at_s
    scale = (len(arrivals) - 1) / rate / (last - first) if last > first else 0.0
    return [replace(arrival, at_s=(arrival.at_s - first) * scale) for arrival in arrivals]


def steady(rate: float, seconds: float, prompt: int, output: int, seed: int = 0) -> list[Arrival]:
    """Returns equal requests with exponential gaps."""
    rng, at_s, found = random.Random(seed), 0.0, list[Arrival]()
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        found.append(Arrival(at_s, prompt, output))
    return found


def body_of(arrival: Arrival, vocab_size: int, seed: int) -> dict[str, object]:
    """Returns a streamed greedy completion with a random prompt of exactly these token counts."""
    rng = random.Random(seed)
    first = min(FIRST_TOKEN, vocab_size // 2)
    return {
        "model": "bench",
        "prompt": [rng.randrange(first, vocab_size) for _ in range(arrival.input_tokens)],
        "max_tokens": arrival.output_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


@dataclass(frozen=True, slots=True)
class Sent:
    """Answers of one or all client processes."""

    answers: list[Answer]
    cpu_s: float
    """CPU time of the busiest process while it sent."""
    seconds: float
    late_s: float
    """Longest delay of a request behind its time."""


def send_all(urls: Sequence[str], arrivals: Sequence[Arrival], vocab_size: int, clients: int) -> Sent:
    """Sends the requests at their times, in turn from each client process and to each URL."""
    context = multiprocessing.get_context("spawn")
    numbered = list(enumerate(arrivals))
    with ProcessPoolExecutor(clients, context) as pool:
        list(pool.map(int, range(clients)))  # the processes start before the clock does
        start_at = time.time() + START_S
        jobs = [
            pool.submit(_send_part, urls[part % len(urls)], numbered[part::clients], vocab_size, start_at)
            for part in range(clients)
        ]
        parts = [job.result() for job in jobs]
    return Sent(
        answers=[answer for part in parts for answer in part.answers],
        cpu_s=max(part.cpu_s for part in parts),
        seconds=max(part.seconds for part in parts),
        late_s=max(part.late_s for part in parts),
    )


def _send_part(url: str, numbered: Sequence[tuple[int, Arrival]], vocab_size: int, start_at: float) -> Sent:
    return asyncio.run(_send(url, numbered, vocab_size, start_at))


async def _send(url: str, numbered: Sequence[tuple[int, Arrival]], vocab_size: int, start_at: float) -> Sent:
    bodies = [body_of(arrival, vocab_size, number) for number, arrival in numbered]
    late_s = 0.0
    async with session_for(0, None, 120.0) as session:
        await asyncio.sleep(max(0.0, start_at - time.time()))
        started, cpu_before = time.perf_counter(), time.process_time()

        async def send_one(at_s: float, body: dict[str, object]) -> Answer:
            nonlocal late_s
            await asyncio.sleep(max(0.0, at_s - (time.perf_counter() - started)))
            late_s = max(late_s, time.perf_counter() - started - at_s)
            return await stream_answer(session, url, body)

        answers = await asyncio.gather(*(send_one(one.at_s, body) for (_, one), body in zip(numbered, bodies, strict=True)))
        return Sent(answers, time.process_time() - cpu_before, time.perf_counter() - started, late_s)
