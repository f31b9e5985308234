"""Measures admission at ten times the runtime's capacity, and what remains after clients disconnect.

    python -m bench.engine.overload MODEL --seconds 60

A closed loop that fills every row measures the capacity. Then requests arrive at `--times` that rate, independent of responses.
Queue bound in tokens over the measured token rate bounds the P99 TTFT of admitted requests. At the end clients open streams and
disconnect. Exits with 1 if a response is neither complete nor 429 with `Retry-After`, if nothing was refused, if the P99 TTFT
exceeds 1.5 times its bound, or if a request or a page remains after the disconnects.
"""

import argparse
import asyncio
import json
import random
import re
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import aiohttp

from bench.frame.figures import percentile, table
from bench.frame.programs import running

TTFT_BOUND = 1.5
"""Maximum P99 TTFT of admitted requests, as a multiple of queue bound over rate."""
SETTLE_S = 30.0
"""Maximum wait until the engine is idle after the last disconnect."""


@dataclass(frozen=True, slots=True)
class Shape:
    """Lengths of one request. Prompts are random."""

    prompt: int  # tokens
    output: int  # tokens
    vocab: int  # prompt ids are below this

    def body(self, rng: random.Random) -> dict[str, object]:
        ids = [rng.randrange(self.vocab) for _ in range(self.prompt)]
        return {"prompt": ids, "max_tokens": self.output, "ignore_eos": True, "temperature": 0, "stream": True}


@dataclass(slots=True)
class Outcomes:
    ttft_s: list[float] = field(default_factory=list)
    completed: int = 0
    refused: int = 0
    retry_after_s: list[float] = field(default_factory=list)
    failures: dict[str, int] = field(default_factory=dict)

    def count_failure(self, reason: str) -> None:
        self.failures[reason] = self.failures.get(reason, 0) + 1


async def send_request(session: aiohttp.ClientSession, url: str, body: dict[str, object], outcomes: Outcomes) -> None:
    started = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status == 429:
                outcomes.refused += 1
                retry_after = response.headers.get("retry-after", "")
                if re.fullmatch(r"\d+", retry_after):
                    outcomes.retry_after_s.append(float(retry_after))
                else:
                    outcomes.count_failure(f"429 with Retry-After {retry_after!r}")
                return
            if response.status != 200:
                outcomes.count_failure(f"status {response.status}")
                return
            last = b""
            async for line in response.content:
                if line.startswith(b"data: "):
                    if not last:
                        outcomes.ttft_s.append(time.perf_counter() - started)
                    last = line
            if last.strip() == b"data: [DONE]":
                outcomes.completed += 1
            else:
                outcomes.count_failure("a stream without an end")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        outcomes.count_failure(type(error).__name__)


async def capacity(session: aiohttp.ClientSession, url: str, shape: Shape, concurrency: int, seconds: float) -> float:
    """Returns the requests per second of a closed loop. Raises RuntimeError if a request fails."""
    outcomes, rng = Outcomes(), random.Random(1)
    until = time.perf_counter() + seconds

    async def worker() -> None:
        while time.perf_counter() < until:
            await send_request(session, url, shape.body(rng), outcomes)

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    if outcomes.failures:
        raise RuntimeError(f"the runtime fails without overload: {outcomes.failures}")
    return outcomes.completed / (time.perf_counter() - started)


async def send_at_rate(
    session: aiohttp.ClientSession, url: str, shape: Shape, rate: float, seconds: float
) -> tuple[Outcomes, float]:
    """Sends requests at this rate; returns their outcomes and the seconds until the last response."""
    outcomes, rng = Outcomes(), random.Random(2)
    tasks: list[asyncio.Task[None]] = []
    started = time.perf_counter()
    while (now := time.perf_counter() - started) < seconds:
        while len(tasks) < now * rate:
            tasks.append(asyncio.create_task(send_request(session, url, shape.body(rng), outcomes)))
        await asyncio.sleep(0.002)
    await asyncio.gather(*tasks)
    return outcomes, time.perf_counter() - started


async def disconnect(session: aiohttp.ClientSession, url: str, shape: Shape, count: int) -> dict[str, float]:
    """Disconnects `count` clients in the middle of their streams; returns the gauges after the engine became idle."""
    rng = random.Random(3)

    async def open_and_close() -> None:
        async with session.post(f"{url}/v1/completions", json=shape.body(rng)) as response:
            await asyncio.sleep(rng.random() * 0.3)
            response.close()

    for first in range(0, count, 50):
        await asyncio.gather(*(open_and_close() for _ in range(first, min(first + 50, count))))
    deadline = time.perf_counter() + SETTLE_S
    while True:
        remaining = await gauges(session, url)
        if not any(remaining.values()) or time.perf_counter() > deadline:
            return remaining
        await asyncio.sleep(0.1)


async def gauges(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    names = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "page_leaks_total")
    found = re.findall(rf"^(?:vllm:|phalanx_)({'|'.join(names)}){{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


async def measure(args: argparse.Namespace, url: str) -> dict[str, Any]:
    shape = Shape(args.input_len, args.output_len, args.vocab)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        concurrency = args.max_num_seqs + args.max_num_queued_tokens // (2 * (shape.prompt + shape.output))
        max_rate = await capacity(session, url, shape, concurrency, args.calibrate_s)
        outcomes, duration_s = await send_at_rate(session, url, shape, min(args.times * max_rate, args.most_per_s), args.seconds)
        remaining = await disconnect(session, url, shape, args.disconnects)
    token_rate = outcomes.completed * (shape.prompt + shape.output) / duration_s
    bound_s = args.max_num_queued_tokens / token_rate if token_rate else float("nan")
    return {
        "capacity_requests_per_s": max_rate,
        "sent": outcomes.completed + outcomes.refused + sum(outcomes.failures.values()),
        "answered": outcomes.completed,
        "refused": outcomes.refused,
        "failures": outcomes.failures,
        "retry_after_s_p50": percentile(outcomes.retry_after_s, 50),
        "tokens_per_s": token_rate,
        "queue_bound_s": bound_s,
        "ttft_s_p99": percentile(outcomes.ttft_s, 99),
        "ttft_over_bound": percentile(outcomes.ttft_s, 99) / bound_s,
        "remaining_after_disconnects": remaining,
    }


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="python -m bench.engine.overload", description=(__doc__ or "").splitlines()[0])
    flags.add_argument("model", help="a model folder")
    flags.add_argument("--seconds", type=float, default=60.0)
    flags.add_argument("--times", type=float, default=10.0, help="load as a multiple of the capacity")
    flags.add_argument("--most-per-s", type=float, default=500.0, help="maximum requests per second of this client")
    flags.add_argument("--calibrate-s", type=float, default=10.0)
    flags.add_argument("--input-len", type=int, default=64)
    flags.add_argument("--output-len", type=int, default=32)
    flags.add_argument("--vocab", type=int, default=256, help="prompt ids are below this")
    flags.add_argument("--max-num-seqs", type=int, default=16)
    flags.add_argument("--max-num-queued-tokens", type=int, default=4096)
    flags.add_argument("--disconnects", type=int, default=500)
    flags.add_argument("--json", type=Path, default=None)
    return flags


def violations(figures: dict[str, Any]) -> list[str]:
    found = [f"{count} times: {reason}" for reason, count in figures["failures"].items()]
    if not figures["refused"]:
        found.append("no request was refused: no overload")
    if figures["ttft_over_bound"] > TTFT_BOUND:
        found.append(f"TTFT p99 is {figures['ttft_over_bound']:.2f} times queue bound over rate")
    return found + [
        f"{name} is {value:g} after the disconnects" for name, value in figures["remaining_after_disconnects"].items() if value
    ]


def main() -> int:
    args = parser().parse_args()
    serve_flags = [
        args.model,
        "--max-num-seqs",
        str(args.max_num_seqs),
        "--max-num-queued-tokens",
        str(args.max_num_queued_tokens),
    ]
    with (
        tempfile.TemporaryDirectory() as folder,
        running("runtime", "phalanx_runtime", ["serve", *serve_flags], Path(folder)) as program,
    ):
        figures = asyncio.run(measure(args, program.base_url))
    print(
        table(["", ""], [[name, f"{value:.2f}" if isinstance(value, float) else str(value)] for name, value in figures.items()])
    )
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2))
    found = violations(figures)
    for line in found:
        print("violated:", line)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
