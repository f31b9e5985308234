"""Replays a trace of arrivals against any OpenAI-compatible URL, at its own times whatever the answers take.

    python -m bench.router.replay --base-url http://127.0.0.1:8000 --model NAME --trace FILE [--speed 2] [--length-share 0.1]

Traces: CSV with TIMESTAMP, ContextTokens, GeneratedTokens; or lines of JSON with timestamp (ms), input_length, output_length
and hash_ids, where requests that begin with the same ids begin with the same text, so that a prefix cache has what it had there.
A prompt is about one word per token. Exits 1 when a request failed.
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

from bench.engine.serve import measure, shown
from bench.frame.client import Answer, session_for, stream_answer
from bench.frame.workload import words

BLOCK_TOKENS = 512
"""Tokens that one of hash_ids stands for."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """One request of a trace: seconds after the first, tokens in and out, and the blocks that its prompt is made of, if told."""

    at_s: float
    input_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] = ()


def read_trace(path: Path) -> Iterator[Arrival]:
    """The trace's requests, from the first on. Raises ValueError when a line is of no known kind."""
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
    """A text of about share times the request's tokens. Equal blocks give equal parts; what is left over is the request's own."""
    wanted = max(1, round(arrival.input_tokens * share))
    size = max(1, round(BLOCK_TOKENS * share))
    # The last block is partly filled, and named by its whole content: no other request goes on from it.
    parts = [words(random.Random(block), size) for block in arrival.blocks[: wanted // size]]
    rest = wanted - size * len(parts)
    if rest > 0:
        parts.append(words(random.Random(f"request {number}"), rest))
    return " ".join(parts)


@dataclass(frozen=True, slots=True)
class Replay:
    """What is replayed, where, and how: `speed` times as fast, lengths times `share`."""

    url: str
    model: str
    arrivals: list[Arrival]
    speed: float = 1.0
    share: float = 1.0
    api_key: str | None = None
    timeout_s: float = 600.0


async def replay(asked: Replay) -> tuple[list[Answer], float, float]:
    """All answers, the seconds that they took, and how many seconds the latest request was sent late."""
    latest = 0.0
    async with session_for(0, asked.api_key, asked.timeout_s) as session:
        began = time.perf_counter()

        async def one(number: int, arrival: Arrival) -> Answer:
            nonlocal latest
            due = arrival.at_s / asked.speed
            body = _body(asked, arrival, number)
            await asyncio.sleep(max(0.0, due - (time.perf_counter() - began)))
            latest = max(latest, time.perf_counter() - began - due)
            return await stream_answer(session, asked.url, body)

        answers = await asyncio.gather(*(one(number, arrival) for number, arrival in enumerate(asked.arrivals)))
        return answers, time.perf_counter() - began, latest


def _body(asked: Replay, arrival: Arrival, number: int) -> dict[str, object]:
    return {
        "model": asked.model,
        "prompt": prompt_of(arrival, number, asked.share),
        "max_tokens": max(1, round(arrival.output_tokens * asked.share)),
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(
        prog="python -m bench.router.replay", description="Replay a trace against an OpenAI-compatible URL."
    )
    made.add_argument("--base-url", required=True)
    made.add_argument("--model", required=True, help="the served model's name")
    made.add_argument("--trace", type=Path, required=True, help="a .csv or .jsonl file")
    made.add_argument("--max-requests", type=int, default=None, help="only the first so many")
    made.add_argument("--speed", type=float, default=1.0, help="times as fast as the trace")
    made.add_argument("--length-share", type=float, default=1.0, help="lengths times this, for models with short contexts")
    made.add_argument("--api-key", default=None)
    made.add_argument("--timeout-s", type=float, default=600.0, help="longest time of one request")
    made.add_argument("--json", type=Path, default=None, help="write the figures here too")
    return made


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 when a request failed."""
    args = parser().parse_args(argv)
    url = args.base_url.rstrip("/").removesuffix("/v1") + "/v1/completions"
    arrivals = list(islice(read_trace(args.trace), args.max_requests))
    asked = Replay(url, args.model, arrivals, args.speed, args.length_share, args.api_key, args.timeout_s)
    answers, seconds, late = asyncio.run(replay(asked))
    figures = measure(answers, seconds) | {"sent_late_s": late}
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2) + "\n")
    print(shown(figures))
    return 1 if figures["num_failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
