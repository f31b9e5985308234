"""Requests wait for pages from disk while others continue, and compute what does not arrive."""

import pytest

from phalanx_api import wire
from phalanx_runtime.core.kv.disk_tier import MAX_WAIT_S
from phalanx_runtime.core.migration.page_orders import DiskChanged, PagesFetched
from phalanx_runtime.engine.load_reports import LOAD_INTERVAL_S
from tests.runtime.engine.slow_grammars import LARGE, SlowCompiler, with_grammar
from tests.runtime.engine.stepped_engine import SteppedEngine, both
from tests.runtime.fake_runner import expected_output, make_request

REQUEST = make_request(13, 5, seed=3)


def make_engine(**more: object) -> SteppedEngine:
    """Three pages of `REQUEST` are on disk."""
    engine = SteppedEngine(num_host_pages=16, **more)  # type: ignore[arg-type]
    keys = engine.loop.scheduler.sharing.make_keys(REQUEST).extend(REQUEST.prompt)
    engine.turn(reports=both(DiskChanged(keys[:3], [])))
    return engine


def test_counts_of_all_ranks_are_summed() -> None:
    engine = make_engine()
    engine.turn(reports=[(0, DiskChanged([], [], 100, 4000, unwritten=2)), (1, DiskChanged([], [], 20, 0, True, 3))])
    engine.turn(wire.Submit(2, make_request(5, 4, seed=9)), times=6)
    load = engine.load
    assert (load.disk_compacted_bytes, load.disk_reclaimed_bytes, load.disk_unwritten_pages) == (120, 4000, 5)
    assert (load.cache_use.compacted_bytes, load.cache_use.reclaimed_bytes) == (120, 4000)


def test_idle_engine_reports_a_changed_disk() -> None:
    """Once per interval: pages are written after the last step of a burst."""
    engine = make_engine()
    engine.turn(wire.Submit(2, make_request(5, 4, seed=9)), times=8)
    before = len(engine.of(wire.Load))
    for number in range(20):
        engine.turn(reports=both(DiskChanged([bytes([number]) * 16], [])))
    assert any(timeout is not None for timeout in engine.inbox.timeouts[-20:]), "it wakes for the last one"
    engine.now += LOAD_INTERVAL_S
    engine.turn(times=2)
    loads = engine.of(wire.Load)[before:]
    assert loads[-1].disk_cached_pages == 23 and 1 < len(loads) <= 7
    assert engine.inbox.timeouts[-1] is None


def fetch_order(engine: SteppedEngine) -> tuple[int, tuple[int, ...]]:
    (order,) = [order for order in engine.transport.orders if order[0] == "fetch"]
    _, number, _, slots, _ = order
    assert isinstance(number, int) and isinstance(slots, tuple)
    return number, slots


def read(engine: SteppedEngine, count: int) -> None:
    """Both ranks read pages, the second one `count` of three."""
    number, slots = fetch_order(engine)
    for place, slot in enumerate(slots):
        engine.runner.put_host(slot, list(REQUEST.prompt[4 * place : 4 * place + 4]))
    engine.turn(reports=[(0, PagesFetched(number, 3)), (1, PagesFetched(number, count))])
    engine.turn(times=12)


def test_request_starts_on_pages_from_disk() -> None:
    engine = make_engine()
    other = make_request(5, 4, seed=9)
    engine.turn(wire.Submit(1, REQUEST), wire.Submit(2, other), times=6)
    assert engine.tokens(1) == []
    assert engine.tokens(2) == expected_output(other)
    read(engine, count=3)
    assert engine.tokens(1) == expected_output(REQUEST)
    assert [cached for frame in engine.of(wire.Tokens) for cached in frame.cached] == [wire.Cached(1, 0, 12)]
    load = engine.load
    assert (load.disk_fetched_pages, load.host_loaded_pages, load.disk_cached_pages) == (3, 3, 3)
    assert (load.free_pages, load.leaks) == (40, 0)


@pytest.mark.parametrize("count", [0, 1])
def test_pages_that_a_rank_lacks_are_computed(count: int) -> None:
    engine = make_engine()
    engine.turn(wire.Submit(1, REQUEST))
    read(engine, count=count)
    assert engine.tokens(1) == expected_output(REQUEST)
    assert (engine.load.host_loaded_pages, engine.load.disk_failed_pages) == (count, 3 - count)


def test_request_does_not_wait_for_a_slow_disk() -> None:
    engine = make_engine()
    engine.turn(wire.Submit(1, REQUEST))
    assert engine.inbox.timeouts[-1] != 0.0
    engine.now += MAX_WAIT_S
    engine.turn(times=12)
    assert engine.tokens(1) == expected_output(REQUEST)
    assert engine.load.host_loaded_pages == 0


def test_aborted_request_leaves_the_pages_to_others() -> None:
    engine = make_engine()
    engine.turn(wire.Submit(1, REQUEST))
    engine.turn(wire.Abort([1]))
    read(engine, count=3)
    assert engine.tokens(1) == []
    engine.turn(wire.Submit(2, REQUEST), times=12)
    assert engine.tokens(2) == expected_output(REQUEST)
    assert engine.load.host_loaded_pages == 3


def test_request_waits_for_grammar_and_pages() -> None:
    grammars = SlowCompiler()
    engine = make_engine(grammars=grammars)
    engine.turn(wire.Submit(1, with_grammar(LARGE, REQUEST)))
    read(engine, count=3)
    assert engine.tokens(1) == []
    grammars.may_continue.set()
    for _ in range(2000):
        engine.turn()
        if len(engine.tokens(1)) == 5:
            break
    assert engine.tokens(1) == expected_output(REQUEST)
    assert engine.load.host_loaded_pages == 3
