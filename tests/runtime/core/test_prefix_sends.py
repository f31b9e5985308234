"""Cached prefixes that leave a leader: when their pages are held, and when they are released."""

import pytest

from phalanx_api import moves
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.tier_sizing import SizingRules
from phalanx_runtime.core.migration import records
from phalanx_runtime.core.migration.prefix import PrefixSends
from phalanx_runtime.core.page_window import PageWindow
from phalanx_runtime.core.scheduling.prefix_holds import NO_SLOT, HeldPrefix, NotHeld, PrefixHolds
from phalanx_runtime.core.window_parts import WindowParts

KEYS = [bytes([i]) * 16 for i in range(6)]
HERE = [moves.PageAddress("b", 8001), moves.PageAddress("b", 8002)]
STALL_S = records.DEFAULT_LIMITS.stall_s


def order(cached_tokens: int = 0, num_ranks: int = 2) -> moves.SendPrefix:
    prepared = moves.Prepared(move="m", cached_tokens=cached_tokens, addresses=HERE[:num_ranks], key=b"k")
    return moves.SendPrefix(move="m", prepared=prepared, keys=KEYS)


def sends() -> PrefixSends:
    return PrefixSends(num_ranks=2, page_size=4)


def kinds(actions: list[records.PrefixAction]) -> list[str]:
    return [
        f"MoveFailed {action.frame.code}"
        if isinstance(action, records.SendFrame) and isinstance(action.frame, moves.MoveFailed)
        else type(action).__name__
        for action in actions
    ]


def test_pages_are_released_after_the_last_rank() -> None:
    prefixes = sends()
    (start,) = prefixes.start(order(cached_tokens=8), 5, 1.0)
    assert isinstance(start, records.StartSend) and (start.first, start.num_computed) == (2, 20)
    assert prefixes.ended("m", 1) == [] and prefixes.ended("m", 1) == []
    assert kinds(prefixes.ended("m", 0)) == ["StopCopy", "ReleasePrefix"]
    assert not len(prefixes) and prefixes.deadline is None


@pytest.mark.parametrize("end", ["stop", "failed", "tick"])
def test_ended_send_keeps_its_pages_until_every_rank_stops(end: str) -> None:
    prefixes = sends()
    prefixes.start(order(), 5, 1.0)
    match end:
        case "stop":
            assert kinds(prefixes.stop("m", "why")) == ["StopCopy"]
        case "failed":
            assert kinds(prefixes.failed("m", "target_lost", "why")) == ["StopCopy", "MoveFailed target_lost"]
        case _:
            assert prefixes.tick(0.9 + STALL_S) == []
            assert kinds(prefixes.tick(1.0 + STALL_S)) == ["StopCopy", "MoveFailed lease"]
    assert prefixes.deadline is None
    assert prefixes.stop("m", "again") == prefixes.failed("m", "x", "again") == prefixes.tick(99.0) == []
    assert prefixes.ended("m", 0) == []
    assert kinds(prefixes.ended("m", 1)) == ["StopCopy", "ReleasePrefix"]


def test_progress_of_a_rank_extends_the_timeout() -> None:
    prefixes = sends()
    prefixes.start(order(), 5, 1.0)
    prefixes.sent("m", 3.0)
    assert prefixes.deadline == 3.0 + STALL_S


def test_group_of_another_size_gets_no_pages() -> None:
    prefixes = sends()
    assert kinds(prefixes.start(order(num_ranks=1), 5, 1.0)) == ["ReleasePrefix", "MoveFailed incompatible"]
    assert "m" not in prefixes


def test_events_of_unknown_prefixes_have_no_effect() -> None:
    prefixes = sends()
    assert prefixes.ended("m", 0) == prefixes.sent("m", 1.0) == prefixes.failed("m", "x", "y") == prefixes.stop("m", "z") == []


def cached_pool(num_pages: int = 12) -> PagePool:
    """A pool of pages with 4 slots; `KEYS[:5]` are cached, of which the last is not fully written."""
    pool = PagePool(num_pages, 4)
    pages = pool.allocate(5)
    assert pages is not None
    for i, page in enumerate(pages):
        assert pool.publish(page, KEYS[i], pages[i - 1] if i else None)
        pool.mark_written(page, 4 if i < 4 else 3)
    return pool


def test_fully_written_pages_are_held() -> None:
    pool = cached_pool()
    holds = PrefixHolds(pool)
    held = holds.hold("m", KEYS, 1)
    assert isinstance(held, HeldPrefix) and held.pages == pool.match(KEYS)[:4] and list(holds.held()) == [held.pages]
    assert isinstance(again := holds.hold("m", KEYS, 1), NotHeld) and again.code == "unknown"
    holds.release("m")
    holds.release("m")
    assert not len(holds)
    assert pool.check([pool.match(KEYS)]) == []


@pytest.mark.parametrize(
    ("keys", "num_known", "code"),
    [(KEYS, 4, "evicted"), (KEYS[5:], 0, "evicted"), ([], 0, "evicted")],
    ids=["the target has as many", "not cached", "no key"],
)
def test_prefix_without_more_pages_is_refused(keys: list[bytes], num_known: int, code: str) -> None:
    held = PrefixHolds(cached_pool()).hold("m", keys, num_known)
    assert isinstance(held, NotHeld) and held.code == code


def tiered_pool() -> PagePool:
    """A pool whose host memory has `KEYS[2:5]` and whose device has `KEYS[:2]`."""
    pool = PagePool(12, 4, num_host_pages=16)
    pages = pool.allocate(5)
    assert pages is not None
    for i, page in enumerate(pages):
        assert pool.publish(page, KEYS[i], pages[i - 1] if i else None)
        pool.mark_written(page, 4)
    pool.release(pages)
    pool.evict_ahead(10)
    return pool


def test_pages_in_host_memory_are_held_too() -> None:
    pool = tiered_pool()
    holds = PrefixHolds(pool)
    refused = holds.hold("m", KEYS, 0)
    assert isinstance(refused, HeldPrefix) and len(refused.pages) == 2, "the next plan stores the others"
    holds.release("m")
    pool.host.take()
    held = holds.hold("m", KEYS, 1)
    assert isinstance(held, HeldPrefix)
    assert held.on_device == pool.match(KEYS) and held.slots == [NO_SLOT] * 2 + pool.host.match(KEYS[2:])
    assert held.first_readable == 0 and len(held.in_host) == 3 == pool.host.counters.sent
    for number in range(40):
        pool.host.store(number % 7, bytes([99, number]) * 8)
        pool.host.take()
    assert pool.host.match(KEYS[2:]) == held.in_host, "no other page gets their slots"
    holds.release("m")
    pool.host.want(0, "test")
    assert pool.check([]) == []


def test_a_quarter_of_host_memory_is_held_at_most() -> None:
    pool = tiered_pool()
    pool.host.take()
    others = [bytes([7, number]) * 8 for number in range(4)]
    for page, key in enumerate(others):
        pool.host.store(page, key)
    pool.host.take()
    held = PrefixHolds(pool).hold("m", KEYS, 0)
    assert isinstance(held, HeldPrefix) and len(held.in_host) == 3
    assert len(pool.host.pin(others)) == 1, "of 16 slots"


def parted_pool(num_host_parts: int) -> PagePool:
    """A pool whose host memory has `KEYS[2:5]` and the parts of `KEYS[3:5]`; a window of two pages is before each page."""
    window = PageWindow(9, 4)
    rules = SizingRules.fixed(num_host_parts)
    pool = PagePool(12, 4, num_host_pages=16, parts=WindowParts(8, 12, window), host_part_rules=rules)
    pages, parts = pool.allocate(5), pool.parts
    assert pages is not None and parts is not None and parts.hold(pages)
    for i, page in enumerate(pages):
        assert pool.publish(page, KEYS[i], pages[i - 1] if i else None)
        pool.mark_written(page, 4)
        parts.mark_written(page, 4)
    parts.want(pages, 5)
    parts.unhold(pages)
    pool.release(pages)
    pool.evict_ahead(10)
    pool.host.take()
    pool.host_parts.take()
    return pool


def test_parts_in_host_memory_are_held_too() -> None:
    pool = parted_pool(16)
    holds = PrefixHolds(pool)
    held = holds.hold("m", KEYS, 1)
    assert isinstance(held, HeldPrefix) and len(held.pages) == 5 and held.on_device == pool.match(KEYS[:2])
    assert held.parts_in_host == pool.host_parts.match(KEYS[3:5]) and list(holds.with_parts()) == [[]]
    holds.release("m")
    short = holds.hold("m", KEYS[:4], 1)
    assert isinstance(short, HeldPrefix) and len(short.pages) == 2, "the part of the third page is lost"
    assert not short.in_host and list(holds.with_parts()) == [pool.match(KEYS[:2])]
    holds.release("m")
    assert pool.check([]) == []


def test_device_pages_are_held_if_slots_for_parts_lack() -> None:
    """A quarter of four slots is one, and a window needs two."""
    held = PrefixHolds(parted_pool(4)).hold("m", KEYS, 1)
    assert isinstance(held, HeldPrefix) and len(held.pages) == 2 and not held.in_host + held.parts_in_host


def test_hold_that_would_fill_the_pool_is_refused() -> None:
    pool = cached_pool()
    pool.release(pool.match(KEYS))
    others = pool.allocate(pool.free_pages - 4)
    assert others is not None and len(pool.match(KEYS)) == 4
    held = PrefixHolds(pool).hold("m", KEYS, 0)
    assert isinstance(held, NotHeld) and held.code == "no_room"
    assert pool.check([others]) == []
