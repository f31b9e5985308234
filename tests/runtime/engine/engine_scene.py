"""An engine client and a test that acts as its engine."""

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import zmq
import zmq.asyncio

from phalanx_api import wire
from phalanx_frontend.backend import Backend, Delta, KeepAlive
from phalanx_runtime.engine.client import EngineClient
from phalanx_runtime.engine.open_requests import EndedRequest

ASSETS = wire.make_assets({}, ["tiny"], 64, [0])
SERVED = wire.Served("a model", "a layout", 64)


@dataclass
class FakeMeter:
    """Records all measurements."""

    loads: list[wire.Load] = field(default_factory=list)
    steps: list[int] = field(default_factory=list)
    firsts: list[tuple[int, float]] = field(default_factory=list)
    queue_times_s: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)
    ends: list[EndedRequest] = field(default_factory=list)
    embedded_tokens: int = 0

    def load(self, load: wire.Load) -> None:
        self.loads.append(load)

    def step(self, num_tokens: int) -> None:
        self.steps.append(num_tokens)

    def embedded(self, prompt_tokens: int) -> None:
        self.embedded_tokens += prompt_tokens

    def first_token(self, prompt_tokens: int, wait_s: float) -> None:
        self.firsts.append((prompt_tokens, wait_s))

    def queued(self, wait_s: float) -> None:
        self.queue_times_s.append(wait_s)

    def next_token(self, gap_s: float) -> None:
        self.gaps.append(gap_s)

    def ended(self, end: EndedRequest) -> None:
        self.ends.append(end)


class FakeEngine:
    """Rank 0's end of the socket."""

    def __init__(self, endpoint: str) -> None:
        self._context = zmq.asyncio.Context()
        self._socket = self._context.socket(zmq.PAIR)
        self._socket.connect(endpoint)

    async def receive(self) -> wire.ToEngine:
        async with asyncio.timeout(10):
            frame = wire.decode_to_engine(await self._socket.recv())
        assert isinstance(frame, wire.Submit | wire.Abort)
        return frame

    async def receive_submit(self) -> wire.Submit:
        frame = await self.receive()
        assert isinstance(frame, wire.Submit)
        return frame

    async def send(self, frame: wire.FromEngine | bytes) -> None:
        await self._socket.send(frame if isinstance(frame, bytes) else wire.encode(frame))

    def close(self) -> None:
        self._context.destroy(linger=0)


@dataclass(eq=False)
class QueueSink:
    """A sink that queues its frames."""

    frames: asyncio.Queue[wire.Tokens | wire.Refused] = field(default_factory=asyncio.Queue)

    def tokens(self, frame: wire.Tokens) -> None:
        self.frames.put_nowait(frame)

    def refused(self, frame: wire.Refused) -> None:
        self.frames.put_nowait(frame)

    async def next(self) -> wire.Tokens | wire.Refused:
        async with asyncio.timeout(10):
            return await self.frames.get()


@dataclass
class EngineScene:
    client: EngineClient
    engine: FakeEngine
    meter: FakeMeter
    rebind: Callable[[], FakeEngine]
    """Starts the engine of the next incarnation."""


async def collect(backend: Backend, request: wire.Request) -> list[Delta | KeepAlive]:
    return [delta async for delta in backend.generate(request)]
