"""Moves in the engine loop over a fake transport: the order of page orders, and when pages are reused."""

import time

import pytest

from phalanx_api import moves, wire
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.migration import page_orders
from phalanx_runtime.core.scheduling.config import SchedulerConfig, make_scheduler
from phalanx_runtime.core.step_plan import PoolShape, StepResult
from phalanx_runtime.engine.engine_moves import EngineMoves
from tests.polling import wait_until
from tests.runtime.engine.slow_grammars import LARGE, SlowCompiler, with_grammar
from tests.runtime.engine.stepped_engine import HERE, THERE, FakeTransport, SteppedEngine, both, out
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request


@pytest.mark.parametrize("depth", [1, 2])
def test_stopped_request_freezes_after_its_step_and_is_released(depth: int) -> None:
    engine = SteppedEngine(depth=depth)
    request = make_request(10, 30)
    engine.turn(wire.Submit(1, request), times=4)
    engine.turn(out(), times=3)
    frozen = engine.of(moves.Frozen)[0]
    assert frozen.num_output == len(engine.tokens(1))
    assert frozen.num_computed == 10 + frozen.num_output - 1
    assert engine.transport.of("send") == [("send", "m", 0, tuple(engine.transport.of("send")[0][3]), frozen.num_computed)]  # type: ignore[arg-type]
    order = [type(frame) for frame in engine.inbox.sent if isinstance(frame, wire.Tokens | moves.Frozen)]
    assert order.index(moves.Frozen) == len(order) - 1, "all its tokens are sent before"
    engine.turn(moves.Release("m"), times=3)
    assert engine.tokens(1) == expected_output(request)[: frozen.num_output]
    assert not [end for frame in engine.of(wire.Tokens) for end in frame.finished]
    load = engine.load
    assert (load.running, load.free_pages, load.leaks) == (0, 40, 0)


@pytest.mark.parametrize("is_async", [False, True], ids=["lag 0", "lag 1"])
def test_engine_reports_the_freeze_before_it_blocks(is_async: bool) -> None:
    """With lag 1 a step has the request when its move starts, and nothing else wakes the engine after that step."""
    engine = SteppedEngine(is_async=is_async)
    engine.turn(wire.Submit(1, request := make_request(10, 30)), times=4)
    before = len(engine.inbox.timeouts)
    engine.turn(out())
    while not engine.of(moves.Frozen):
        engine.turn()
    assert len(engine.inbox.timeouts) == before
    assert engine.of(moves.Frozen)[0].num_output == len(engine.tokens(1))
    assert engine.tokens(1) == expected_output(request)[: len(engine.tokens(1))]


def test_idle_engine_reports_a_refused_page_connection_at_once() -> None:
    engine = SteppedEngine()
    engine.turn(times=2)
    assert [load.refused_transfers for load in engine.of(wire.Load)] == [0]
    engine.turn(reports=[(1, page_orders.PeerRefused("key"))], times=3)
    assert [load.refused_transfers for load in engine.of(wire.Load)] == [0, 1]


def test_pages_are_sent_after_plans_that_may_write_them() -> None:
    engine = SteppedEngine(depth=2)
    engine.turn(wire.Submit(1, make_request(30, 30)), wire.Submit(2, make_request(30, 30)), times=4)
    engine.turn(out())
    while not engine.transport.sent_after:
        engine.turn()
    assert engine.runner.most_in_flight == 2
    assert engine.transport.sent_after == [len(engine.runner.plans) + 1], "a plan in flight contains the other request"


@pytest.mark.parametrize(("depth", "is_async"), [(1, False), (1, True), (2, False)], ids=["lag 0", "lag 1", "two stages"])
def test_pages_arrive_after_plans_that_may_store_them(depth: int, is_async: bool) -> None:
    """A plan in flight may still copy the page, which is free since, to host memory."""
    engine = SteppedEngine(depth=depth, is_async=is_async)
    engine.turn(wire.Submit(1, make_request(30, 30)), wire.Submit(2, make_request(30, 30)), times=4)
    num_in_flight = engine.loop.scheduler.planned_step - len(engine.runner.plans)
    assert num_in_flight == depth - 1 + is_async
    engine.turn(wire.Prepare("m", make_request(10, 30, delivered=[1, 2])))
    assert engine.transport.accepted_after == [len(engine.runner.plans) - 1 + num_in_flight]


@pytest.mark.parametrize("end", ["thaw", "lease", "failed"])
def test_frozen_request_resumes_after_a_cancelled_move(end: str) -> None:
    engine = SteppedEngine()
    engine.turn(wire.Submit(1, request := make_request(10, 12)), times=4)
    engine.turn(out(), times=2)
    before = len(engine.tokens(1))
    engine.turn(times=5)
    assert len(engine.tokens(1)) == before
    assert engine.inbox.timeouts[-1] is not None, "it waits at most for the lease"
    match end:
        case "thaw":
            engine.turn(moves.Thaw("m"))
        case "lease":
            engine.now += 5.0
        case _:
            engine.turn(reports=[(1, page_orders.SendFailed("m", "target_lost", "reset"))])
    engine.turn(times=12)
    assert engine.tokens(1) == expected_output(request)
    assert engine.transport.of("stop")
    assert [failed.code for failed in engine.of(moves.MoveFailed)] == {"thaw": [], "lease": ["lease"], "failed": ["target_lost"]}[
        end
    ]


def test_repeated_move_keeps_its_missing_draft_pages() -> None:
    runner, transport = FakeRunner(44, 4), FakeTransport()
    scheduler = make_scheduler(
        Limits(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128), runner.pool, SchedulerConfig()
    )
    engine_moves = EngineMoves(scheduler, transport, lambda frame: None, lambda handle: None)
    assert scheduler.submit(1, make_request(80, 30)) is None
    plan = scheduler.schedule()
    assert plan is not None
    scheduler.commit(runner.run(plan))
    engine_moves.handle(out(mode="precopy"), 0.0)
    running = scheduler.running_request(1)
    assert running is not None
    for page in running.pages:
        scheduler.pool.mark_drafted(page, 4)  # computed since by draft requests that share the pages
    engine_moves.handle(out(mode="precopy"), 0.1)
    transport.pending += both(page_orders.PagesSent("m", 20, 80, 0.1))
    engine_moves.turn(0.2)
    engine_moves.turn(0.3)
    assert [order[-1] for order in transport.of("send")] == [None, 80], "full pages, then the rest of the frozen request"
    assert transport.drafted == [0, 0]


def test_request_that_ends_during_the_copy_ends_the_move() -> None:
    engine = SteppedEngine()
    engine.turn(wire.Submit(1, make_request(6, 8)), times=7)
    engine.turn(
        moves.MoveOut(
            move="m",
            handle=1,
            epoch=0,
            prepared=moves.Prepared(move="m", cached_tokens=0, addresses=THERE, key=b"k" * 32),
            mode="stop",
        )
    )
    engine.turn(wire.Abort([1]), times=2)
    assert [failed.code for failed in engine.of(moves.MoveFailed)] == ["ended"]
    assert engine.transport.orders[-1] == ("stop", "m")
    assert engine.load.free_pages == 40


@pytest.mark.parametrize(
    ("order", "code"),
    [(out(handle=9), "unknown"), (out(epoch=3), "unknown"), (out(count=1), "incompatible")],
    ids=["no such request", "another epoch", "another number of ranks"],
)
def test_impossible_move_is_answered(order: moves.MoveOut, code: str) -> None:
    engine = SteppedEngine()
    engine.turn(wire.Submit(1, request := make_request(10, 12)), times=3)
    engine.turn(order, times=3)
    assert [failed.code for failed in engine.of(moves.MoveFailed)] == [code]
    assert engine.transport.of("send") == []
    engine.turn(times=12)
    assert engine.tokens(1) == expected_output(request)


def test_reserved_pages_are_freed_after_every_rank_forgot_them() -> None:
    engine = SteppedEngine()
    engine.turn(wire.Prepare("m", make_request(10, 20)), times=2)
    prepared = engine.of(moves.Prepared)[0]
    assert (prepared.addresses, len(prepared.key), prepared.cached_tokens) == (HERE, 32, 0)
    assert prepared.capacity_tokens >= 10
    reserved = engine.load.reserved_pages
    assert reserved == prepared.capacity_tokens // 4
    engine.turn(moves.Cancel("m"), times=2)
    assert engine.transport.orders[-1] == ("forget", "m")
    assert engine.load.reserved_pages == reserved
    engine.turn(reports=[(0, page_orders.Forgotten("m"))])
    assert engine.load.reserved_pages == reserved
    engine.now += wire.Prepare("m", make_request()).lease_s  # until then a repeated Prepare is ignored
    engine.turn()
    engine.turn(wire.Prepare("m", make_request(10, 20)), times=2)
    assert [failed.code for failed in engine.of(moves.MoveFailed)] == ["unknown"], "its pages are still reserved"
    engine.turn(reports=[(1, page_orders.Forgotten("m"))])
    load = engine.load
    assert (load.reserved_pages, load.free_pages, load.leaks) == (0, 40, 0)


def test_request_starts_on_transferred_pages_and_computes_the_rest() -> None:
    engine = SteppedEngine()
    request = make_request(10, 20)
    whole = expected_output(request)
    moved = wire.Request(id=request.id, epoch=1, prompt=request.prompt, delivered=whole[:5], sampling=request.sampling)
    engine.turn(wire.Prepare("m", moved), times=2)
    pages = engine.transport.of("expect")[0][3]
    assert isinstance(pages, tuple)
    for position, page in enumerate(pages[:4]):
        tokens: list[int | None] = list((request.prompt + whole)[4 * position : 4 * position + 4])
        engine.runner.put(page, tokens if position < 3 else [*tokens[:2], None, None])
    engine.turn(reports=[(0, page_orders.PagesReceived("m", 100, 14))])
    assert not engine.of(moves.Arrived)
    engine.turn(reports=[(1, page_orders.PagesReceived("m", 100, 14))])
    assert engine.of(moves.Arrived) == [moves.Arrived("m", 14, 200)]
    engine.turn(wire.Submit(7, moved, "m"), times=16)
    assert engine.tokens(7) == whole[5:]
    assert engine.runner.plans[0].starts == [14], "transferred tokens are not computed"
    assert engine.load.free_pages == 40


def test_start_before_the_pages_computes_all_and_frees_them() -> None:
    engine = SteppedEngine()
    request = make_request(10, 8)
    engine.turn(wire.Prepare("m", request), times=2)
    engine.turn(wire.Submit(7, request, "m"), reports=[(0, page_orders.PagesReceived("m", 100, 9))], times=10)
    assert engine.tokens(7) == expected_output(request)
    engine.turn(reports=both(page_orders.Forgotten("m")))
    assert engine.load.free_pages == 40


@pytest.mark.parametrize("is_compiled", [True, False], ids=["compiled while pages arrive", "still compiling"])
def test_grammar_compiles_while_pages_arrive(is_compiled: bool) -> None:
    grammars = SlowCompiler()
    engine = SteppedEngine(grammars=grammars)
    request = with_grammar(LARGE, make_request(10, 20))
    engine.turn(wire.Prepare("m", request), times=2)
    assert grammars.has_started.wait(20)
    if is_compiled:
        grammars.may_continue.set()
        wait_until(lambda: grammars.compiled)
    pages = engine.transport.of("expect")[0][3]
    assert isinstance(pages, tuple)
    for position, page in enumerate(pages[:3]):
        engine.runner.put(page, list(request.prompt[4 * position : 4 * position + 4]))
    engine.turn(reports=both(page_orders.PagesReceived("m", 100, 9)))
    engine.turn(wire.Submit(7, request, "m"), times=4)
    assert bool(engine.tokens(7)) == is_compiled
    grammars.may_continue.set()
    while len(engine.tokens(7)) < 20:
        engine.turn()
        time.sleep(0.0005)
    assert engine.tokens(7) == expected_output(request)
    assert engine.runner.plans[0].starts == [9], "transferred tokens are not computed"
    assert grammars.compiled == ["large"]


def test_a_full_pool_refuses_a_move() -> None:
    engine = SteppedEngine(num_pages=16)
    engine.turn(wire.Submit(1, make_request(40, 20)), times=3)
    engine.turn(wire.Prepare("m", make_request(30, 20, seed=3)), times=2)
    assert [failed.code for failed in engine.of(moves.MoveFailed)] == ["no_room"]
    assert engine.transport.of("expect") == []


def test_first_of_two_routers_gets_the_pages() -> None:
    engine = SteppedEngine(num_pages=16)
    engine.turn(wire.Prepare("first", make_request(30, 20)), wire.Prepare("second", make_request(30, 20, seed=3)), times=2)
    assert [prepared.move for prepared in engine.of(moves.Prepared)] == ["first"]
    assert [(failed.move, failed.code) for failed in engine.of(moves.MoveFailed)] == [("second", "no_room")]
    engine.turn(moves.Cancel("first"), reports=both(page_orders.Forgotten("first")), times=2)
    engine.turn(wire.Prepare("second", make_request(30, 20, seed=3)), times=2)
    assert [prepared.move for prepared in engine.of(moves.Prepared)] == ["first"], "an ended move is not prepared again"
    engine.turn(wire.Prepare("third", make_request(30, 20, seed=3)), times=2)
    assert [prepared.move for prepared in engine.of(moves.Prepared)] == ["first", "third"]


def test_request_awaiting_reserved_pages_waits_without_spinning() -> None:
    engine = SteppedEngine(num_pages=16)
    engine.turn(wire.Prepare("m", make_request(30, 20)), times=2)
    engine.inbox.timeouts.clear()
    engine.turn(wire.Submit(1, request := make_request(20, 6, seed=3)), times=5)
    assert engine.tokens(1) == []
    assert len(engine.inbox.timeouts) >= 3
    assert all(timeout_s is not None and timeout_s <= 0.05 for timeout_s in engine.inbox.timeouts[1:])
    engine.turn(moves.Cancel("m"))
    engine.turn(reports=both(page_orders.Forgotten("m")), times=10)
    assert engine.tokens(1) == expected_output(request)


def test_refused_connections_are_counted() -> None:
    engine = SteppedEngine()
    engine.turn(
        wire.Submit(1, make_request(4, 2)),
        reports=[(0, page_orders.PeerRefused("key")), (1, page_orders.PeerRefused("unknown"))],
        times=4,
    )
    assert engine.load.refused_transfers == 2


@pytest.mark.parametrize("end", ["rank ready", "router cancels"])
def test_page_addresses_are_sent_after_every_rank_is_ready(end: str) -> None:
    engine = SteppedEngine()
    engine.transport.is_slow = True
    request = make_request(10, 30, delivered=[1, 2])
    engine.turn(wire.Prepare("m", request), times=3)
    assert engine.transport.of("expect") and not engine.of(moves.Prepared)
    if end == "router cancels":
        engine.turn(moves.Cancel("m"), times=2)
    engine.turn(reports=[(1, page_orders.Expecting("m"))])
    assert len(engine.of(moves.Prepared)) == (end == "rank ready")
    if end == "rank ready":
        engine.turn(moves.Cancel("m"))
    engine.turn(reports=both(page_orders.Forgotten("m")), times=2)
    load = engine.load
    assert (load.reserved_pages, load.free_pages, load.leaks) == (0, 40, 0)


@pytest.mark.parametrize(("received", "is_used"), [(16, False), (57, True)])
def test_a_state_starts_at_its_own_tokens(received: int, is_used: bool) -> None:
    """The source says that it has 57 tokens, loses its pages and sends the state of 16."""
    limits = Limits(max_model_len=128, max_num_seqs=4, max_num_batched_tokens=128)
    scheduler, transport = make_scheduler(limits, PoolShape(40, 8, has_states=True, num_snapshots=8)), FakeTransport()
    engine_moves = EngineMoves(scheduler, transport, lambda frame: None, lambda handle: None)
    assert scheduler.submit(1, make_request(58, 1)) is None
    while not scheduler.is_idle():
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(StepResult(step=plan.step, tokens=[99] * len(plan.draws)))
    request = make_request(58, 30)
    engine_moves.handle(wire.Prepare("m", request, num_computed=57), 0.0)
    engine_moves.turn(0.1)
    transport.pending += both(page_orders.PagesReceived("m", 10, received))
    engine_moves.turn(0.2)
    assert engine_moves.submit(2, request, "m", 0.3) == is_used
    assert transport.of("expect")[0][2] == 7, "full pages are cached"
