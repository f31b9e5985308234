"""Prefixes that other groups pull from the engine loop, over a fake transport."""

from collections.abc import Sequence

import pytest

from phalanx_api import moves, wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_runtime.core.migration import page_orders
from phalanx_runtime.core.page_window import NULL_PAGE
from tests.runtime.engine.stepped_engine import THERE, SteppedEngine, both
from tests.runtime.fake_runner import expected_output, make_request

REQUEST = make_request(22, 6)


def keys(request: wire.Request) -> list[bytes]:
    return PrefixKeys(root_key("", "", request.tenant, request.cache_salt), 4).extend(request.prompt)


def send_prefix(cached_tokens: int = 0, count: int = 2, page_keys: Sequence[bytes] = ()) -> moves.SendPrefix:
    prepared = moves.Prepared(move="m", cached_tokens=cached_tokens, addresses=THERE[:count], key=b"k" * 32)
    return moves.SendPrefix(move="m", prepared=prepared, keys=list(page_keys) or keys(REQUEST))


def holder() -> SteppedEngine:
    """An engine that has computed `REQUEST`."""
    engine = SteppedEngine()
    engine.turn(wire.Submit(1, REQUEST), times=10)
    assert engine.tokens(1) == expected_output(REQUEST)
    return engine


def test_cached_pages_are_sent_and_then_released() -> None:
    engine = holder()
    engine.turn(send_prefix(cached_tokens=8), times=2)
    ((_, _, first, pages, num_computed),) = engine.transport.of("send")
    assert (first, num_computed) == (2, 20) and isinstance(pages, tuple) and len(pages) == 3
    assert engine.inbox.timeouts[-1] is not None, "it waits at most for the timeout"
    assert engine.load.free_pages == 35
    engine.turn(reports=[*both(page_orders.PagesSent("m", 5, 300, 0.1)), (0, page_orders.SendEnded("m"))])
    assert engine.load.free_pages == 35, "the other rank may still read"
    engine.turn(reports=[(1, page_orders.SendEnded("m"))])
    load = engine.load
    assert (load.free_pages, load.leaks) == (40, 0)
    assert not engine.of(moves.MoveFailed) and engine.transport.of("stop") == [("stop", "m")]


@pytest.mark.parametrize("end", ["thaw", "release", "lease", "failed"])
def test_ended_pull_releases_pages_once_ranks_stop(end: str) -> None:
    engine = holder()
    engine.turn(send_prefix(), times=2)
    match end:
        case "thaw":
            engine.turn(moves.Thaw("m"))
        case "release":
            engine.turn(moves.Release("m"))
        case "lease":
            engine.now += 6.0
            engine.turn()
        case _:
            engine.turn(reports=[(1, page_orders.SendFailed("m", "target_lost", "reset"))])
    codes = {"lease": ["lease"], "failed": ["target_lost"]}.get(end, [])
    assert [failed.code for failed in engine.of(moves.MoveFailed)] == codes
    assert engine.transport.of("stop") == [("stop", "m")]
    assert engine.load.free_pages == 35
    engine.turn(reports=both(page_orders.SendEnded("m")))
    load = engine.load
    assert (load.free_pages, load.leaks) == (40, 0)


@pytest.mark.parametrize(
    ("order", "code"),
    [
        (send_prefix(page_keys=keys(make_request(18, 4, seed=5))), "evicted"),
        (send_prefix(cached_tokens=20), "evicted"),
        (send_prefix(count=1), "incompatible"),
    ],
    ids=["another prompt", "the target has as much", "another number of ranks"],
)
def test_impossible_pull_is_answered(order: moves.SendPrefix, code: str) -> None:
    engine = holder()
    engine.turn(order, times=2)
    assert [failed.code for failed in engine.of(moves.MoveFailed)] == [code]
    assert not engine.transport.of("send")
    load = engine.load
    assert (load.free_pages, load.leaks) == (40, 0)


def test_repeated_order_sends_the_pages_once() -> None:
    engine = holder()
    engine.turn(send_prefix(), send_prefix(), times=2)
    assert len(engine.transport.of("send")) == 1 and not engine.of(moves.MoveFailed)


def holder_with_disk() -> SteppedEngine:
    """An engine that has the pages of `REQUEST` only on disk."""
    engine = SteppedEngine(num_host_pages=32)
    engine.turn(reports=both(page_orders.DiskChanged(keys(REQUEST), [])))
    return engine


@pytest.mark.parametrize("count", [5, 2])
def test_pages_on_disk_are_read_and_sent(count: int) -> None:
    engine = holder_with_disk()
    engine.turn(send_prefix(), send_prefix(), times=2)
    ((_, number, num_fetched, _, _),) = engine.transport.of("fetch")
    assert num_fetched == 5 and isinstance(number, int)
    assert not engine.transport.of("send") and engine.inbox.timeouts[-1] is not None
    engine.turn(reports=[(rank, page_orders.PagesFetched(number, count)) for rank in (0, 1)])
    ((_, _, first, pages, num_computed),) = engine.transport.of("send")
    assert (first, num_computed, pages) == (0, 4 * count, (NULL_PAGE,) * count)
    engine.turn(reports=both(page_orders.SendEnded("m")), times=2)
    load = engine.load
    assert (load.host_sent_pages, load.disk_fetched_pages, load.leaks) == (count, count, 0)


@pytest.mark.parametrize("end", ["late", "thaw"])
def test_slow_disk_ends_the_wait_of_a_pull(end: str) -> None:
    """The pages may come later, for others."""
    engine = holder_with_disk()
    engine.turn(send_prefix(), times=2)
    if end == "thaw":
        engine.turn(moves.Thaw("m"))
    else:
        engine.now += 6.0
        engine.turn()
    assert [failed.code for failed in engine.of(moves.MoveFailed)] == (["evicted"] if end == "late" else [])
    ((_, number, _, _, _),) = engine.transport.of("fetch")
    assert isinstance(number, int)
    engine.turn(reports=[(rank, page_orders.PagesFetched(number, 5)) for rank in (0, 1)], times=2)
    assert not engine.transport.of("send") and len(engine.loop.scheduler.pool.host) == 5


def test_requests_run_while_their_prefix_is_sent() -> None:
    engine = holder()
    engine.turn(wire.Submit(2, REQUEST), times=2)
    engine.turn(send_prefix(), times=10)
    assert engine.tokens(2) == expected_output(REQUEST)
    engine.turn(reports=both(page_orders.SendEnded("m")))
    assert engine.load.leaks == 0


def test_new_request_on_arrived_pages_counts_them_as_cached() -> None:
    engine = SteppedEngine()
    engine.turn(wire.Prepare("m", REQUEST), times=2)
    pages = engine.transport.of("expect")[0][3]
    assert isinstance(pages, tuple)
    for position, page in enumerate(pages[:5]):
        engine.runner.put(page, list(REQUEST.prompt[4 * position : 4 * position + 4]))
    engine.turn(reports=both(page_orders.PagesReceived("m", 100, 20)))
    assert engine.of(moves.Arrived) == [moves.Arrived("m", 20, 200)]
    engine.turn(wire.Submit(7, REQUEST, "m"), times=10)
    assert engine.tokens(7) == expected_output(REQUEST)
    assert engine.runner.plans[0].starts == [20]
    assert [end.cached_tokens for frame in engine.of(wire.Tokens) for end in frame.finished] == [20]
    load = engine.load
    assert (load.prefix_queried_tokens, load.prefix_hit_tokens, load.leaks) == (22, 20, 0)
    engine.turn(wire.Submit(8, REQUEST), times=10)
    assert engine.load.prefix_hit_tokens >= 40, "later requests find the pages"
