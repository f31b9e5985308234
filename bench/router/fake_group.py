"""Serves a group without a model, for benchmarks of routers: one token per request and step, a step every `--period-ms`.

    python -m bench.router.fake_group --port PORT --token-file FILE --clock FILE

It has the real link and the real API server. The character of a token is the step number modulo `NUM_SYMBOLS`; the time of each
step is in the file `--clock`, so that a client on the same machine can compute the age of a token.
"""

import argparse
import asyncio
import mmap
import random
import struct
import sys
import time
from array import array
from collections.abc import AsyncIterator, Callable, Iterable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import cast

import uvicorn
import uvloop
from fastapi import FastAPI

from bench.router.api_server import EMBEDDING_SIZE, bench_assets
from phalanx_api import wire
from phalanx_api.trace import ChunkTime, PrefillTime
from phalanx_frontend.app import create_app
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_frontend.stream.question_vectors import prepare
from phalanx_runtime.engine.backend import LocalBackend
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.engine.load_feed import EngineObserver, PageKeys
from phalanx_runtime.engine.move_relay import MoveRelay
from phalanx_runtime.engine.open_requests import RequestSink
from phalanx_runtime.server.link.connection import LinkSettings
from phalanx_runtime.server.link.endpoint import LinkEndpoint
from phalanx_runtime.server.link.gateway import EngineGateway

FIRST_ID, NUM_SYMBOLS = 30, 64
"""First id of plain characters in the tokenizer of `bench.router.api_server`, and the number of ids used."""
TOPIC_TOKENS = 8
"""First tokens of a text, which decide its vector."""
REPORT_S = 0.05
PREFILL = PrefillTime(0.01, [ChunkTime(0.01, 0.0, 128)])


def vector_of(prompt: list[int]) -> bytes:
    """A vector that texts with the same start share."""
    start = len(prepare("\0").split("\0")[0])  # of the question
    draw = random.Random(bytes(prompt[start : start + TOPIC_TOKENS]))
    return array("f", [draw.gauss(0.0, 1.0) for _ in range(EMBEDDING_SIZE)]).tobytes()


class StepClock:
    """Monotonic times of the latest `NUM_SYMBOLS` steps, in a file shared by processes."""

    def __init__(self, path: Path) -> None:
        path.touch()
        if not path.stat().st_size:
            path.write_bytes(bytes(8 * NUM_SYMBOLS))
        with path.open("r+b") as file:
            self._times = mmap.mmap(file.fileno(), 8 * NUM_SYMBOLS)

    def record(self, step: int) -> None:
        struct.pack_into("d", self._times, 8 * (step % NUM_SYMBOLS), time.monotonic())

    def time_of(self, symbol: int) -> float:
        """Returns the time of the latest step with this number modulo `NUM_SYMBOLS`."""
        found: float = struct.unpack_from("d", self._times, 8 * symbol)[0]
        return found


class FakeEngine:
    """An EngineGateway that gives every request a token per step."""

    def __init__(self, clock: StepClock) -> None:
        self.moves = MoveRelay(lambda order: None, lambda handle: None)
        self._clock = clock
        self._assets = bench_assets()
        self._running: dict[int, tuple[wire.Request, RequestSink, int]] = {}
        self._observers: list[EngineObserver] = []
        self._handles = self._reports = self._steps = 0

    def submit(self, request: wire.Request, sink: RequestSink, move: str = "") -> int:
        self._handles += 1
        self._running[self._handles] = request, sink, len(request.delivered)
        return self._handles

    def abort(self, handles: list[int]) -> None:
        for handle in handles:
            self._running.pop(handle, None)

    def has(self, handle: int) -> bool:
        return handle in self._running

    def reassign(self, handles: Iterable[int], sink: RequestSink) -> None:
        for handle in handles:
            request, _, index = self._running[handle]
            self._running[handle] = request, sink, index

    def state(self) -> wire.State:
        return wire.State(serving=True, incarnation=1, served=wire.Served("bench", "bench", 1000, embedding_size=EMBEDDING_SIZE))

    def load(self) -> wire.Load:
        context = 200 * len(self._running)
        return wire.Load(
            waiting=0,
            running=len(self._running),
            outstanding_tokens=0,
            free_pages=9_000_000,
            total_pages=10_000_000,
            sequence=self._reports,
            last_handle=self._handles,
            context_tokens=context,
            mean_output_tokens=100.0,
            max_num_batched_tokens=100_000,
            max_num_seqs=100_000,
        )

    def pages(self) -> wire.PageChanges:
        return PageKeys().snapshot()

    def assets(self) -> wire.Assets:
        return self._assets

    def subscribe(self, changed: Callable[[], None]) -> Callable[[], None]:
        return lambda: None

    def observe(self, observer: EngineObserver) -> Callable[[], None]:
        self._observers.append(observer)
        return lambda: self._observers.remove(observer)

    async def run(self, period_s: float) -> None:
        due = time.monotonic()
        while True:
            due = max(due + period_s, time.monotonic())
            await asyncio.sleep(due - time.monotonic())
            self.step()

    async def report(self) -> None:
        while True:
            await asyncio.sleep(REPORT_S)
            self._reports += 1
            for observer in list(self._observers):
                observer.load_changed()

    def step(self) -> None:
        self._steps += 1
        self._clock.record(self._steps)
        token = FIRST_ID + self._steps % NUM_SYMBOLS
        frames: dict[int, tuple[RequestSink, wire.Tokens]] = {}
        for handle, (request, sink, index) in list(self._running.items()):
            _, frame = frames.setdefault(id(sink), (sink, wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[])))
            if request.pooling is not None:
                frame.finished.append(wire.Finished(handle, request.epoch, "stop", vector=vector_of(request.prompt)))
                del self._running[handle]
                continue
            if request.trace is not None and index == len(request.delivered):
                frame.cached.append(wire.Cached(handle, request.epoch, 0, PREFILL))
            frame.handles.append(handle)
            frame.epochs.append(request.epoch)
            frame.indices.append(index)
            frame.tokens.append(token)
            if index + 1 >= request.sampling.max_tokens:
                frame.finished.append(wire.Finished(handle, request.epoch, "length"))
                del self._running[handle]
            else:
                self._running[handle] = request, sink, index + 1
        for sink, frame in frames.values():
            sink.tokens(frame)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, required=True)
    parser.add_argument("--token-file", type=Path, required=True)
    parser.add_argument("--clock", type=Path, required=True)
    parser.add_argument("--period-ms", type=float, default=20.0)
    args = parser.parse_args()
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(_serve(args))
    return 0


async def _serve(args: argparse.Namespace) -> None:
    engine = FakeEngine(StepClock(args.clock))
    gateway: EngineGateway = engine

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        tasks = [asyncio.create_task(engine.run(args.period_ms / 1000)), asyncio.create_task(engine.report())]
        yield
        for task in tasks:
            task.cancel()

    app = create_app(LocalBackend(cast(EngineClient, engine)), lifespan=lifespan)
    token = ServiceToken([args.token_file.read_text().strip()])
    link = LinkSettings(token=token, group=f"group-{args.port}", revision="bench", page_size=16)
    app.router.routes.append(LinkEndpoint(gateway, link).route())
    config = uvicorn.Config(
        app, host=args.host, port=args.port, log_config=None, access_log=False, ws="websockets-sansio",
        ws_per_message_deflate=False, backlog=4096,
    )  # fmt: skip
    await uvicorn.Server(config).serve()


if __name__ == "__main__":
    sys.exit(main())
