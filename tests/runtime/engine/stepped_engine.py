"""An engine with explicit turns, over a transport that only records its orders."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import TypeVar

from phalanx_api import moves, wire
from phalanx_frontend.flight import NO_FLIGHT_RECORDER, FlightRecorder
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.migration import page_orders
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.engine.ports import NO_ADAPTERS, NO_GRAMMARS, AdapterLoader
from phalanx_runtime.rank.sampling.grammar_compilation import ThreadedGrammars
from tests.runtime.engine.slow_grammars import SlowCompiler
from tests.runtime.fake_runner import FakeRunner

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32)
HERE = [moves.PageAddress("", 7001), moves.PageAddress("", 7002)]
THERE = [moves.PageAddress("b", 8001), moves.PageAddress("b", 8002)]
F = TypeVar("F")


@dataclass
class FakeTransport:
    """Two ranks that only accept pages; a test adds their other reports. `is_slow`: they do not accept pages either."""

    pending: list[tuple[int, page_orders.Report]] = field(default_factory=list)
    orders: list[tuple[object, ...]] = field(default_factory=list)
    sent_after: list[int] = field(default_factory=list)
    """The step after which each copy is sent."""
    accepted_after: list[int] = field(default_factory=list)
    """The step after which pages of each move are written."""
    drafted: list[int] = field(default_factory=list)
    """`num_drafted` of each copy."""
    addresses: Sequence[moves.PageAddress] = tuple(HERE)
    is_slow: bool = False

    def start(self, wake: Callable[[], None]) -> None:
        return

    def expect(self, order: page_orders.ExpectPages) -> None:
        self.orders.append(("expect", order.move, order.first, tuple(order.pages), len(order.key)))
        self.accepted_after.append(order.step)
        if not self.is_slow:
            self.pending += both(page_orders.Expecting(order.move))

    def forget(self, move: str) -> None:
        self.orders.append(("forget", move))

    def send(self, order: moves.MoveOut | moves.SendPrefix, copy: page_orders.PageCopy) -> None:
        self.orders.append(("send", order.move, copy.first, tuple(copy.pages), copy.num_computed))
        self.sent_after.append(copy.step)
        self.drafted.append(copy.num_drafted)

    def stop(self, move: str) -> None:
        self.orders.append(("stop", move))

    def fetch(self, order: page_orders.FetchPages) -> None:
        self.orders.append(
            ("fetch_parts" if order.is_part else "fetch", order.number, len(order.keys), tuple(order.slots), order.step)
        )

    def reports(self) -> Sequence[tuple[int, page_orders.Report]]:
        reports, self.pending = self.pending, []
        return reports

    def of(self, kind: str) -> list[tuple[object, ...]]:
        return [order for order in self.orders if order[0] == kind]


@dataclass
class Inbox:
    """A channel that a test fills between turns."""

    messages: list[bytes] = field(default_factory=list)
    sent: list[wire.FromEngine] = field(default_factory=list)
    timeouts: list[float | None] = field(default_factory=list)

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        if block:
            self.timeouts.append(timeout_s)
        messages, self.messages = self.messages, []
        return messages

    def send(self, message: bytes) -> None:
        self.sent.append(wire.decode_from_engine(message))

    def wake(self) -> None:
        return


@dataclass
class SteppedEngine:
    """One engine, with explicit turns."""

    num_pages: int = 40
    depth: int = 1
    now: float = 0.0
    grammars: SlowCompiler | None = None
    is_async: bool = False
    num_host_pages: int = 0
    window: int = 0
    num_parts: int = 0
    recorder: FlightRecorder = NO_FLIGHT_RECORDER
    loader: AdapterLoader = NO_ADAPTERS
    max_loras: int = 0

    def __post_init__(self) -> None:
        self.runner = FakeRunner(
            self.num_pages,
            4,
            self.depth,
            runs_ahead=self.is_async,
            num_host_pages=self.num_host_pages,
            window=self.window,
            num_parts=self.num_parts,
        )
        self.transport, self.inbox = FakeTransport(), Inbox()
        grammars = NO_GRAMMARS if self.grammars is None else ThreadedGrammars(self.grammars)
        limits = replace(LIMITS, async_scheduling=self.is_async)
        self.loop = EngineLoop(
            self.runner,
            limits,
            self.inbox,
            lambda: self.now,
            grammars=grammars,
            transport=self.transport,
            recorder=self.recorder,
            adapters=self.loader,
            config=SchedulerConfig(max_loras=self.max_loras),
        )

    def turn(self, *frames: wire.ToEngine, times: int = 1, reports: Sequence[tuple[int, page_orders.Report]] = ()) -> None:
        self.inbox.messages += [wire.encode(frame) for frame in frames]
        self.transport.pending += reports
        for _ in range(times):
            self.now += 0.01
            assert self.loop.turn()

    def of(self, kind: type[F]) -> list[F]:
        return [frame for frame in self.inbox.sent if isinstance(frame, kind)]

    def tokens(self, handle: int) -> list[int]:
        return [
            token
            for frame in self.of(wire.Tokens)
            for other, token in zip(frame.handles, frame.tokens, strict=True)
            if other == handle
        ]

    @property
    def load(self) -> wire.Load:
        self.now += 1.0
        self.turn()
        return self.of(wire.Load)[-1]


def out(handle: int = 1, mode: moves.MoveMode = "stop", held: int = 0, epoch: int = 0, count: int = 2) -> moves.MoveOut:
    return moves.MoveOut(
        move="m",
        handle=handle,
        epoch=epoch,
        prepared=moves.Prepared(move="m", cached_tokens=held, addresses=THERE[:count], key=b"k" * 32),
        mode=mode,
    )


def both(report: page_orders.Report) -> list[tuple[int, page_orders.Report]]:
    return [(0, report), (1, report)]
