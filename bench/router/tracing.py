"""Measures the CPU time that traces cost a router: four routers over the same groups, in turn.

    python -m bench.router.tracing [--rounds 15] [--requests 1000]

Groups without a model (`bench.router.fake_group`), a collector that accepts and drops everything. Requests have 128 tokens in and
16 out, not streamed: spans cost per request, so longer requests have a smaller share. Prints the router's CPU time per request
without traces, and the ratio to it of a second router without traces (the noise of the machine), and with 1 % and with all
requests sampled. The noise is larger than 1 %, so it also prints what 1 % costs by its parts, of each round: the time to record
the spans of a request, and a hundredth of what exporting all adds. Exits with 1 if one of the two is 1 % or above; 'not
distinguishable' passes.
"""

import argparse
import multiprocessing
import os
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
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
RECORDED, BY_PARTS = "recorded", "1 %, by parts"
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
        command += ["--heartbeat-timeout-s", "60"]  # on a busy machine groups are late
        variables = {"OTEL_EXPORTER_OTLP_ENDPOINT": f"http://127.0.0.1:{collector.server_address[1]}"}
        variables |= {"OTEL_TRACES_SAMPLER_ARG": str(ratio)}
        env = None if ratio is None else {**os.environ, **variables}
        started[name] = stack.enter_context(serving(f"router-{port}", command, port, "/readyz", folder, 60, env))
    return started


def measure(rounds: int, requests: int) -> dict[str, list[float]]:
    """Returns milliseconds of CPU per request by router, of each round; the order rotates."""
    found: dict[str, list[float]] = {name: [] for name in (*RATIOS, RECORDED)}
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
            if round >= 0:
                found[RECORDED].append(recording_us(5 * requests) / 1e3)
    return found


def ratios_by_parts(found: Mapping[str, Sequence[float]]) -> list[float]:
    """Returns the ratio of the CPU time with 1 % sampled to that without traces, of each round."""
    ratios = []
    for off, exported, recorded in zip(found["off"], found["all"], found[RECORDED], strict=True):
        ratios.append(1 + recorded / off + 0.01 * max(0.0, exported - off - recorded) / off)
    return ratios


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
    ratios = {name: [own / off for own, off in zip(found[name], found["off"], strict=True)] for name in list(RATIOS)[1:]}
    ratios[BY_PARTS] = ratios_by_parts(found)
    rows = [["off", f"{percentile(found['off'], 50):.3f}", ""]]
    for name, each in ratios.items():
        interval = median_interval(each)
        time_ms = f"{percentile(found[name], 50):.3f}" if name in found else ""
        rows.append([name, time_ms, f"{interval.middle:.4f} ({interval.low:.4f} to {interval.high:.4f})"])
    print(table(["sampled", "ms of CPU per request", "ratio to off"], rows))
    print(f"\nrecording the spans of a request: {percentile(found[RECORDED], 50) * 1e3:.1f} us")
    verdicts = [median_interval(ratios[name]).verdict(BOUND, is_least=False) for name in ("1 %", BY_PARTS)]
    print(f"at most {BOUND} with 1 %: {verdicts[0]}; by its parts: {verdicts[1]}")
    return 1 if "NO" in verdicts else 0


if __name__ == "__main__":
    sys.exit(main())
