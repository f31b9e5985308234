"""Ten times the load that the runtime can bear, for a minute; then clients that leave.

    python -m bench.engine.overload MODEL --seconds 60

First the capacity is measured by a closed loop that fills every row. Then requests come at `--times` that rate, whether or not
others were answered. The bound of the queue in tokens over the measured rate says how long an admitted request may wait. At the
end clients open streams and leave; afterwards nothing may run, wait or hold a page. Exits 1 when a promise is broken.
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
"""How many times the queue's bound over the rate the 99th percentile of the admitted may wait."""
SETTLE_S = 30.0
"""Longest wait for the engine to become idle after the last client is gone."""


@dataclass(frozen=True, slots=True)
class Shape:
    """One request: prompt and output in tokens, the prompt drawn from this many ids. All prompts differ."""

    prompt: int
    output: int
    vocab: int

    def body(self, rng: random.Random) -> dict[str, object]:
        ids = [rng.randrange(self.vocab) for _ in range(self.prompt)]
        return {"prompt": ids, "max_tokens": self.output, "ignore_eos": True, "temperature": 0, "stream": True}


@dataclass(slots=True)
class Outcomes:
    """What became of the requests of one run."""

    ttft_s: list[float] = field(default_factory=list)
    whole: int = 0
    refused: int = 0
    retry_after_s: list[float] = field(default_factory=list)
    wrong: dict[str, int] = field(default_factory=dict)

    def blame(self, why: str) -> None:
        self.wrong[why] = self.wrong.get(why, 0) + 1


async def ask(session: aiohttp.ClientSession, url: str, body: dict[str, object], seen: Outcomes) -> None:
    """One request to its end."""
    started = time.perf_counter()
    try:
        async with session.post(f"{url}/v1/completions", json=body) as response:
            if response.status == 429:
                seen.refused += 1
                retry_after = response.headers.get("retry-after", "")
                if re.fullmatch(r"\d+", retry_after):
                    seen.retry_after_s.append(float(retry_after))
                else:
                    seen.blame(f"429 with Retry-After {retry_after!r}")
                return
            if response.status != 200:
                seen.blame(f"status {response.status}")
                return
            last = b""
            async for line in response.content:
                if line.startswith(b"data: "):
                    if not last:
                        seen.ttft_s.append(time.perf_counter() - started)
                    last = line
            if last.strip() == b"data: [DONE]":
                seen.whole += 1
            else:
                seen.blame("a stream without an end")
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        seen.blame(type(error).__name__)


async def capacity(session: aiohttp.ClientSession, url: str, shape: Shape, concurrency: int, seconds: float) -> float:
    """Requests per second of a closed loop."""
    seen, rng = Outcomes(), random.Random(1)
    until = time.perf_counter() + seconds

    async def worker() -> None:
        while time.perf_counter() < until:
            await ask(session, url, shape.body(rng), seen)

    started = time.perf_counter()
    await asyncio.gather(*(worker() for _ in range(concurrency)))
    if seen.wrong:
        raise RuntimeError(f"the runtime fails without any overload: {seen.wrong}")
    return seen.whole / (time.perf_counter() - started)


async def flood(session: aiohttp.ClientSession, url: str, shape: Shape, rate: float, seconds: float) -> tuple[Outcomes, float]:
    """What becomes of requests that come at this rate, and the seconds until the last was answered."""
    seen, rng = Outcomes(), random.Random(2)
    tasks: list[asyncio.Task[None]] = []
    started = time.perf_counter()
    while (now := time.perf_counter() - started) < seconds:
        while len(tasks) < now * rate:
            tasks.append(asyncio.create_task(ask(session, url, shape.body(rng), seen)))
        await asyncio.sleep(0.002)
    await asyncio.gather(*tasks)
    return seen, time.perf_counter() - started


async def leave(session: aiohttp.ClientSession, url: str, shape: Shape, count: int) -> dict[str, float]:
    """What the runtime holds after this many clients left in the middle of their streams."""
    rng = random.Random(3)

    async def one() -> None:
        async with session.post(f"{url}/v1/completions", json=shape.body(rng)) as response:
            await asyncio.sleep(rng.random() * 0.3)
            response.close()

    for first in range(0, count, 50):
        await asyncio.gather(*(one() for _ in range(first, min(first + 50, count))))
    deadline = time.perf_counter() + SETTLE_S
    while True:
        held = await gauges(session, url)
        if not any(held.values()) or time.perf_counter() > deadline:
            return held
        await asyncio.sleep(0.1)


async def gauges(session: aiohttp.ClientSession, url: str) -> dict[str, float]:
    """Requests that run and wait, pages that are held, pages that were leaked."""
    async with session.get(f"{url}/metrics") as response:
        text = await response.text()
    wanted = ("num_requests_running", "num_requests_waiting", "kv_cache_usage_perc", "page_leaks_total")
    found = re.findall(rf"^(?:vllm:|phalanx_)({'|'.join(wanted)}){{[^}}]*}} (\S+)$", text, re.MULTILINE)
    return {name: float(value) for name, value in found}


async def measure(args: argparse.Namespace, url: str) -> dict[str, Any]:
    """All figures of a run against this URL."""
    shape = Shape(args.input_len, args.output_len, args.vocab)
    timeout = aiohttp.ClientTimeout(total=600)
    async with aiohttp.ClientSession(connector=aiohttp.TCPConnector(limit=0), timeout=timeout) as session:
        most = args.max_num_seqs + args.max_num_queued_tokens // (2 * (shape.prompt + shape.output))
        bearable = await capacity(session, url, shape, most, args.calibrate_s)
        seen, took_s = await flood(session, url, shape, min(args.times * bearable, args.most_per_s), args.seconds)
        held = await leave(session, url, shape, args.disconnects)
    rate = seen.whole * (shape.prompt + shape.output) / took_s
    bound_s = args.max_num_queued_tokens / rate if rate else float("nan")
    return {
        "capacity_requests_per_s": bearable,
        "sent": seen.whole + seen.refused + sum(seen.wrong.values()),
        "answered": seen.whole,
        "refused": seen.refused,
        "wrong": seen.wrong,
        "retry_after_s_p50": percentile(seen.retry_after_s, 50),
        "tokens_per_s": rate,
        "queue_bound_s": bound_s,
        "ttft_s_p99": percentile(seen.ttft_s, 99),
        "ttft_over_bound": percentile(seen.ttft_s, 99) / bound_s,
        "held_after_disconnects": held,
    }


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m bench.engine.overload", description=(__doc__ or "").splitlines()[0])
    made.add_argument("model", help="a model folder")
    made.add_argument("--seconds", type=float, default=60.0)
    made.add_argument("--times", type=float, default=10.0, help="load over capacity")
    made.add_argument("--most-per-s", type=float, default=500.0, help="requests per second that this client sends at most")
    made.add_argument("--calibrate-s", type=float, default=10.0)
    made.add_argument("--input-len", type=int, default=64)
    made.add_argument("--output-len", type=int, default=32)
    made.add_argument("--vocab", type=int, default=256, help="prompt ids are below this")
    made.add_argument("--max-num-seqs", type=int, default=16)
    made.add_argument("--max-num-queued-tokens", type=int, default=4096)
    made.add_argument("--disconnects", type=int, default=500)
    made.add_argument("--json", type=Path, default=None)
    return made


def broken(figures: dict[str, Any]) -> list[str]:
    """Promises that were not kept."""
    found = [f"{count} times: {why}" for why, count in figures["wrong"].items()]
    if not figures["refused"]:
        found.append("nothing was refused, so this was no overload")
    if figures["ttft_over_bound"] > TTFT_BOUND:
        found.append(f"TTFT p99 is {figures['ttft_over_bound']:.2f} times the bound of the queue over the rate")
    return found + [
        f"{name} is {value:g} after the disconnects" for name, value in figures["held_after_disconnects"].items() if value
    ]


def main() -> int:
    """Runs everything against a runtime of its own; 1 when a promise is broken."""
    args = parser().parse_args()
    flags = [args.model, "--max-num-seqs", str(args.max_num_seqs), "--max-num-queued-tokens", str(args.max_num_queued_tokens)]
    with (
        tempfile.TemporaryDirectory() as folder,
        running("runtime", "phalanx_runtime", ["serve", *flags], Path(folder)) as program,
    ):
        figures = asyncio.run(measure(args, program.base_url))
    print(
        table(["", ""], [[name, f"{value:.2f}" if isinstance(value, float) else str(value)] for name, value in figures.items()])
    )
    if args.json is not None:
        args.json.write_text(json.dumps(figures, indent=2))
    wrong = broken(figures)
    for line in wrong:
        print("broken:", line)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
