"""Replays a trace of requests to any OpenAI-compatible URL, at the trace's times regardless of responses.

    python -m bench.router.replay --base-url http://127.0.0.1:8000 --model NAME --trace FILE [--speed 2] [--length-share 0.1]

Traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens; or JSON lines with timestamp (ms), input_length, output_length and
hash_ids. Requests with equal leading ids have equal leading text, so that prefix caches work as they did for the trace. A prompt
has about one word per token. Prints the figures of `bench.engine.serve`; exits with 1 if a request failed.
"""

import argparse
import asyncio
import csv
import json
import random
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from itertools import islice
from pathlib import Path

from bench.engine.serve import format_figures, measure
from bench.frame.client import Answer, session_for, stream_answer
from bench.frame.workload import words

BLOCK_TOKENS = 512
"""Tokens of one block of `hash_ids`."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float  # since the first request
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()  # of the prompt, if known


def read_trace(path: Path) -> Iterator[Arrival]:
    """Yields the trace's requests. Raises ValueError for an unknown format."""
    with path.open(newline="") as lines:
        yield from _from_json(lines) if path.suffix == ".jsonl" else _from_csv(lines)


def _from_csv(lines: Iterator[str]) -> Iterator[Arrival]:
    first: datetime | None = None
    for row in csv.DictReader(lines):
        try:
            at = datetime.fromisoformat(row["TIMESTAMP"][:26])
            tokens = int(row["ContextTokens"]), int(row["GeneratedTokens"])
        except KeyError as error:
            raise ValueError(f"the trace has no column {error}") from error
        first = first or at
        yield Arrival((at - first).total_seconds(), *tokens)


def _from_json(lines: Iterator[str]) -> Iterator[Arrival]:
    first: float | None = None
    for line in lines:
        row = json.loads(line)
        try:
            at, blocks = row["timestamp"] / 1000, tuple(row["hash_ids"])
            tokens = row["input_length"], row["output_length"]
        except KeyError as error:
            raise ValueError(f"a line of the trace has no {error}") from error
        first = at if first is None else first
        yield Arrival(at - first, *tokens, blocks)


def prompt_of(arrival: Arrival, number: int, share: float) -> str:
    """Returns a text of about `share` times the request's tokens. Equal blocks give equal parts; the remainder is unique."""
    num_words = max(1, round(arrival.input_tokens * share))
    size = max(1, round(BLOCK_TOKENS * share))
    # The last block is partial and identified by its whole content, so it is not shared.
    parts = [words(random.Random(block), size) for block in arrival.blocks[: num_words // size]]
    rest = num_words - size * len(parts)
    if rest > 0:
        parts.append(words(random.Random(f"request {number}"), rest))
    return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Replay:
    url: str
    model: str
    arrivals: list[Arrival]
    speed: float = 1.0  # relative to the trace
    share: float = 1.0  # factor of lengths
    api_key: str | None = None
    timeout_s: float = 600.0


async def replay(settings: Replay) -> tuple[list[Answer], float, float]:
    """Returns all answers, their duration, and the maximum delay of sending in seconds."""
    max_delay_s = 0.0
    async with session_for(0, settings.api_key, settings.timeout_s) as session:
        started = time.perf_counter()

        async def send(number: int, arrival: Arrival) -> Answer:
            nonlocal max_delay_s
            due = arrival.at_s / settings.speed
            body = _body(settings, arrival, number)
            await asyncio.sleep(max(0.0, due - (time.perf_counter() - started)))
            max_delay_s = max(max_delay_s, time.perf_counter() - started - due)
            return await stream_answer(session, settings.url, body)

        answers = await asyncio.gather(*(send(number, arrival) for number, arrival in enumerate(settings.arrivals)))
        return answers, time.perf_counter() - started, max_delay_s


def _body(settings: Replay, arrival: Arrival, number: int) -> dict[str, object]:
    return {
        "model": settings.model,
        "prompt": prompt_of(arrival, number, settings.share),
        "max_tokens": max(1, round(arrival.output_tokens * settings.share)),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        prog="python -m bench.router.replay", description="Replay a trace against an OpenAI-compatible URL."
    )
    flags.add_argument("--base-url", required=True)
    flags.add_argument("--model", required=True, help="the served model's name")
    flags.add_argument("--trace", type=Path, required=True, help="a .csv or .jsonl file")
    flags.add_argument("--max-requests", type=int, default=None, help="maximum number of requests")
    flags.add_argument("--speed", type=float, default=1.0, help="speed relative to the trace")
    flags.add_argument("--length-share", type=float, default=1.0, help="factor of lengths, for models with short contexts")
    flags.add_argument("--api-key", default=None)
    flags.add_argument("--timeout-s", type=float, default=600.0, help="timeout of one request")
    flags.add_argument("--json", type=Path, default=None, help="file for the figures as JSON")
    return flags


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    url = args.base_url.rstrip("/").removesuffix("/v1") + "/v1/completions"
    arrivals = list(islice(read_trace(args.trace), args.max_requests))
    settings = Replay(url, args.model, arrivals, args.speed, args.length_share, args.api_key, args.timeout_s)
    answers, duration_s, max_delay_s = asyncio.run(replay(settings))
    figures = measure(answers, duration_s) | {"max_delay_s": max_delay_s}
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(format_figures(figures))
    return 1 if figures["num_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
