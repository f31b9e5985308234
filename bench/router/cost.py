"""Measures the cost of a router compared with the group directly.

    python -m bench.router.cost [--quick] [--only streaming]

Groups without a model (`bench.router.fake_group`), a router and clients share one machine. CPU times are those of the router
process; latencies come from runs through the router and directly, in turn. Bounds, for the exit status:

    50 us of CPU per streamed token, one token per event     150 KiB per open stream, 10,000 open
    2 ms of CPU per request, 128 tokens in, 16 out           2 ms added at the median, 1 stream and 64 paced ones

The age of a token is the time from its step in the group to its arrival at the client, which reads the step number from the text.
"""

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.frame.figures import percentile, table
from bench.frame.programs import Program, running
from bench.router.fake_group import FIRST_ID, NUM_SYMBOLS, StepClock

PROMPT = "x" * 128
"""128 tokens of a tokenizer with one token per byte."""
BOUNDS = {"us_per_token": 50.0, "ms_per_request": 2.0, "kib_per_stream": 150.0, "added_ms": 2.0}


@dataclass(frozen=True, slots=True)
class Sizes:
    streams: int = 64
    tokens: int = 500
    requests: int = 2000
    open_streams: int = 10_000
    pairs: int = 5  # runs of router and group, in turn
    paced_tokens: int = 150


QUICK = Sizes(tokens=100, requests=300, open_streams=500, pairs=1, paced_tokens=50)


def head(body: bytes) -> bytes:
    lines = ["POST /v1/completions HTTP/1.1", "host: x", "content-type: application/json", f"content-length: {len(body)}"]
    return "\r\n".join(lines).encode() + b"\r\n"


def encode_body(max_tokens: int, stream: bool) -> bytes:
    return json.dumps({"prompt": PROMPT, "max_tokens": max_tokens, "stream": stream, "ignore_eos": True}).encode()


@dataclass(frozen=True, slots=True)
class ReadResult:
    events: int  # with text
    ages_s: list[float]  # of tokens


async def _read_stream(port: int, max_tokens: int, clock: StepClock | None) -> ReadResult:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    body = encode_body(max_tokens, stream=True)
    writer.write(head(body) + b"connection: close\r\n\r\n" + body)
    events, ages = 0, list[float]()
    while line := await reader.readline():
        if line.startswith(b"data: {"):
            arrived = time.monotonic()
            text = json.loads(line[6:])["choices"][0]["text"]
            events += bool(text)
            if clock is not None and text:
                ages.append(arrived - clock.time_of((SYMBOLS[text[-1]] - FIRST_ID) % NUM_SYMBOLS))
    writer.close()
    return ReadResult(events, ages)


def _symbols() -> dict[str, int]:
    from tokenizers import Tokenizer

    from bench.router.api_server import bench_assets

    tokenizer = Tokenizer.from_buffer(bench_assets().files["tokenizer.json"])
    return {tokenizer.decode([id]): id for id in range(FIRST_ID, FIRST_ID + NUM_SYMBOLS)}


SYMBOLS = _symbols()


def read_streams(port: int, streams: int, max_tokens: int, clock: str | None) -> ReadResult:
    """Reads all streams at once in this process."""

    async def read_all() -> list[ReadResult]:
        times = StepClock(Path(clock)) if clock else None
        return await asyncio.gather(*(_read_stream(port, max_tokens, times) for _ in range(streams)))

    reads = asyncio.run(read_all())
    return ReadResult(sum(read.events for read in reads), [age for read in reads for age in read.ages_s])


def send_requests(port: int, requests: int, concurrency: int) -> float:
    """Returns the seconds for non-streamed requests over persistent connections."""

    async def worker(count: int) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        body = encode_body(16, stream=False)
        for _ in range(count):
            writer.write(head(body) + b"\r\n" + body)
            answer = await reader.readuntil(b"\r\n\r\n")
            if not answer.startswith(b"HTTP/1.1 200"):
                raise RuntimeError(answer.decode())
            length = next(line for line in answer.lower().split(b"\r\n") if line.startswith(b"content-length:"))
            await reader.readexactly(int(length.partition(b":")[2]))
        writer.close()

    async def run_all() -> None:
        await asyncio.gather(*(worker(requests // concurrency) for _ in range(concurrency)))

    started = time.perf_counter()
    asyncio.run(run_all())
    return time.perf_counter() - started


def open_streams(
    port: int, streams: int, ready: "multiprocessing.synchronize.Event", stop: "multiprocessing.synchronize.Event"
) -> None:
    """Opens endless streams, sets `ready` when each had a token, and holds them until `stop`."""

    async def open_stream(gate: asyncio.Semaphore) -> asyncio.StreamWriter:
        async with gate:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            body = encode_body(900_000, stream=True)
            writer.write(head(body) + b"connection: close\r\n\r\n" + body)
            while not (await reader.readline()).startswith(b"data: "):
                pass
        task = asyncio.ensure_future(_drain(reader))
        _DRAINS.add(task)
        return writer

    async def run_all() -> None:
        gate = asyncio.Semaphore(MAX_OPENING)
        writers = await asyncio.gather(*(open_stream(gate) for _ in range(streams)))
        ready.set()
        while not stop.is_set():
            await asyncio.sleep(0.1)
        for writer in writers:
            writer.transport.abort()

    asyncio.run(run_all())


MAX_OPENING = 1000
"""Streams that wait for their first token at once."""
_DRAINS: set[asyncio.Future[None]] = set()


async def _drain(reader: asyncio.StreamReader) -> None:
    try:
        while await reader.read(1 << 16):
            pass
    except ConnectionError:
        return


def rss_kib(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(next(line for line in status.splitlines() if line.startswith("VmRSS")).split()[1])


def port_of(program: Program) -> int:
    return int(program.base_url.rpartition(":")[2])


class Bench:
    def __init__(self, folder: Path, sizes: Sizes, clients: ProcessPoolExecutor) -> None:
        self.sizes = sizes
        self._folder = folder
        self._clients = clients
        self._token = folder / "token"
        self._token.write_text("token of the bench")

    def programs(self, stack: ExitStack, period_ms: float, groups: int = 2) -> tuple[Program, Program, str]:
        """Starts a router and its groups; returns the router, one group, and the clock file of that group. All are warm."""
        clock = self._folder / f"clock-{period_ms}"
        secret = ["--token-file", str(self._token)]
        started_groups = []
        for number in range(groups):
            flags = [*secret, "--period-ms", str(period_ms), "--clock", f"{clock}.{number}"]
            started_groups.append(
                stack.enter_context(running(f"group-{number}-{period_ms}", "bench.router.fake_group", flags, self._folder))
            )
        leaders = ",".join(f"127.0.0.1:{port_of(group)}" for group in started_groups)
        flags = ["serve", "--leaders", leaders, *secret]
        router = stack.enter_context(running(f"router-{period_ms}", "phalanx_router", flags, self._folder))
        time.sleep(1.0)
        for program in (router, started_groups[0]):
            self._run(read_streams, port_of(program), 4, 2, None)
        return router, started_groups[0], f"{clock}.0"

    def _run(self, work: Callable[..., object], *arguments: object) -> object:
        return self._clients.submit(work, *arguments).result()

    def streaming(self) -> dict[str, float]:
        """Measures the router's CPU per streamed token at a step every 20 ms, and tokens per event."""
        with ExitStack() as stack:
            router, _, _ = self.programs(stack, 20.0)
            before, started = router.cpu_s(), time.perf_counter()
            read = self._run(read_streams, port_of(router), self.sizes.streams, self.sizes.tokens, None)
            cpu_s, duration_s = router.cpu_s() - before, time.perf_counter() - started
        assert isinstance(read, ReadResult)
        tokens = self.sizes.streams * self.sizes.tokens
        return {
            "us_per_token": cpu_s / tokens * 1e6,
            "tokens_per_event": tokens / max(1, read.events),
            "tokens_per_s": tokens / duration_s,
            "tokens_per_s_per_core": tokens / cpu_s,
        }

    def requests(self) -> dict[str, float]:
        with ExitStack() as stack:
            router, _, _ = self.programs(stack, 1.0)
            self._run(send_requests, port_of(router), 100, 10)
            before = router.cpu_s()
            duration_s = self._run(send_requests, port_of(router), self.sizes.requests, 20)
            cpu_s = router.cpu_s() - before
        assert isinstance(duration_s, float)
        request_ms = cpu_s / self.sizes.requests * 1e3
        return {
            "ms_per_request": request_ms,
            "requests_per_s": self.sizes.requests / duration_s,
            "requests_per_s_per_core": 1e3 / request_ms,
        }

    def memory(self) -> dict[str, float]:
        """Measures the router's resident memory per open stream; each stream gets a token every five seconds."""
        context = multiprocessing.get_context("spawn")
        with ExitStack() as stack:
            router, _, _ = self.programs(stack, 5000.0)
            ready, stop = context.Event(), context.Event()
            before = rss_kib(router.process.pid)
            client = context.Process(target=open_streams, args=(port_of(router), self.sizes.open_streams, ready, stop))
            client.start()
            try:
                while not ready.wait(1.0):
                    if not client.is_alive():
                        raise RuntimeError("the client that opens streams exited")
                after = rss_kib(router.process.pid)
            finally:
                stop.set()
                client.join()
        return {"kib_per_stream": (after - before) / self.sizes.open_streams, "open": float(self.sizes.open_streams)}

    def added(self, streams: int) -> dict[str, float]:
        """Measures median ages of tokens through the router and directly, in turn, and their difference."""
        ages: dict[str, list[float]] = {"router": [], "direct": []}
        with ExitStack() as stack:
            router, group, clock = self.programs(stack, 20.0, groups=1)
            for _ in range(self.sizes.pairs):
                for name, program in (("router", router), ("direct", group)):
                    read = self._run(read_streams, port_of(program), streams, self.sizes.paced_tokens, clock)
                    assert isinstance(read, ReadResult)
                    ages[name] += read.ages_s
        router_ms, direct_ms = (percentile(ages[name], 50) * 1e3 for name in ("router", "direct"))
        return {"added_ms": router_ms - direct_ms, "router_ms": router_ms, "direct_ms": direct_ms}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="smaller sizes")
    parser.add_argument("--only", choices=["streaming", "whole", "memory", "latency"], help="measure only this part")
    parser.add_argument("--json", type=Path, help="file for the figures as JSON")
    args = parser.parse_args()
    sizes = QUICK if args.quick else Sizes()
    with tempfile.TemporaryDirectory() as folder, ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients:
        bench = Bench(Path(folder), sizes, clients)
        parts: dict[str, Callable[[], dict[str, float]]] = {
            "streaming": bench.streaming,
            "whole": bench.requests,
            "memory": bench.memory,
            "latency, 1 stream": lambda: bench.added(1),
            f"latency, {sizes.streams} streams": lambda: bench.added(sizes.streams),
        }
        found = {name: part() for name, part in parts.items() if args.only is None or name.startswith(args.only)}
    rows, all_met = [], True
    for part, figures in found.items():
        for name, value in figures.items():
            bound = BOUNDS.get(name)
            is_met = bound is None or value <= bound
            all_met &= is_met
            verdict = ["", ""] if bound is None else [f"{bound:g}", "yes" if is_met else "NO"]
            rows.append([part, name, f"{value:,.2f}", *verdict])
    print(table(["part", "figure", "value", "at most", "holds"], rows))
    if args.json is not None:
        args.json.write_text(json.dumps({"sizes": asdict(sizes), "figures": found}, indent=1))
    return 0 if all_met else 1


if __name__ == "__main__":
    sys.exit(main())
