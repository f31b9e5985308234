"""What is fetched from disk, who waits for it, and what a failure costs."""

from typing import get_args

import pytest

from phalanx_api import wire
from phalanx_api.cost import StepModel
from phalanx_api.engine_config import EvictionPolicy
from phalanx_runtime.core.kv.disk_tier import MAX_WAIT_S, DiskTier, FetchOrder
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.snapshots.slots import SnapshotSlots
from phalanx_runtime.core.kv.tier_sizing import SizingRules
from phalanx_runtime.core.page_window import PageWindow
from phalanx_runtime.core.window_parts import WindowParts

KEYS = [bytes([number]) * 16 for number in range(8)]
KEPT = [number.to_bytes(16, "big") for number in range(2000)]
MODEL = StepModel(fixed_s=0.0, token_s=0.001, knee_tokens=0, context_s=0.0, attention_s=0.0)


def make_tier(num_slots: int = 16, num_ranks: int = 1) -> tuple[PagePool, DiskTier]:
    pool = PagePool(8, 4, num_host_pages=num_slots, has_disk=True)
    return pool, with_keys(DiskTier(pool), KEYS[:6], num_ranks)


def with_keys(tier: DiskTier, keys: list[bytes], num_ranks: int) -> DiskTier:
    """Returns the tier of this many ranks, each of which has these pages on its disk."""
    tier.num_ranks = num_ranks
    for rank in range(num_ranks):
        tier.changed(rank, keys, [])
    return tier


def start(tier: DiskTier, handle: int, keys: list[bytes], now: float = 0.0, model: StepModel | None = None) -> FetchOrder | None:
    return tier.start(handle, tier.find_after(keys, 0), model=model, now=now)


def test_pages_of_all_ranks_are_found_in_host_memory() -> None:
    pool, tier = make_tier(num_ranks=2)
    known = pool.take_changes()
    assert known == wire.PageChanges(0, [(False, key) for key in KEYS[:6]], on_disk=list(range(6)))
    order = start(tier, 1, KEYS)
    assert order is not None
    assert order.keys == KEYS[:6], "the others are not on disk"
    assert tier.is_waiting(1)
    assert tier.fetched(0, order.number, 6, 0.06) == []
    assert pool.host.match(KEYS) == []
    assert tier.fetched(1, order.number, 4, 0.5) == [1]
    assert len(pool.host.match(KEYS)) == 4
    assert tier.page_s == pytest.approx(0.5 / 6), "until the slowest rank has read it"
    assert (tier.counters.fetched, tier.counters.failed) == (4, 2)
    assert tier.keys == set(KEYS[:4]), "a rank lacks the others"
    assert pool.take_changes() == wire.PageChanges(6, [*((True, key) for key in KEYS[:4]), *((False, key) for key in KEYS[4:6])])
    assert pool.check([]) == []
    assert not tier.is_waiting(1)


def test_a_window_fetches_its_pages_only() -> None:
    pool = PagePool(8, 4, num_host_pages=16, has_disk=True)
    tier = DiskTier(pool, pages_before=2)
    tier.changed(0, KEYS[:6], [])
    order = start(tier, 1, KEYS)
    assert order is not None and order.keys == KEYS[4:6]
    assert start(tier, 2, KEYS[:1]) is not None, "a shorter prefix than the window"


def test_a_part_of_a_window_is_not_fetched() -> None:
    pool = PagePool(8, 4, num_host_pages=4, has_disk=True)
    tier = DiskTier(pool, pages_before=3)
    tier.changed(0, KEYS[:6], [])
    assert start(tier, 1, KEYS) is None, "half of the slots are two"
    assert not tier.is_waiting(1) and pool.check([]) == []
    order = start(tier, 1, KEYS[:3])
    assert order is not None and order.keys == KEYS[:2], "the first pages of a prefix are found alone"


def fill_all(pool: PagePool, keys: list[bytes]) -> None:
    """Fills host memory, of which a read may reserve half, with these pages."""
    for first in range(0, len(keys), len(keys) // 2):
        slots, _ = pool.host.reserve(len(keys) // 2)
        pool.host.fill(slots, keys[first : first + len(keys) // 2])
    assert len(pool.host) == len(keys)


def test_a_window_that_does_not_fit_evicts_nothing() -> None:
    pool = PagePool(8, 4, num_host_pages=4, has_disk=True)
    tier = DiskTier(pool, pages_before=3)
    tier.changed(0, KEYS[:6], [])
    fill_all(pool, KEPT[:4])
    assert start(tier, 1, KEYS) is None and len(pool.host.match(KEPT)) == 4


def test_a_snapshot_whose_pages_do_not_fit_evicts_nothing() -> None:
    """The prompt's first 60 pages have that many of 100 slots, and the other 50 are on disk, with its snapshot."""
    pool, snapshots = PagePool(8, 4, num_host_pages=100, has_disk=True), SnapshotSlots(4, 2, has_disk=True)
    tier, keys, others = DiskTier(pool, snapshots=snapshots), KEPT[:110], KEPT[1000:1040]
    fill_all(pool, keys[:60] + others)
    snapshots.fill(snapshots.reserve(1), others[:1])
    tier.changed(0, keys[60:], [])
    tier.changed(0, keys[-1:], [], is_part=True)
    prefix = tier.find(keys)
    assert (prefix.end, len(prefix.keys), len(prefix.part_keys)) == (110, 50, 1)
    assert tier.start(1, prefix, model=None, now=0.0) is None and not tier.is_waiting(1)
    assert len(pool.host.match(keys)) == 60 and len(pool.host.match(others)) == 40 and others[0] in snapshots
    assert pool.check([]) == []


def test_requests_with_the_same_pages_wait_for_one_fetch() -> None:
    _, tier = make_tier()
    order = start(tier, 1, KEYS[:4])
    assert order is not None
    assert start(tier, 2, KEYS[2:5]) is None
    assert tier.is_waiting(2)
    tier.leave(1)
    assert tier.fetched(0, order.number, 4, 0.1) == [2]


def test_slow_disks_are_not_waited_for() -> None:
    pool, tier = make_tier()
    order = start(tier, 1, KEYS)
    assert order is not None
    assert tier.deadline == MAX_WAIT_S
    assert tier.tick(MAX_WAIT_S - 1) == []
    assert tier.tick(MAX_WAIT_S) == [1]
    assert tier.deadline is None
    assert tier.fetched(0, order.number, 6, 20.0) == []
    assert len(pool.host) == 6, "later requests find them"


def test_pages_that_are_faster_to_compute_are_declined() -> None:
    _, tier = make_tier()
    order = start(tier, 1, KEYS[:1])
    assert order is not None
    tier.fetched(0, order.number, 1, 1.0)
    assert start(tier, 2, KEYS[1:], model=MODEL) is None
    assert not tier.is_waiting(2)
    assert tier.counters.declined == 5
    for _ in range(1000):
        if start(tier, 2, KEYS[1:], model=MODEL) is not None:
            break
    assert tier.is_waiting(2), "a slow read is tried again"


def make_large(num_ranks: int = 1) -> DiskTier:
    """Returns a tier with 2,000 pages on disk, each computed in 4 ms by `MODEL`."""
    return with_keys(DiskTier(PagePool(8, 4, num_host_pages=4000, has_disk=True)), KEPT, num_ranks)


def start_all(tier: DiskTier, first: int, count: int, now: float = 0.0) -> list[FetchOrder]:
    """Returns the orders of those of `count` prompts of ten pages, from the one of number `first` on, that wait for the disk."""
    orders = [start(tier, number, KEPT[10 * number : 10 * number + 10], now, MODEL) for number in range(first, first + count)]
    return [order for order in orders if order is not None]


@pytest.mark.parametrize("is_answered", [True, False], ids=["late", "never"])
def test_prompts_stop_waiting_for_a_rank_that_reads_slowly(is_answered: bool) -> None:
    """Rank 0 reads fast. A fetch that another rank answers late, or never, counts as well."""
    tier, num_late, now = make_large(num_ranks=2), 0, 0.0
    for number in range(50):
        for order in start_all(tier, number, 1, now):
            assert tier.fetched(0, order.number, 10, now + 0.001) == []
            num_late += tier.tick(now + MAX_WAIT_S) == [number]
            if is_answered:
                tier.fetched(1, order.number, 10, now + 20.0)
        now += 100.0
    assert num_late <= 2 and tier.counters.declined >= 480


def test_a_late_fetch_is_not_joined() -> None:
    tier = make_large()
    (order,) = start_all(tier, 0, 1)
    assert tier.tick(MAX_WAIT_S) == [0]
    assert start(tier, 1, order.keys, MAX_WAIT_S + 1.0) is None and not tier.is_waiting(1)


def test_reads_before_a_read_count_as_its_time() -> None:
    """A read takes 15 ms, computing its pages 40 ms: two may wait at once, and as many again once these are complete."""
    tier = make_large()
    (order,) = start_all(tier, 0, 1)
    tier.fetched(0, order.number, 10, 0.015)
    orders = start_all(tier, 1, 3, now=1.0)
    assert len(orders) == 2 and tier.counters.declined == 10
    assert tier.fetched(0, orders[0].number, 10, 1.015) == [1]
    assert tier.fetched(0, orders[1].number, 10, 1.030) == [2]
    assert tier.page_s == pytest.approx(0.0015, rel=0.01), "the time in the queue is not the read's own"
    assert len(start_all(tier, 4, 3, now=2.0)) == 2


def test_pages_that_the_disk_dropped_are_not_fetched() -> None:
    _, tier = make_tier(num_ranks=2)
    tier.changed(1, KEYS[6:], [KEYS[0]])
    assert start(tier, 1, KEYS) is None, "rank 1 lost the first page"
    order = start(tier, 2, KEYS[5:])
    assert order is not None
    assert order.keys == [KEYS[5]], "rank 0 lacks the others"


def test_pages_are_found_once_each_rank_has_them() -> None:
    """In any order of the reports: one rank cannot write a page before the other one has written it, and stores it later."""
    _, tier = make_tier(num_ranks=2)
    for rank, added, dropped in ((1, [], KEYS[6:7]), (0, KEYS[6:7], []), (0, KEYS[7:], []), (1, [], KEYS[5:6])):
        tier.changed(rank, added, dropped)
        assert not tier.keys.intersection(KEYS[6:])
    assert tier.keys == set(KEYS[:5])
    tier.changed(1, KEYS[5:7], [])
    assert tier.keys == set(KEYS[:7])


def test_first_requests_do_not_wait_for_all_ranks() -> None:
    """A rank without keys reports too, so that those of the others are forgotten, also by routers."""
    pool, tier = make_tier()
    tier.num_ranks = 2
    pool.take_changes()
    assert tier.keys == set(KEYS[:6]) and start(tier, 1, KEYS[5:]) is not None
    tier.changed(1, KEYS[4:8], [])
    assert tier.keys == set(KEYS[4:6])
    tier.changed(1, [], KEYS[4:8])
    assert not tier.keys
    tier.changed(1, KEYS[:6], [])
    assert tier.keys == set(KEYS[:6]) and pool.check([]) == []


@pytest.mark.parametrize("num_pieces", [1, 4])
def test_further_ranks_cost_only_keys_that_others_have(num_pieces: int) -> None:
    """Each of eight ranks reports its disk at the start, perhaps in pieces: rank 0 looks at a key once, not once per rank."""
    pool, looked_at = PagePool(8, 4, num_host_pages=16, has_disk=True), list[bytes]()
    tier = DiskTier(pool)
    is_on_disk = pool.reports.is_on_disk

    def look(key: bytes) -> bool:
        looked_at.append(key)
        return is_on_disk(key)

    pool.reports.is_on_disk = look
    for rank in range(8):
        keys = [*KEPT, b"own %d" % rank]
        for piece in range(num_pieces):
            tier.changed(rank, keys[piece::num_pieces], [], has_more=piece < num_pieces - 1)
    assert tier.keys == set(KEPT) and sorted(looked_at) == sorted([*KEPT, b"own 0", b"own 0"])


def test_a_rank_that_reads_nothing_is_tried_once() -> None:
    pool, tier = make_tier(num_ranks=2)
    order = start(tier, 1, KEYS)
    assert order is not None
    tier.fetched(0, order.number, 6, 0.01)
    assert tier.fetched(1, order.number, 0, 0.01) == [1]
    assert not tier.keys and start(tier, 2, KEYS) is None
    tier.changed(0, KEYS[:6], [])
    assert not tier.keys, "stored again by one rank"
    tier.changed(1, KEYS[:6], [])
    assert tier.keys == set(KEYS[:6]) and pool.check([]) == []


def test_fetches_take_at_most_half_of_the_slots() -> None:
    pool, tier = make_tier(num_slots=6)
    order = start(tier, 1, KEYS)
    assert order is not None
    assert len(order.slots) == 3
    assert start(tier, 2, KEYS[4:]) is None
    assert not tier.is_waiting(2)
    assert pool.check([]) == []


def test_used_slots_make_room_unless_a_copy_needs_them() -> None:
    pool, tier = make_tier(num_slots=2)
    for page, key in ((0, b"a" * 16), (1, b"b" * 16)):
        pool.host.store(page, key)
        pool.reports.update(key)
    pool.take_changes()
    assert start(tier, 1, KEYS) is None, "their copies are in no plan yet"
    pool.host.take()
    order = start(tier, 1, KEYS)
    assert order is not None
    assert b"a" * 16 not in pool.host
    assert pool.take_changes().changes == [(False, b"a" * 16)]


@pytest.mark.parametrize("eviction", get_args(EvictionPolicy))
def test_a_fetch_keeps_the_prefix_that_it_extends(eviction: EvictionPolicy) -> None:
    """Host memory has the first pages, which are the oldest, and another prompt."""
    pool = PagePool(8, 4, num_host_pages=4, has_disk=True, eviction=eviction)
    tier = DiskTier(pool)
    tier.changed(0, KEYS[2:6], [])
    pool.host.fill(pool.host.reserve(2)[0], KEYS[:2])
    pool.host.fill(pool.host.reserve(2)[0], [b"1" * 16, b"2" * 16])
    order = tier.start(1, tier.find(KEYS), model=None, now=0.0)
    assert order is not None and order.keys == KEYS[2:4]
    assert len(pool.host.match(KEYS)) == 2
    assert tier.fetched(0, order.number, 2, 0.1) == [1]
    assert len(pool.host.match(KEYS)) == 4 and pool.check([]) == []


def test_first_page_of_a_waiting_prefix_stays_longest() -> None:
    pool = PagePool(8, 4, num_host_pages=4, has_disk=True)
    tier = DiskTier(pool)
    tier.changed(0, KEYS[2:4], [])
    pool.host.fill(pool.host.reserve(2)[0], KEYS[:2])
    order = tier.start(1, tier.find(KEYS), model=None, now=0.0)
    assert order is not None and len(order.keys) == 2
    assert pool.host.store(1, b"3" * 16) == KEYS[1]


def test_a_prefix_that_fills_host_memory_is_not_extended() -> None:
    pool = PagePool(8, 4, num_host_pages=4, has_disk=True)
    tier = DiskTier(pool)
    tier.changed(0, KEYS[4:6], [])
    for first in (0, 2):
        pool.host.fill(pool.host.reserve(2)[0], KEYS[first : first + 2])
    order = tier.start(1, tier.find(KEYS), model=None, now=0.0)
    assert order is None and not tier.is_waiting(1)
    assert len(pool.host.match(KEYS)) == 4 and pool.check([]) == []


def make_parts(num_host_parts: int = 16, num_ranks: int = 1) -> tuple[PagePool, DiskTier]:
    """Pages of 4 tokens, of which a layer reads the last two; all pages are on disk, and the parts of some."""
    pool = PagePool(
        8,
        4,
        num_host_pages=16,
        has_disk=True,
        parts=WindowParts(6, 8, PageWindow(8, 4)),
        host_part_rules=SizingRules.fixed(num_host_parts),
    )
    tier = with_keys(DiskTier(pool), KEYS, num_ranks)
    for rank in range(num_ranks):
        tier.changed(rank, [KEYS[1], KEYS[2], KEYS[3], KEYS[5]], [], is_part=True)
    return pool, tier


def test_parts_of_the_last_window_are_fetched() -> None:
    """The parts of pages 2 and 3 are the last two of a window; page 5 lacks the part before it."""
    pool, tier = make_parts(num_ranks=2)
    order = tier.start(1, tier.find(KEYS), model=None, now=0.0)
    assert order is not None
    assert order.keys == KEYS[:4] and order.part_keys == KEYS[2:4]
    assert tier.fetched(0, order.number, 4, 0.04) == []
    assert tier.fetched(1, order.number, 2, 0.05, is_part=True) == []
    assert tier.fetched(0, order.number, 1, 0.08, is_part=True) == []
    assert tier.fetched(1, order.number, 4, 0.12) == [1], "each rank has reported pages and parts"
    assert pool.host.keep(KEYS) == 4 and [key in pool.host_parts for key in KEYS[:4]] == [False, False, True, False]
    assert (tier.page_s, tier.part_s) == pytest.approx((0.03, 0.04)), "until all ranks have them"
    counters = tier.counters
    assert (counters.fetched, counters.fetched_parts, counters.failed) == (4, 1, 1)
    assert KEYS[3] not in tier.part_keys and KEYS[3] in tier.keys, "a rank lacks the part"


def test_parts_alone_are_fetched_for_pages_in_memory() -> None:
    pool, tier = make_parts()
    pool.fill_slots(pool.reserve_slots(5), KEYS[:5])
    slots, _ = pool.host_parts.reserve(1)
    pool.host_parts.fill(slots, KEYS[2:3])
    prefix = tier.find(KEYS)
    assert (prefix.start, prefix.end, prefix.keys, prefix.part_keys) == (0, 4, [], [KEYS[3]])
    order = tier.start(1, prefix, model=None, now=0.0)
    assert order is not None and tier.start(2, tier.find(KEYS), model=None, now=0.0) is None
    assert tier.is_waiting(2), "for the part that is being read"
    assert tier.fetched(0, order.number, 1, 0.01, is_part=True) == [1, 2]


def test_window_that_exceeds_the_slots_is_not_fetched() -> None:
    pool, tier = make_parts(num_host_parts=3)
    assert tier.start(1, tier.find(KEYS), model=None, now=0.0) is None, "half of the slots are one"
    assert not tier.is_waiting(1) and pool.check([]) == []
