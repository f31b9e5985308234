"""The curve of the host tier against pools that have one."""

import random
import tracemalloc
from functools import cache

import pytest

from bench.engine.eviction import make_trace
from phalanx_api.cache_curve import NO_TIERS
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.tier_hits import TierHits

DEVICE = 600
NO_PAGES = TierHits(DEVICE, has_host=False, has_disk=False)


@cache
def after(kind: str, num_host: int, num_prompts: int = 6000) -> TierHits:
    """Returns the lookups of a trace in a pool with a host tier of that many pages, as a group serves it."""
    pool = PagePool(DEVICE, 1, "lru", num_host_pages=num_host)
    for keys in make_trace(kind, num_prompts):
        pages = pool.match(keys)
        num_found = len(pages)
        pool.reuse(pages, len(keys))
        pages += pool.allocate(len(keys) - num_found) or []
        slots = pool.host.match(keys[num_found:])
        pool.host.hits.look_up(keys, num_found, len(slots), 0)
        pool.host.load(slots, pages[num_found : num_found + len(slots)])
        for i in range(num_found, len(keys)):
            pool.publish(pages[i], keys[i], pages[i - 1] if i else None)
            pool.mark_written(pages[i], 1)
        pool.release(pages)
        pool.host.take()
    assert not pool.check([])
    return pool.host.hits


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["zipf", "scan"])
@pytest.mark.parametrize("seen_with", [0, 400, 2400], ids=["without a tier", "with a small tier", "with a large tier"])
def test_curve_predicts_other_sizes(kind: str, seen_with: int) -> None:
    sizes = [size for size in (200, 400, 600, 1200, 2400) if not seen_with or size <= 4 * seen_with]
    estimates = after(kind, seen_with).hit_rates(sizes)
    assert not seen_with or after(kind, seen_with).report().host == pytest.approx(estimates[sizes.index(seen_with)], abs=0.005)
    counted = [after(kind, size).report().host for size in sizes]
    assert counted[-1] is not None and counted[0] is not None and counted[-1] - counted[0] > 0.03, "the size matters"
    assert estimates == pytest.approx(counted, abs=0.02)


def test_tier_that_holds_copies_of_the_device_finds_nothing() -> None:
    """Pages used in turn by a device that holds 600: each was loaded, and stays in both tiers."""
    keys = [[number.to_bytes(16, "big")] for number in range(1000)]
    hits = TierHits(500, has_host=True, has_disk=False)
    for _ in range(20):
        for place, key in enumerate(keys):
            hits.look_up(key, 0, 1, 0)
            hits.evict(keys[place - 600][0])
    assert hits.hit_rates([500, 900])[0] < 0.05
    assert hits.hit_rates([1000])[0] > 0.9


def test_without_lookups_nothing_is_reported() -> None:
    assert NO_PAGES.report() == NO_TIERS
    assert NO_PAGES.hit_rates([1.0]) == [0.0]


def test_pages_from_disk_count_for_the_disk_alone() -> None:
    hits = TierHits(100, has_host=True, has_disk=True)
    keys = [number.to_bytes(16, "big") for number in range(10)]
    for key in keys[2:5]:
        hits.evict(key)
    hits.look_up(keys, 2, 3, 4)
    report = hits.report()
    assert (report.host, report.disk) == (0.5, 0.9)
    assert hits.hit_rates([0, 100]) == pytest.approx([0.2, 0.5]), "later pages were in no tier"


def test_declined_pages_count_as_misses() -> None:
    hits = TierHits(100, has_host=True, has_disk=True)
    keys = [number.to_bytes(16, "big") for number in range(10)]
    for key in keys:
        hits.evict(key)
    hits.look_up(keys, 2, 8, 0, is_used=False)
    assert hits.report().host == 0.2
    assert hits.hit_rates([100]) == pytest.approx([0.2])


def test_old_lookups_count_less() -> None:
    hits = TierHits(100, has_host=True, has_disk=False)
    for number in range(20_000):
        hits.look_up([number.to_bytes(16, "big")], 0, 0, 0)
    assert hits.lookups < 16_384
    for _ in range(60_000):
        hits.look_up([b"k" * 16], 1, 0, 0)
    found = hits.report().host
    assert found is not None and found > 0.85


@pytest.mark.slow
def test_both_curves_fit_in_8_mib() -> None:
    draw = random.Random(0)
    tracemalloc.start()
    hits, other = (TierHits(1 << 20, has_host=True, has_disk=True) for _ in range(2))
    for _ in range(1000):
        keys = [draw.randbytes(16) for _ in range(512)]
        for tier in (hits, other):
            tier.look_up(keys, 0, 0, 0)
            for key in keys:
                tier.evict(key)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert hits.curve.rate < 0.05, "the sampling rate was lowered"
    assert peak <= 8 << 20
