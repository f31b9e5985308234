"""Measures the CPU time that traces cost a router: four routers over the same groups, in turn.

    python -m bench.router.tracing [--rounds 15] [--requests 1000]

Groups without a model (`bench.router.fake_group`), a collector that accepts and drops everything. Requests have 128 tokens in and
16 out, not streamed: spans cost per request, so longer requests have a smaller share. Prints the router's CPU time per request
without traces, and the ratio to it of a second router without traces (the noise of the machine), and with 1 % and with all
requests sampled. Then the time to record the spans of a request that is not exported. Exits with 1 if 1 % costs 1 %
more or above; 'not distinguishable' passes.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from concurrent.futures import ProcessPoolExecutor
from contextlib import ExitStack
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from bench.frame.figures import median_interval, percentile, table
from bench.frame.programs import Program, free_port, running, serving
from bench.router.cost import port_of, send_requests
from phalanx_api import wire
from phalanx_api.trace import ChunkTime, PrefillTime
from phalanx_frontend.auth.caller import end_trace
from phalanx_frontend.tracing.gen_ai import describe_request, describe_response
from phalanx_frontend.tracing.span import Span
from phalanx_frontend.tracing.tracer import SamplingRules, Tracer
from phalanx_router.streams.stream_trace import StreamTrace

BOUND = 1.01
CONCURRENCY = 20
RATIOS = {"off": None, "off again": None, "1 %": 0.01, "all": 1.0}


class _Collector(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["content-length"]))
        self.send_response(200)
        self.send_header("content-length", "0")
        self.end_headers()

    def log_message(self, format: str, *args: Any) -> None:
        pass


def routers(stack: ExitStack, folder: Path) -> dict[str, Program]:
    """Starts groups, a collector and a router for each ratio."""
    collector = ThreadingHTTPServer(("127.0.0.1", 0), _Collector)
    stack.callback(collector.shutdown)
    threading.Thread(target=collector.serve_forever, daemon=True).start()
    token = folder / "token"
    token.write_text("token of the bench")
    secret = ["--token-file", str(token)]
    groups = []
    for number in range(2):
        flags = [*secret, "--period-ms", "1", "--clock", str(folder / f"clock-{number}")]
        groups.append(stack.enter_context(running(f"group-{number}", "bench.router.fake_group", flags, folder)))
    leaders = ",".join(f"127.0.0.1:{port_of(group)}" for group in groups)
    started = {}
    for name, ratio in RATIOS.items():
        port = free_port()
        command = [sys.executable, "-m", "phalanx_router", "serve", "--port", str(port), "--leaders", leaders, *secret]
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_address[1]}"}
        variables |= {"OTEL_TRACES_SAMPLER_ARG": str(ratio)}
        env = None if ratio is None else {**os.environ, **variables}
        started[name] = stack.enter_context(serving(f"router-{port}", command, port, "/readyz", folder, 60, env))
    return started


def measure(rounds: int, requests: int) -> dict[str, list[float]]:
    """Returns milliseconds of CPU per request by router, of each round; the order rotates."""
    found: dict[str, list[float]] = {name: [] for name in RATIOS}
    names = list(RATIOS)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        clients = stack.enter_context(ProcessPoolExecutor(1, multiprocessing.get_context("spawn")))
        started = routers(stack, Path(folder))
        for round in range(-1, rounds):
            for name in names[round % len(names) :] + names[: round % len(names)]:
                router = started[name]
                before = router.cpu_s()
                clients.submit(send_requests, port_of(router), requests, CONCURRENCY).result()
                if round >= 0:  # the first warms up
                    found[name].append((router.cpu_s() - before) / requests * 1e3)
    return found


class _Dropped:
    """Implements `SpanExporter`."""

    def export(self, span: Span) -> None:
        pass

    def close(self) -> None:
        pass


def recording_us(requests: int) -> float:
    """Returns the microseconds to record the spans of a request that is dropped at its end."""
    tracer = Tracer(_Dropped(), SamplingRules(0.0))
    times = PrefillTime(submitted_ago_s=0.02, chunks=[ChunkTime(started_ago_s=0.02, ended_ago_s=0.0, tokens=128)])
    sampling = wire.Sampling(max_tokens=16, seed=1)
    request = wire.Request(id="a", epoch=0, prompt=[1] * 128, delivered=[], sampling=sampling)
    started = time.process_time()
    for _ in range(requests):
        trace = tracer.open("", "/v1/completions")
        describe_request(trace, "/v1/completions", "m", [request])
        stream = StreamTrace(trace)
        stream.queued()
        stream.chosen("g", "cost")
        stream.sent("g", 0)
        stream.first_token(0, times, 0, 1)
        trace.first_token(0.02)
        stream.ended(16, "")
        describe_response(trace, "a", 128, 16, ["length"])
        end_trace(trace, "a", 200)
    return (time.process_time() - started) / requests * 1e6


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--requests", type=int, default=1000)
    args = parser.parse_args()
    found = measure(args.rounds, args.requests)
    rows, verdict = [], ""
    for name, times in found.items():
        ratios = median_interval([own / off for own, off in zip(times, found["off"], strict=True)])
        if name == "1 %":
            verdict = ratios.verdict(BOUND, is_least=False)
        interval = "" if name == "off" else f"{ratios.middle:.3f} ({ratios.low:.3f} to {ratios.high:.3f})"
        rows.append([name, f"{percentile(times, 50):.3f}", interval])
    print(table(["sampled", "ms of CPU per request", "ratio to off"], rows))
    print(f"\nrecording the spans of a request: {recording_us(20 * args.requests):.1f} us")
    print(f"at most {BOUND} with 1 %: {verdict}")
    return 1 if verdict == "NO" else 0


if __name__ == "__main__":
    sys.exit(main())
