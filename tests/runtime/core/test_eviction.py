import json
import os
import random
from collections.abc import Iterable
from hashlib import blake2b
from pathlib import Path

import pytest

from phalanx_api.engine_config import EVICTION_POLICIES, EvictionPolicy
from phalanx_runtime.core.kv.eviction.adaptive import Adaptive, GhostCaches
from phalanx_runtime.core.kv.eviction.orders import Lfu, Lru
from phalanx_runtime.core.kv.eviction.tinylfu import Sketch
from phalanx_runtime.core.kv.page_pool import PagePool
from tests.runtime.core.reference_caches import ExactCounts, SlowWTinyLfu, make_slow, slow_hits

TRACE_FOLDER = Path(os.environ.get("PHALANX_TRACES") or Path(__file__).parents[4] / "shared" / "traces")
CONVERSATIONS = TRACE_FOLDER / "mooncake_conversation_trace.jsonl"
FIXED = tuple(policy for policy in EVICTION_POLICIES if policy != "adaptive")


def as_keys(ids: Iterable[object]) -> list[bytes]:
    return [blake2b(str(i).encode(), digest_size=16).digest() for i in ids]


def zipf(length: int = 6000, keys: int = 1000, seed: int = 1) -> list[bytes]:
    draw = random.Random(seed)
    return as_keys(draw.choices(range(keys), [1 / (i + 1) for i in range(keys)], k=length))


def zipf_with_scans(length: int = 6000, keys: int = 1000) -> list[bytes]:
    """Returns popular keys, and between them long runs of unique keys."""
    popular = zipf(length, keys)
    scans = as_keys(f"scan {i}" for i in range(length))
    return [key for start in range(0, length, 300) for key in popular[start : start + 300] + scans[start : start + 300]]


def loop(length: int = 4000, keys: int = 120) -> list[bytes]:
    return as_keys(i % keys for i in range(length))


TRACES = {"zipf": zipf, "zipf with scans": zipf_with_scans, "loop": loop}


def pool_hits(policy: EvictionPolicy, capacity: int, trace: Iterable[bytes]) -> tuple[list[bool], PagePool]:
    """Returns for each key, a request of one page, whether the pool found it."""
    pool = PagePool(capacity, 1, policy)
    found = []
    for key in trace:
        pages = pool.match([key])
        found.append(bool(pages))
        pool.reuse(pages, 1)
        if not pages:
            pages = pool.allocate(1) or []
            pool.publish(pages[0], key, None)
            pool.mark_written(pages[0], 1)
        pool.release(pages)
    return found, pool


@pytest.mark.parametrize("trace", TRACES)
@pytest.mark.parametrize("policy", FIXED)
def test_policy_equals_its_reference_implementation(policy: EvictionPolicy, trace: str) -> None:
    keys = TRACES[trace]()
    found, pool = pool_hits(policy, 100, keys)
    assert found == slow_hits(make_slow(policy, 100), 100, keys)
    assert pool.counters.evicted > 0


@pytest.mark.skipif(not CONVERSATIONS.exists(), reason="the trace is not on this machine")
def test_w_tinylfu_equals_the_reference_on_real_conversations() -> None:
    with CONVERSATIONS.open() as lines:
        ids = [i for _, line in zip(range(1000), lines, strict=False) for i in json.loads(line)["hash_ids"]]
    capacity = len(set(ids)) // 10
    found, _ = pool_hits("w-tinylfu", capacity, as_keys(ids))
    assert sum(found) > 0
    assert found == slow_hits(SlowWTinyLfu(capacity), capacity, as_keys(ids))


def test_a_sketch_costs_w_tinylfu_few_hits() -> None:
    keys = zipf_with_scans()
    found, _ = pool_hits("w-tinylfu", 100, keys)
    exact = slow_hits(SlowWTinyLfu(100, ExactCounts), 100, keys)
    assert abs(sum(found) - sum(exact)) <= 0.02 * sum(exact)


def test_w_tinylfu_keeps_popular_pages_from_scans() -> None:
    keys = zipf_with_scans()
    assert sum(pool_hits("w-tinylfu", 100, keys)[0]) > 1.1 * sum(pool_hits("lru", 100, keys)[0])


@pytest.mark.parametrize("policy", ["lfu", "adaptive"])
def test_counts_follow_a_working_set_that_changes(policy: EvictionPolicy) -> None:
    """Keys that were popular do not keep those out that are."""
    before, after = zipf(keys=300), as_keys(f"new {key!r}" for key in zipf(keys=300, seed=2))
    alone = sum(pool_hits(policy, 100, after)[0])
    assert sum(pool_hits(policy, 100, before + after)[0][len(before) :]) >= 0.95 * alone


def test_estimates_are_never_below_the_count_and_fade() -> None:
    sketch = Sketch(16)
    for _ in range(20):
        sketch.add(7 << 32 | 5)
    assert sketch.estimate(7 << 32 | 5) == 15
    for i in range(140):
        sketch.add(i * 0x9E3779B97F4A7C15 % 2**64)
    assert 7 <= sketch.estimate(7 << 32 | 5) < 15


@pytest.mark.slow
@pytest.mark.parametrize("trace", TRACES)
def test_adaptive_is_near_the_best(trace: str) -> None:
    keys = TRACES[trace]() * 3
    best = max(sum(pool_hits(policy, 100, keys)[0]) for policy in FIXED)
    assert sum(pool_hits("adaptive", 100, keys)[0]) >= 0.95 * best


def test_adaptive_policy_switches_to_the_better_one() -> None:
    pool = PagePool(100, 1, "adaptive")
    policy = pool.eviction
    assert isinstance(policy, Adaptive) and policy.name == "lru"
    for key in zipf_with_scans():
        pages = pool.match([key])
        pool.reuse(pages, 1)
        if not pages:
            pages = pool.allocate(1) or []
            pool.publish(pages[0], key, None)
            pool.mark_written(pages[0], 1)
        pool.release(pages)
    assert policy.name in ("lfu", "w-tinylfu")
    assert pool.allocate(100) is not None, "the current policy selects every page"
    assert pool.cached_pages == 0


def test_adaptive_of_one_policy_is_that_policy() -> None:
    idle = bytearray(4)
    adaptive, lfu = Adaptive(4, idle, {"lfu": Lfu}), Lfu(4, idle)
    for policy in (adaptive, lfu):
        for page in range(4):
            policy.on_insert(page, page << 60)
        policy.on_hit(0)
        for page in range(4):
            idle[page] = 1
            policy.on_release(page, page + 1)
            policy.on_idle(page)
    assert adaptive.victim() == lfu.victim() == 1


def test_a_lead_must_last_two_periods() -> None:
    ghosts = GhostCaches(4, {"lru": Lru, "lfu": Lfu})
    answers = []
    for key in [1, 1, 1, 2, 3, 4, 5] * 12:
        if ghosts.access(key):
            answers.append(ghosts.better_than("lru"))
    assert answers[0] is None
    assert ghosts.better_than("lfu") is None


def test_ghosts_of_a_large_pool_see_a_sample() -> None:
    ghosts = GhostCaches(512 * 64, {"lru": Lru})
    num_sampled = sum(key < ghosts.sample_bound for key in (int.from_bytes(k[:8], "little") for k in as_keys(range(6400))))
    assert 50 <= num_sampled <= 150


@pytest.mark.parametrize("policy", EVICTION_POLICIES)
def test_idle_pages_used_again_leave_no_residue(policy: EvictionPolicy) -> None:
    keys = as_keys(range(8))
    found, pool = pool_hits(policy, 8, keys * 100)
    assert sum(found) == 8 * 99
    assert pool.counters.reused == 8 * 99
    assert pool.check([]) == []
