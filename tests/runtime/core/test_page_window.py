"""Which pages can be read, against a count over tokens; which models drop pages; how long a request may be."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api.engine_config import EngineConfig
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.page_window import NO_LIMIT, PageDivision, PageWindow, choose_page_groups, max_request_tokens
from phalanx_runtime.core.step_plan import PoolShape

WINDOWS = st.builds(PageWindow, st.integers(2, 40), st.integers(1, 9))


def readable(window: PageWindow, start: int, end: int) -> set[int]:
    """Returns the pages that tokens `start` to `end` - 1 read, one by one."""
    size = window.page_size
    return {at // size for token in range(start, end) for at in range(max(0, token - window.tokens + 1), token + 1)}


@given(WINDOWS, st.integers(0, 100), st.integers(1, 20))
def test_first_page_is_the_first_that_is_read(window: PageWindow, start: int, count: int) -> None:
    pages = readable(window, start, start + count)
    assert window.first_page(start) == min(pages)
    assert len(pages) <= window.max_pages(count)


@given(WINDOWS, st.integers(1, 20))
def test_the_most_pages_are_needed_at_some_position(window: PageWindow, count: int) -> None:
    starts = range(window.tokens, window.tokens + window.page_size)
    assert window.max_pages(count) == max(len(readable(window, start, start + count)) for start in starts)


@given(WINDOWS, st.lists(st.booleans(), max_size=20))
def test_longest_hit_has_all_pages_that_are_read(window: PageWindow, present: list[bool]) -> None:
    def is_hit(end: int) -> bool:
        first = min(window.first_page(end * window.page_size), max(0, end - 1))
        return all(present[first:end])

    longest = max(end for end in range(len(present) + 1) if is_hit(end))
    assert window.longest_hit(present.__getitem__, len(present)) == longest


def test_a_whole_hit_looks_up_the_window_only() -> None:
    looked_up: list[int] = []
    assert PageWindow(33, 8).longest_hit(lambda page: not looked_up.append(page), 1000) == 1000  # type: ignore[func-returns-value]
    assert looked_up == [999, 998, 997, 996]


@pytest.mark.parametrize(
    ("windows", "config", "window", "why"),
    [
        ({None}, EngineConfig(), 0, "no layer has a sliding window or blocks of one size"),
        ({4096}, EngineConfig(), 4096, "every layer has a sliding window"),
        ({512, 1024}, EngineConfig(speculative_method="ngram"), 1024, "every layer"),
        ({1}, EngineConfig(), 2, "every layer"),
        ({4096, None}, EngineConfig(), 4096, "layers with a sliding window have pages of their own"),
        ({4096, None}, EngineConfig(host_cache_memory=1 << 30), 4096, "layers with a sliding window have pages of their own"),
        (
            {4096, None},
            EngineConfig(host_cache_memory=1 << 30, host_cache_adaptive=True),
            4096,
            "layers with a sliding window have pages of their own",
        ),
        ({4096, None}, EngineConfig(disk_cache_path="/kv"), 4096, "layers with a sliding window have pages of their own"),
        ({4096, None}, EngineConfig(speculative_method="draft"), 4096, "layers with a sliding window have pages of their own"),
        ({4096, None}, EngineConfig(batch_invariant=True), 0, "batch-invariant"),
        ({4096}, EngineConfig(speculative_method="self_draft"), 0, "the draft model computes tokens again"),
        ({4096}, EngineConfig(batch_invariant=True), 0, "batch-invariant"),
    ],
)
def test_models_with_windows_alone_drop_pages(windows: set[int | None], config: EngineConfig, window: int, why: str) -> None:
    groups = choose_page_groups(windows, has_blocks=False, config=config)
    assert groups.window == window and groups.why.startswith(why)
    assert groups.has_parts == (window > 0 and None in windows)


@pytest.mark.parametrize(
    ("blocks", "config", "window", "why"),
    [
        ({8192}, EngineConfig(), 8192, "every layer has blocks of tokens"),
        ({8192, None}, EngineConfig(), 8192, "layers with blocks of tokens have pages of their own"),
        ({20, None}, EngineConfig(page_size=16), 80, "layers with blocks of tokens have pages of their own"),
        ({8192, None}, EngineConfig(batch_invariant=True), 0, "batch-invariant"),
    ],
)
def test_blocks_count_as_windows_of_whole_pages(blocks: set[int | None], config: EngineConfig, window: int, why: str) -> None:
    groups = choose_page_groups(blocks, has_blocks=True, config=config)
    assert groups.window == window and groups.why.startswith(why)
    assert groups.has_blocks == (window > 0) and groups.has_parts == (window > 0 and None in blocks)


DIVISIONS = st.builds(
    PageDivision,
    page_bytes=st.integers(1, 50),
    part_bytes=st.integers(0, 50),
    longest=st.integers(1, 100_000),
    max_num_seqs=st.integers(1, 100),
    max_new_tokens=st.integers(1, 5000),
)


@given(DIVISIONS, WINDOWS, st.integers(1, 10_000))
def test_pages_and_parts_fit_the_memory(division: PageDivision, window: PageWindow, num_whole: int) -> None:
    num_pages, num_parts = division.divide(num_whole, window)
    whole = num_whole * (division.page_bytes + division.part_bytes)
    if not num_parts:
        assert num_pages == num_whole
        return
    used = num_pages * division.page_bytes + num_parts * division.part_bytes
    assert whole - division.page_bytes < used <= whole
    assert num_parts < num_whole <= num_pages, "a longer request fits"
    assert num_parts >= window.max_pages(division.max_new_tokens), "full chunks can be computed"


@pytest.mark.parametrize(
    ("window", "full", "windowed", "longest", "length", "worst"),
    [
        (1024, 1, 5, 131_072, 5912, 0.55),  # Gemma 3: a layer of six attends to all tokens
        (128, 1, 1, 131_072, 2048, 0.93),  # gpt-oss, whose windows are short
        (4096, 1, 1, 8192, 5461, 0.84),  # Gemma 2
        (4096, 1, 1, 4096, 0, 1.0),
    ],
)
def test_requests_of_one_length_exhaust_both_at_once(
    window: int, full: int, windowed: int, longest: int, length: int, worst: float
) -> None:
    """`worst`: requests at once of any length from the window, or 2,048 tokens, on, as a share of the best division for it."""
    division = PageDivision(page_bytes=full, part_bytes=windowed, longest=longest, max_num_seqs=1000, max_new_tokens=1)
    held = PageWindow(window, 16).max_pages(1)
    num_pages, num_parts = division.divide(10_000, PageWindow(window, 16))
    if not num_parts:
        assert length == 0
        return
    assert num_pages * 16 / length == pytest.approx(num_parts / held, rel=0.02)
    shares = []
    for tokens in {max(window, 2048), length, longest, (length + longest) // 2}:
        fits = min(num_pages * 16 / tokens, num_parts / held)
        best = 10_000 * (full + windowed) / (tokens * full / 16 + held * windowed)
        shares.append(fits / best)
    assert min(shares) == pytest.approx(worst, abs=0.02)


@pytest.mark.parametrize(("max_num_seqs", "num_parts"), [(4, 128 + 2 * 4 * 65), (1000, 5680)])
def test_parts_are_at_most_twice_those_of_all_rows(max_num_seqs: int, num_parts: int) -> None:
    division = PageDivision(page_bytes=1, part_bytes=5, longest=131_072, max_num_seqs=max_num_seqs, max_new_tokens=2048)
    assert division.divide(10_000, PageWindow(1024, 16))[1] == num_parts


def test_a_pool_that_holds_the_window_limits_no_request() -> None:
    assert max_request_tokens(10, 16, 0) == 160
    assert max_request_tokens(3, 16, 33) == 48, "the window and a token in each of two plans need four pages"
    assert max_request_tokens(4, 16, 33) == NO_LIMIT
    limits = Limits(max_model_len=5000, max_num_seqs=4, max_num_batched_tokens=64)
    assert limits.within(PoolShape(4, 16, window=33)).max_model_len == 5000
    assert limits.within(PoolShape(4, 16)).max_model_len == 64
