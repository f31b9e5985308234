"""The online miss-ratio curve against exact simulations."""

import os
import random
import tracemalloc
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from bench.engine.eviction import Prompts, make_trace, read_trace, replay
from bench.engine.miss_ratio import drawn, exact_hit_rates, rate_at, run_pool
from phalanx_api.cache_curve import SIZES
from phalanx_runtime.core.kv.miss_ratio import EXACT_PAGES, MissRatioCurve

TRACE_FOLDER = Path(os.environ.get("PHALANX_TRACES") or Path(__file__).parents[4] / "shared" / "traces")
CONVERSATIONS = TRACE_FOLDER / "mooncake_conversation_trace.jsonl"
NEVER = 10**15


def chain(path: tuple[int, ...]) -> list[bytes]:
    """Returns the chained keys of pages with these contents."""
    keys, parent = [], b""
    for content in path:
        parent = blake2b(parent + bytes([content]), digest_size=16).digest()
        keys.append(parent)
    return keys


def simulated_hits(prompts: Prompts, capacity: int) -> int:
    """Hits of an LRU cache: a lookup ends at the first missing page; pages are used from the last to the first."""
    cache: list[bytes] = []  # the most recently used key first
    hits = 0
    for keys in prompts:
        hits += next((i for i, key in enumerate(keys) if key not in cache), len(keys))
        for key in reversed(keys):
            if key in cache:
                cache.remove(key)
            cache.insert(0, key)
        del cache[capacity:]
    return hits


def curve_of(prompts: Prompts, max_pages: int, found: Sequence[int] = (), **settings: int) -> MissRatioCurve:
    """Returns the curve after these prompts. `found`: how many pages of each the pool has, by default none."""
    curve = MissRatioCurve(max_pages, **{"half_life": NEVER, **settings})
    for keys, num_found in zip(prompts, found or [0] * len(prompts), strict=True):
        curve.look_up(keys, num_found)
    return curve


PATHS = st.lists(st.lists(st.integers(0, 2), max_size=5).map(tuple), max_size=30)


@given(PATHS, st.integers(1, 40), st.integers(0, 5))
def test_unsampled_curve_equals_a_simulation_at_every_size(paths: list[tuple[int, ...]], max_pages: int, found: int) -> None:
    prompts = [chain(path) for path in paths]
    curve, total = curve_of(prompts, max_pages, [min(found, len(path)) for path in paths]), sum(map(len, prompts))
    assert curve.rate == 1 and curve.lookups == total
    for size in range(1, max_pages + 1):
        assert curve.hit_rate(size) * total == pytest.approx(simulated_hits(prompts, size))


@given(PATHS)
def test_exact_reference_equals_a_simulation(paths: list[tuple[int, ...]]) -> None:
    prompts = [chain(path) for path in paths]
    total = sum(map(len, prompts))
    for size, rate in enumerate(exact_hit_rates(prompts)[:12] if total else []):
        assert rate * total == pytest.approx(simulated_hits(prompts, size))


@pytest.mark.parametrize("num_pages", [13, 100, 700, 3000])
def test_curve_equals_the_page_pool_with_lru(num_pages: int) -> None:
    prompts = make_trace("zipf", 2000)
    pool = replay("lru", prompts, num_pages)
    assert pool.evicted > 0
    assert curve_of(prompts, 4000).hit_rate(num_pages) == pytest.approx(pool.hit_rate)


@given(PATHS, st.integers(1, 8), st.integers(1, 40), st.integers(0, 5))
def test_larger_caches_never_hit_less(paths: list[tuple[int, ...]], max_samples: int, max_pages: int, found: int) -> None:
    founds = [min(found, len(path)) for path in paths]
    curve = curve_of([chain(path) for path in paths], max_pages, founds, max_samples=max_samples)
    rates = [curve.hit_rate(size) for size in range(1, max_pages + 1)]
    assert rates == sorted(rates)
    assert all(0 <= rate <= 1 for rate in rates)


@given(PATHS, st.integers(1, 8), st.integers(1, 40), st.integers(0, 5))
def test_first_sizes_equal_the_exact_reference(
    paths: list[tuple[int, ...]], max_samples: int, max_pages: int, found: int
) -> None:
    prompts, founds = [chain(path) for path in paths], [min(found, len(path)) for path in paths]
    curve = curve_of(prompts, max_pages, founds, max_samples=max_samples)
    exact, num_exact = exact_hit_rates(prompts) if any(paths) else [0.0], min(max_samples, max_pages)
    assert curve.hit_rates(range(num_exact + 1)) == pytest.approx([rate_at(exact, size) for size in range(num_exact + 1)])


def error_of(prompts: Prompts, num_pages: int, first: int) -> float:
    """Returns the largest error of sizes from `first` pages to four times `num_pages`, with what a pool of `num_pages` finds."""
    exact = exact_hit_rates(prompts)
    found = run_pool(prompts, num_pages).found
    curve = curve_of(prompts, round(SIZES[-1] * num_pages), found)
    assert curve.rate < 1, "the trace is sampled"
    sizes = range(first, round(SIZES[-1] * num_pages) + 1, max(1, num_pages // 300))
    return max(abs(curve.hit_rate(size) - rate_at(exact, size)) for size in sizes)


@pytest.mark.parametrize("kind", ["zipf", "scan"])
def test_sampled_curve_of_topics_is_within_two_points(kind: str) -> None:
    prompts = make_trace(kind, 8000)
    num_pages = len({key for keys in prompts for key in keys}) // 5
    assert error_of(prompts, num_pages, int(SIZES[0] * num_pages)) < 0.02


def test_smallest_sizes_are_exact_though_keys_are_sampled() -> None:
    """Draws of keys differ by up to eight points at a few pages, where the sample has none or too many of the popular ones."""
    prompts = make_trace("scan", 3000)
    exact, found = exact_hit_rates(prompts), run_pool(prompts, 500).found
    for draw in range(2):
        curve = curve_of(drawn(prompts, draw), 4000, found, max_samples=500)
        assert curve.rate == 1 / 8
        assert curve.hit_rates(range(EXACT_PAGES + 1)) == pytest.approx(exact[: EXACT_PAGES + 1])


@pytest.mark.skipif(not CONVERSATIONS.exists(), reason="the trace is not on this machine")
@pytest.mark.parametrize("share", [0.05, 0.25])
def test_sampled_curve_of_conversations_is_within_two_points(share: float) -> None:
    prompts = read_trace(CONVERSATIONS)
    num_pages = int(share * len({key for keys in prompts for key in keys}))
    longest = max(map(len, prompts))
    assert error_of(prompts, num_pages, longest) < 0.02


def test_memory_is_bounded_for_any_number_of_pages() -> None:
    draw = random.Random(0)
    tracemalloc.start()
    curve = MissRatioCurve(1 << 22)
    for _ in range(1000):
        curve.look_up([draw.randbytes(16) for _ in range(512)], 0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert curve.rate < 0.05, "the sampling rate was lowered"
    assert peak <= 8 << 20


def test_unique_pages_do_not_lower_the_rate_for_ever() -> None:
    draw = random.Random(0)
    curve = MissRatioCurve(400, max_samples=100)
    for _ in range(20_000):
        curve.look_up([draw.randbytes(16)], 0)
    assert curve.rate == 1 / 4


def test_pages_of_ended_requests_are_found_later() -> None:
    curve = MissRatioCurve(8)
    prompt, with_answer = chain((1, 2)), chain((1, 2, 3))
    curve.look_up(prompt, 0)
    curve.use(with_answer)
    curve.look_up(chain((1, 2, 3, 4)), 3)
    assert curve.lookups == 6
    assert [curve.hit_rate(size) for size in (1, 2, 3, 4)] == pytest.approx([1 / 6, 2 / 6, 3 / 6, 3 / 6])


def test_old_lookups_fade() -> None:
    curve = MissRatioCurve(16, half_life=100)
    for number in range(200):
        curve.look_up([number.to_bytes(16, "big")], 0)
    assert curve.hit_rate(16) == 0
    for _ in range(1000):
        curve.look_up([b"k" * 16], 1)
    assert curve.hit_rate(16) > 0.95
    assert curve.lookups < 100


def test_report_follows_the_curve_within_five_percent() -> None:
    curve = MissRatioCurve(400)
    assert curve.report(100).hit_rates == []
    for number in range(3000):
        curve.look_up([(number * number % 250).to_bytes(16, "big")], 0)
        report = curve.report(100)
        assert report.lookups == pytest.approx(curve.lookups, rel=0.05)
    assert report.hit_rates == pytest.approx([curve.hit_rate(size) for size in (50, 100, 200, 400)], abs=0.02)
    assert report.hit_rates == sorted(report.hit_rates) and report.hit_rates[-1] > 0.9


def test_report_follows_lookups_whose_counts_were_halved() -> None:
    curve, prompt = MissRatioCurve(400, half_life=100), [number.to_bytes(16, "big") for number in range(50)]
    curve.look_up(prompt, 0)
    assert curve.report(100).hit_rates[1] == 0
    curve.look_up(prompt, 50)
    assert curve.lookups == 50, "as many as before"
    assert curve.report(100).hit_rates[1] == 0.5


@pytest.mark.parametrize(("num_pages", "num_found"), [(50, 0), (250, 250), (3000, 0)], ids=["missed", "found", "sampled"])
def test_reuse_is_the_number_of_pages_between_uses(num_pages: int, num_found: int) -> None:
    curve = MissRatioCurve(4000, max_samples=500)
    assert curve.reuse_pages(0.5) == 0
    for _ in range(5):
        for number in range(num_pages):
            curve.look_up([blake2b(bytes(number)).digest()[:16]], min(1, num_found))
    assert curve.reuse_pages(0.5) == pytest.approx(num_pages - 1, rel=0.1)
    assert curve.reuse_pages(0.1) <= curve.reuse_pages(0.5) <= curve.reuse_pages(0.99)


def test_without_lookups_nothing_hits() -> None:
    assert (MissRatioCurve(4).hit_rate(4), MissRatioCurve(4).lookups) == (0.0, 0)
