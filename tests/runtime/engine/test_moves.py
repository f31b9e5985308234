"""Moves in the engine loop over a fake carrier: in which order ranks are told, and when pages are given to others."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import pytest

from phalanx_api import moves, wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.migration import page_orders as copying
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.engine.moving import EngineMoves
from phalanx_runtime.rank.sampling.grammar_threads import ThreadedGrammars
from tests.runtime.engine.test_grammar_compiling import LARGE, Slow, asking
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=32)
HERE = [moves.PageAddress("", 7001), moves.PageAddress("", 7002)]
THERE = [moves.PageAddress("b", 8001), moves.PageAddress("b", 8002)]
F = TypeVar("F")


@dataclass
class FakeCarrier:
    """Two ranks that do nothing but expect what they should; a test tells what they would. `is_slow`: the second does not yet."""

    told: list[tuple[int, copying.Report]] = field(default_factory=list)
    orders: list[tuple[object, ...]] = field(default_factory=list)
    sent_after: list[int] = field(default_factory=list)
    """The steps that pages are sent after."""
    drafted: list[int] = field(default_factory=list)
    """Of how many tokens a draft's part is said to be in the pages that are sent."""
    addresses: Sequence[moves.PageAddress] = tuple(HERE)
    is_slow: bool = False

    def start(self, wake: Callable[[], None]) -> None:
        return

    def expect(self, move: str, key: bytes, first: int, pages: list[int], step: int) -> None:
        self.orders.append(("expect", move, first, tuple(pages), len(key)))
        if not self.is_slow:
            self.told += both(copying.Expecting(move))

    def forget(self, move: str) -> None:
        self.orders.append(("forget", move))

    def send(
        self, asked: moves.MoveOut, first: int, pages: list[int], step: int, num_computed: int | None, num_drafted: int = 0
    ) -> None:
        self.orders.append(("send", asked.move, first, tuple(pages), num_computed))
        self.sent_after.append(step)
        self.drafted.append(num_drafted)

    def stop(self, move: str) -> None:
        self.orders.append(("stop", move))

    def reports(self) -> Sequence[tuple[int, copying.Report]]:
        told, self.told = self.told, []
        return told

    def of(self, kind: str) -> list[tuple[object, ...]]:
        return [order for order in self.orders if order[0] == kind]


@dataclass
class Inbox:
    """A channel that a test fills between turns."""

    waiting: list[bytes] = field(default_factory=list)
    sent: list[wire.FromEngine] = field(default_factory=list)
    waited: list[float | None] = field(default_factory=list)

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        if block:
            self.waited.append(timeout_s)
        messages, self.waiting = self.waiting, []
        return messages

    def send(self, message: bytes) -> None:
        self.sent.append(wire.decode_from_engine(message))

    def wake(self) -> None:
        return


@dataclass
class Engine:
    """One engine, turned by hand."""

    num_pages: int = 40
    depth: int = 1
    now: float = 0.0
    grammars: Slow | None = None

    def __post_init__(self) -> None:
        self.runner = FakeRunner(self.num_pages, 4, self.depth)
        self.carrier, self.inbox = FakeCarrier(), Inbox()
        grammars = None if self.grammars is None else ThreadedGrammars(self.grammars)
        self.loop = EngineLoop(self.runner, LIMITS, self.inbox, lambda: self.now, grammars=grammars, carrier=self.carrier)

    def turn(self, *frames: wire.ToEngine, times: int = 1, told: Sequence[tuple[int, copying.Report]] = ()) -> None:
        self.inbox.waiting += [wire.encode(frame) for frame in frames]
        self.carrier.told += told
        for _ in range(times):
            self.now += 0.01
            assert self.loop.turn()

    def of(self, kind: type[F]) -> list[F]:
        return [frame for frame in self.inbox.sent if isinstance(frame, kind)]

    def tokens(self, handle: int) -> list[int]:
        return [
            token
            for frame in self.of(wire.Tokens)
            for one, token in zip(frame.handles, frame.tokens, strict=True)
            if one == handle
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
        prepared=moves.Prepared(move="m", held_tokens=held, addresses=THERE[:count], key=b"k" * 32),
        mode=mode,
    )


def both(report: copying.Report) -> list[tuple[int, copying.Report]]:
    return [(0, report), (1, report)]


@pytest.mark.parametrize("depth", [1, 2])
def test_stopped_request_freezes_after_its_step_and_is_released(depth: int) -> None:
    engine = Engine(depth=depth)
    request = make_request(10, 30)
    engine.turn(wire.Submit(1, request), times=4)
    engine.turn(out(), times=3)
    frozen = engine.of(moves.Frozen)[0]
    assert frozen.num_output == len(engine.tokens(1))
    assert frozen.num_computed == 10 + frozen.num_output - 1
    assert engine.carrier.of("send") == [("send", "m", 0, tuple(engine.carrier.of("send")[0][3]), frozen.num_computed)]  # type: ignore[arg-type]
    order = [type(frame) for frame in engine.inbox.sent if isinstance(frame, wire.Tokens | moves.Frozen)]
    assert order.index(moves.Frozen) == len(order) - 1, "all its tokens were told before"
    engine.turn(moves.Release("m"), times=3)
    assert engine.tokens(1) == expected_output(request)[: frozen.num_output]
    assert not [end for frame in engine.of(wire.Tokens) for end in frame.finished]
    load = engine.load
    assert (load.running, load.free_pages, load.leaks) == (0, 40, 0)


def test_idle_engine_reports_a_refused_page_connection_at_once() -> None:
    engine = Engine()
    engine.turn(times=2)
    assert [load.refused_copies for load in engine.of(wire.Load)] == [0]
    engine.turn(told=[(1, copying.PeerRefused("key"))], times=3)
    assert [load.refused_copies for load in engine.of(wire.Load)] == [0, 1]


def test_pages_are_sent_after_plans_that_may_write_them() -> None:
    engine = Engine(depth=2)
    engine.turn(wire.Submit(1, make_request(30, 30)), wire.Submit(2, make_request(30, 30)), times=4)
    engine.turn(out())
    num_run = 0
    while not engine.carrier.sent_after:
        num_run = len(engine.runner.plans)
        engine.turn()
    assert engine.runner.most_in_flight == 2
    assert engine.carrier.sent_after == [num_run + 1], "the other request is in a plan"


@pytest.mark.parametrize("how", ["thaw", "lease", "failed"])
def test_frozen_request_resumes_after_a_cancelled_move(how: str) -> None:
    engine = Engine()
    engine.turn(wire.Submit(1, request := make_request(10, 12)), times=4)
    engine.turn(out(), times=2)
    before = len(engine.tokens(1))
    engine.turn(times=5)
    assert len(engine.tokens(1)) == before
    assert engine.inbox.waited[-1] is not None, "it waits no longer than the lease"
    match how:
        case "thaw":
            engine.turn(moves.Thaw("m"))
        case "lease":
            engine.now += 5.0
        case _:
            engine.turn(told=[(1, copying.SendFailed("m", "target_lost", "gone"))])
    engine.turn(times=12)
    assert engine.tokens(1) == expected_output(request)
    assert engine.carrier.of("stop")
    assert [failed.code for failed in engine.of(moves.MoveFailed)] == {"thaw": [], "lease": ["lease"], "failed": ["target_lost"]}[
        how
    ]


def test_repeated_move_keeps_its_missing_draft_pages() -> None:
    runner, carrier = FakeRunner(44, 4), FakeCarrier()
    scheduler = make_scheduler(
        Limits(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128), runner.pool, SchedulerConfig()
    )
    moving = EngineMoves(scheduler, carrier, lambda frame: None, lambda handle: None)
    assert scheduler.submit(1, make_request(80, 30)) is None
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(runner.run(plan))
    moving.obey(out(mode="precopy"), 0.0)
    held = scheduler.held_by(1)
    assert held is not None
    for page in held.pages:
        scheduler.pool.mark_drafted(page, 4)  # what draft requests that share them computed since
    moving.obey(out(mode="precopy"), 0.1)
    carrier.told += both(copying.PagesSent("m", 20, 80, 0.1))
    moving.turn(0.2)
    moving.turn(0.3)
    assert [order[-1] for order in carrier.of("send")] == [None, 80], "full pages, and the rest of the frozen request"
    assert carrier.drafted == [0, 0]


def test_request_that_ends_during_the_copy_ends_the_move() -> None:
    engine = Engine()
    engine.turn(wire.Submit(1, make_request(6, 8)), times=7)
    engine.turn(
        moves.MoveOut(
            move="m",
            handle=1,
            epoch=0,
            prepared=moves.Prepared(move="m", held_tokens=0, addresses=THERE, key=b"k" * 32),
            mode="stop",
        )
    )
    engine.turn(wire.Abort([1]), times=2)
    assert [failed.code for failed in engine.of(moves.MoveFailed)] == ["ended"]
    assert engine.carrier.orders[-1] == ("stop", "m")
    assert engine.load.free_pages == 40


@pytest.mark.parametrize(
    ("asked", "code"),
    [(out(handle=9), "unknown"), (out(epoch=3), "unknown"), (out(count=1), "incompatible")],
    ids=["no such request", "another epoch", "another number of ranks"],
)
def test_a_move_that_cannot_be_is_answered(asked: moves.MoveOut, code: str) -> None:
    engine = Engine()
    engine.turn(wire.Submit(1, request := make_request(10, 12)), times=3)
    engine.turn(asked, times=3)
    assert [failed.code for failed in engine.of(moves.MoveFailed)] == [code]
    assert engine.carrier.of("send") == []
    engine.turn(times=12)
    assert engine.tokens(1) == expected_output(request)


def test_reserved_pages_are_freed_after_every_rank_forgot_them() -> None:
    engine = Engine()
    engine.turn(wire.Prepare("m", make_request(10, 20)), times=2)
    prepared = engine.of(moves.Prepared)[0]
    assert (prepared.addresses, len(prepared.key), prepared.held_tokens) == (HERE, 32, 0)
    assert prepared.room_tokens >= 10
    reserved = engine.load.reserved_pages
    assert reserved == prepared.room_tokens // 4
    engine.turn(moves.Cancel("m"), times=2)
    assert engine.carrier.orders[-1] == ("forget", "m")
    assert engine.load.reserved_pages == reserved
    engine.turn(told=[(0, copying.Forgotten("m"))])
    assert engine.load.reserved_pages == reserved
    engine.turn(told=[(1, copying.Forgotten("m"))])
    load = engine.load
    assert (load.reserved_pages, load.free_pages, load.leaks) == (0, 40, 0)


def test_request_starts_on_transferred_pages_and_computes_the_rest() -> None:
    engine = Engine()
    request = make_request(10, 20)
    whole = expected_output(request)
    moved = wire.Request(id=request.id, epoch=1, prompt=request.prompt, delivered=whole[:5], sampling=request.sampling)
    engine.turn(wire.Prepare("m", moved), times=2)
    pages = engine.carrier.of("expect")[0][3]
    assert isinstance(pages, tuple)
    for position, page in enumerate(pages[:4]):
        tokens: list[int | None] = list((request.prompt + whole)[4 * position : 4 * position + 4])
        engine.runner.put(page, tokens if position < 3 else [*tokens[:2], None, None])
    engine.turn(told=[(0, copying.PagesReceived("m", 100, 14))])
    assert not engine.of(moves.Arrived)
    engine.turn(told=[(1, copying.PagesReceived("m", 100, 14))])
    assert engine.of(moves.Arrived) == [moves.Arrived("m", 14, 200)]
    engine.turn(wire.Submit(7, moved, "m"), times=16)
    assert engine.tokens(7) == whole[5:]
    assert engine.runner.plans[0].starts == [14], "what arrived is not computed"
    assert engine.load.free_pages == 40


def test_start_before_the_pages_computes_all_and_frees_them() -> None:
    engine = Engine()
    request = make_request(10, 8)
    engine.turn(wire.Prepare("m", request), times=2)
    engine.turn(wire.Submit(7, request, "m"), told=[(0, copying.PagesReceived("m", 100, 9))], times=10)
    assert engine.tokens(7) == expected_output(request)
    engine.turn(told=both(copying.Forgotten("m")))
    assert engine.load.free_pages == 40


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled while pages came", "still compiled"])
def test_grammar_compiles_while_pages_arrive(is_compiled: bool) -> None:
    grammars = Slow()
    engine = Engine(grammars=grammars)
    request = asking(LARGE, make_request(10, 20))
    engine.turn(wire.Prepare("m", request), times=2)
    assert grammars.begun.wait(20)
    if is_compiled:
        grammars.go.set()
        while not grammars.compiled:
            time.sleep(0.001)
    pages = engine.carrier.of("expect")[0][3]
    assert isinstance(pages, tuple)
    for position, page in enumerate(pages[:3]):
        engine.runner.put(page, list(request.prompt[4 * position : 4 * position + 4]))
    engine.turn(told=both(copying.PagesReceived("m", 100, 9)))
    engine.turn(wire.Submit(7, request, "m"), times=4)
    assert bool(engine.tokens(7)) == is_compiled
    grammars.go.set()
    while len(engine.tokens(7)) < 20:
        engine.turn()
        time.sleep(0.0005)
    assert engine.tokens(7) == expected_output(request)
    assert engine.runner.plans[0].starts == [9], "what arrived is not computed"
    assert grammars.compiled == ["large"]


def test_a_full_pool_refuses_a_move() -> None:
    engine = Engine(num_pages=16)
    engine.turn(wire.Submit(1, make_request(40, 20)), times=3)
    engine.turn(wire.Prepare("m", make_request(30, 20, seed=3)), times=2)
    assert [failed.code for failed in engine.of(moves.MoveFailed)] == ["no_room"]
    assert engine.carrier.of("expect") == []


def test_first_of_two_routers_gets_the_pages() -> None:
    engine = Engine(num_pages=16)
    engine.turn(wire.Prepare("of one", make_request(30, 20)), wire.Prepare("of another", make_request(30, 20, seed=3)), times=2)
    assert [prepared.move for prepared in engine.of(moves.Prepared)] == ["of one"]
    assert [(failed.move, failed.code) for failed in engine.of(moves.MoveFailed)] == [("of another", "no_room")]
    engine.turn(moves.Cancel("of one"), told=both(copying.Forgotten("of one")), times=2)
    engine.turn(wire.Prepare("of another", make_request(30, 20, seed=3)), times=2)
    assert [prepared.move for prepared in engine.of(moves.Prepared)] == ["of one"], "a move that is over is not prepared again"
    engine.turn(wire.Prepare("a third", make_request(30, 20, seed=3)), times=2)
    assert [prepared.move for prepared in engine.of(moves.Prepared)] == ["of one", "a third"]


def test_request_awaiting_reserved_pages_waits_without_spinning() -> None:
    engine = Engine(num_pages=16)
    engine.turn(wire.Prepare("m", make_request(30, 20)), times=2)
    engine.inbox.waited.clear()
    engine.turn(wire.Submit(1, request := make_request(20, 6, seed=3)), times=5)
    assert engine.tokens(1) == []
    assert len(engine.inbox.waited) >= 3
    assert all(waited is not None and waited <= 0.05 for waited in engine.inbox.waited[1:])
    engine.turn(moves.Cancel("m"))
    engine.turn(told=both(copying.Forgotten("m")), times=10)
    assert engine.tokens(1) == expected_output(request)


def test_turned_away_connections_are_counted() -> None:
    engine = Engine()
    engine.turn(
        wire.Submit(1, make_request(4, 2)), told=[(0, copying.PeerRefused("key")), (1, copying.PeerRefused("unknown"))], times=4
    )
    assert engine.load.refused_copies == 2


@pytest.mark.parametrize("end", ["it lets them in", "the router gives up"])
def test_page_addresses_are_sent_after_every_rank_is_ready(end: str) -> None:
    engine = Engine()
    engine.carrier.is_slow = True
    request = make_request(10, 30, delivered=[1, 2])
    engine.turn(wire.Prepare("m", request), times=3)
    assert engine.carrier.of("expect") and not engine.of(moves.Prepared)
    if end == "the router gives up":
        engine.turn(moves.Cancel("m"), times=2)
    engine.turn(told=[(1, copying.Expecting("m"))])
    assert len(engine.of(moves.Prepared)) == (end == "it lets them in")
    if end == "it lets them in":
        engine.turn(moves.Cancel("m"))
    engine.turn(told=both(copying.Forgotten("m")), times=2)
    load = engine.load
    assert (load.reserved_pages, load.free_pages, load.leaks) == (0, 40, 0)
