from dataclasses import replace

import pytest

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_runtime.core.kv.page_check import find_errors
from phalanx_runtime.core.kv.page_pool import PagePool


def test_pages_are_allocated_in_order_last_freed_first() -> None:
    pool = PagePool(4, 16)
    assert pool.allocate(3) == [0, 1, 2]
    pool.release([0, 1])
    assert pool.allocate(2) == [0, 1]
    assert pool.free_pages == 1


def test_nothing_is_allocated_when_too_few_pages_are_free() -> None:
    pool = PagePool(2, 16)
    assert pool.allocate(3) is None
    assert pool.free_pages == 2


def test_a_shared_page_is_free_after_its_last_holder() -> None:
    pool = PagePool(2, 16)
    pages = pool.allocate(1)
    assert pages is not None
    pool.share(pages)
    pool.release(pages)
    assert pool.free_pages == 1
    assert pool.check([pages]) == []
    pool.release(pages)
    assert pool.free_pages == 2


@pytest.mark.parametrize(("tokens", "pages"), [(0, 0), (1, 1), (16, 1), (17, 2)])
def test_pages_for(tokens: int, pages: int) -> None:
    assert PagePool(1, 16).pages_for(tokens) == pages


def test_releasing_twice_is_a_bug() -> None:
    pool = PagePool(1, 16)
    pages = pool.allocate(1)
    assert pages is not None
    pool.release(pages)
    with pytest.raises(AssertionError, match="once too often"):
        pool.release(pages)
    with pytest.raises(AssertionError, match="cannot be shared"):
        pool.share(pages)


def test_check_names_the_violation() -> None:
    pool = PagePool(3, 16)
    held = pool.allocate(2)
    assert held == [0, 1]
    assert pool.check([[0, 1]]) == []
    assert pool.check([[0]]) == ["page 1 has 1 holders, expected 0"]
    assert pool.check([[0, 1, 2]]) == ["page 2 has 0 holders, expected 1"]


def test_check_finds_leaked_doubled_and_held_free_pages() -> None:
    pool = PagePool(3, 16)
    pool.allocate(1)
    errors = {
        (1,): "1 pages are neither free nor held",
        (1, 2, 2): "1 pages are in the free list twice",
        (0, 1, 2): "page 0 is free and held",
    }
    for free, error in errors.items():
        assert error in find_errors(replace(pool.state(), free=free), [[0]])


@pytest.mark.parametrize(("pages", "size"), [(0, 16), (1, 0)])
def test_an_empty_pool_is_refused(pages: int, size: int) -> None:
    with pytest.raises(ValueError, match=f"num_pages={pages} page_size={size}"):
        PagePool(pages, size)


def keys_of(tokens: list[int], page_size: int = 4, tenant: str = "") -> list[bytes]:
    return PrefixKeys(root_key("m", tenant=tenant), page_size).extend(tokens)


def start(pool: PagePool, tokens: list[int]) -> list[int]:
    """Returns the pages of a new request, allocated as by the scheduler."""
    keys = keys_of(tokens, pool.page_size)
    found = pool.match(keys[: (len(tokens) - 1) // pool.page_size])
    pool.reuse(found, len(keys))
    new = pool.allocate(pool.pages_for(len(tokens)) - len(found))
    assert new is not None
    pages = found + new
    for i in range(len(found), len(keys)):
        pool.publish(pages[i], keys[i], pages[i - 1] if i else None, tokens[i * pool.page_size : (i + 1) * pool.page_size])
    return pages


def write(pool: PagePool, pages: list[int], num_tokens: int) -> None:
    for i, page in enumerate(pages):
        pool.mark_written(page, max(0, min(pool.page_size, num_tokens - i * pool.page_size)))


def test_written_prefix_is_found_after_its_request() -> None:
    pool = PagePool(8, 4)
    pages = start(pool, list(range(10)))
    write(pool, pages, 10)
    pool.release(pages)
    assert (pool.free_pages, pool.cached_pages) == (8, 2)
    assert start(pool, list(range(10)))[:2] == pages[:2]
    assert (pool.counters.hits, pool.counters.misses, pool.counters.reused) == (2, 2, 2)


def test_a_burst_shares_pages_before_they_are_written() -> None:
    pool = PagePool(8, 4)
    first, second = start(pool, list(range(9))), start(pool, list(range(9)))
    assert second[:2] == first[:2] and second[2] != first[2]
    assert [pool.written(page) for page in second] == [0, 0, 0]
    pool.mark_written(first[0], 3)
    assert pool.written(second[0]) == 3
    assert pool.counters.reused == 0


def test_unwritten_pages_are_free_and_not_found() -> None:
    pool = PagePool(8, 4)
    first, second = start(pool, list(range(9))), start(pool, list(range(9)))
    pool.mark_written(first[0], 4)
    pool.release(first)
    assert pool.match(keys_of(list(range(9)))) == second[:2], "the second holder may still write the second page"
    pool.release(second)
    assert pool.match(keys_of(list(range(9)))) == first[:1]
    assert (pool.free_pages, pool.cached_pages) == (8, 1)
    assert pool.check([]) == []


def test_leaf_pages_are_evicted_first() -> None:
    pool = PagePool(4, 4)
    old, new = start(pool, [1] * 8), start(pool, [2] * 8)
    for pages in (old, new):
        write(pool, pages, 8)
        pool.release(pages)
    assert pool.allocate(1) == [old[1]]
    assert pool.allocate(1) == [old[0]]
    assert pool.match(keys_of([2] * 8)) == new
    assert pool.counters.evicted == 2


def test_page_with_an_existing_key_ends_its_chain() -> None:
    pool = PagePool(8, 4)
    first, second = start(pool, list(range(8))), start(pool, list(range(8)))
    assert second[1] != first[1], "the last token is left to compute"
    grown, more = pool.allocate(1), keys_of(list(range(12)))
    assert grown is not None and not pool.publish(grown[0], more[2], second[1])
    assert pool.match(more) == first


def test_page_takes_over_the_key_of_an_idle_one() -> None:
    pool = PagePool(8, 4)
    tokens = list(range(8))
    old = start(pool, tokens)
    write(pool, old, 8)
    pool.release(old)
    new = start(pool, tokens)
    assert new[0] == old[0] and new[1] != old[1]
    assert pool.match(keys_of(tokens)) == new
    grown = pool.allocate(1)
    assert grown is not None and pool.publish(grown[0], keys_of(list(range(12)))[2], new[1])
    assert pool.check([new + grown]) == []
    assert [is_added for is_added, _ in pool.take_changes().changes] == [True, True, False, True, True]


def test_partial_page_match_is_found_as_far_as_written() -> None:
    pool = PagePool(3, 4)
    pages = start(pool, [0, 1, 2, 3, 4, 5, 6, 7])
    pool.mark_written(pages[0], 4)
    assert pool.match_partial(pages[0], [4, 5, 9]) is None, "no slot is written"
    pool.mark_written(pages[1], 4)
    assert pool.match_partial(pages[0], [4, 5, 9]) == (pages[1], 2)
    assert pool.match_partial(pages[0], [5]) is None


def test_eviction_keeps_the_partial_match_of_a_newer_page() -> None:
    pool = PagePool(3, 4)
    old = start(pool, [0, 1, 2, 3, 4, 5, 6, 7])
    write(pool, old, 8)
    new = start(pool, [0, 1, 2, 3, 4, 5, 8, 9])
    write(pool, new, 8)
    pool.release(old)
    assert pool.allocate(1) == [old[1]]
    assert pool.match_partial(new[0], [4, 5, 8]) == (new[1], 3)


def test_events_list_the_findable_pages() -> None:
    pool = PagePool(2, 4, event_log=3)
    keys = keys_of([1] * 8)
    pages = start(pool, [1] * 8)
    write(pool, pages, 8)
    pool.release(pages)
    assert pool.take_changes() == wire.PageChanges(0, [(True, keys[0]), (True, keys[1])])
    pool.allocate(2)
    assert pool.take_changes() == wire.PageChanges(2, [(False, keys[1]), (False, keys[0])])
    assert pool.take_changes() == wire.PageChanges(4, [])
    assert pool.keys() == []


@pytest.mark.parametrize("pages", [3, 4])
def test_overflowing_log_gives_a_snapshot(pages: int) -> None:
    pool = PagePool(5, 4, event_log=2)
    held = start(pool, [1] * 4 * pages)
    snapshot = [(True, key) for key in keys_of([1] * 4 * pages)]
    assert pool.take_changes() == wire.PageChanges(pages, snapshot, is_snapshot=True)
    pool.release(held)
    assert pool.take_changes() == wire.PageChanges(2 * pages, [], is_snapshot=True), "all were removed again"
    start(pool, [2] * 4)
    assert pool.take_changes() == wire.PageChanges(2 * pages, [(True, key) for key in keys_of([2] * 4)])


def test_salt_separates_prefixes() -> None:
    roots = [root_key("m"), root_key("n"), *(root_key("m", **{name: "a"}) for name in ("adapter", "tenant", "cache_salt"))]
    keys = {PrefixKeys(root, 4).extend([1] * 4)[0] for root in roots}
    assert len(keys) == 5 and {len(key) * 8 for key in keys} == {128}
    assert keys_of([1] * 4, tenant="a") != keys_of([1] * 4, tenant="b")
    assert root_key("m", "ab") != root_key("ma", "b")


def test_keys_are_hashed_once_as_tokens_arrive() -> None:
    prefix = PrefixKeys(root_key("m"), 4)
    for end in (3, 4, 5, 9, 16):
        assert len(prefix.extend(list(range(end)))) == end // 4
    assert prefix.keys == keys_of(list(range(16)))
    assert keys_of([0, 1, 2, 3, 9, 9, 9, 9])[0] == prefix.keys[0]
