"""When a request's group copies pages of its prompt from another group."""

from typing import Any

import pytest

from phalanx_router.routing.pulling import (
    MARGIN,
    OVERHEAD_S,
    REMEMBERED_S,
    CopyRate,
    KnownPages,
    NoPull,
    PullPlan,
    PullRates,
    plan_pull,
)
from phalanx_router.routing.view import UNKNOWN
from tests.router.views import STEP_MODEL, make_group_view

RATE = CopyRate(1e9, 0.01)
SAME: dict[str, Any] = {
    "page_model": "m",
    "layout": "tp1",
    "page_size": 16,
    "page_bytes": 1 << 16,
    "step_model": STEP_MODEL,
    "max_num_batched_tokens": 1000,
}
TARGET = make_group_view("t", **SAME)
TOKEN_S = TARGET.token_s
"""A page takes 66 microseconds to copy and 16 times this to compute."""


def plan(hits: dict[str, int], prompt_tokens: int = 4001, rate: CopyRate = RATE, **holder: Any) -> PullPlan | NoPull:
    others = [make_group_view(key, **(SAME | holder)) for key in "ab"]
    return plan_pull(TARGET, others, KnownPages(hits), prompt_tokens, rate)


def test_pull_copies_what_the_target_lacks() -> None:
    found = plan({"a": 4000, "t": 800})
    assert isinstance(found, PullPlan)
    assert (found.holder, found.target, found.num_pages, found.num_tokens) == ("a", "t", 250, 3200)
    assert found.num_bytes == 200 << 16
    assert found.copy_s == pytest.approx(0.01 + found.num_bytes / 1e9)
    assert found.compute_s == pytest.approx(3200 * TOKEN_S) == found.timeout_s
    assert "3200 tokens" in found.why


def test_pull_copies_only_the_pages_of_a_window() -> None:
    target = make_group_view("t", **SAME, max_request_pages=20)
    found = plan_pull(target, [make_group_view("a", **SAME)], KnownPages({"a": 4000}), 4001, RATE)
    assert isinstance(found, PullPlan) and (found.num_tokens, found.num_bytes) == (4000, 20 << 16)


def test_group_with_most_pages_is_the_holder() -> None:
    found = plan({"a": 1600, "b": 3200})
    assert isinstance(found, PullPlan) and (found.holder, found.num_tokens) == ("b", 3200)
    others = [make_group_view("a", queued_prompt_tokens=9, **SAME), make_group_view("b", **SAME)]
    found = plan_pull(TARGET, others, KnownPages({"a": 3200, "b": 3200}), 4001, RATE)
    assert isinstance(found, PullPlan) and found.holder == "b", "the one with less work"


@pytest.mark.parametrize("prompt_tokens", [4000, 3999, 4001])
def test_last_token_is_never_copied(prompt_tokens: int) -> None:
    found = plan({"a": 8000}, prompt_tokens)
    assert isinstance(found, PullPlan)
    assert found.num_tokens == (prompt_tokens - 1) // 16 * 16 < prompt_tokens


@pytest.mark.parametrize(
    ("hits", "prompt_tokens", "holder", "code"),
    [
        ({"a": 4000}, 250, {}, "short"),
        ({"a": 4000, "t": 3900}, 4001, {}, "short"),
        ({}, 4001, {}, "no_holder"),
        ({"a": 200}, 4001, {}, "no_holder"),
        ({"a": 2000, "t": 2000}, 4001, {}, "no_holder"),
        ({"a": 4000}, 4001, {"layout": "tp2"}, "no_holder"),
        ({"a": 4000}, 4001, {"layout": ""}, "no_holder"),
        ({"a": 4000}, 4001, {"page_model": "m int8"}, "no_holder"),
        ({"a": 4000}, 4001, {"page_size": 32}, "no_holder"),
        ({"a": 4000}, 4001, {"state": "degraded"}, "no_holder"),
    ],
)
def test_requests_without_a_holder_are_computed(
    hits: dict[str, int], prompt_tokens: int, holder: dict[str, Any], code: str
) -> None:
    found = plan(hits, prompt_tokens, **holder)
    assert isinstance(found, NoPull) and found.code == code and found.why


def planned_with_disk(target_disk: int = 0, page_s: float = 1e-4, **known: int) -> PullPlan | NoPull:
    """The target has 800 tokens in memory, `a` has 1,600 there and 4,000 with its disk, `b` 3,200 there."""
    others = [make_group_view(key, **SAME, disk_page_s=page_s) for key in "ab"]
    with_disk = {"a": 4000} | ({"t": target_disk} if target_disk else {})
    target = make_group_view("t", **SAME, disk_page_s=page_s)
    return plan_pull(target, others, KnownPages({"t": 800, "a": 1600, "b": 3200} | known, with_disk), 4001, RATE)


def test_pages_on_disk_are_pulled_if_reading_them_pays() -> None:
    found = planned_with_disk()
    assert isinstance(found, PullPlan) and (found.holder, found.num_pages) == ("a", 250)
    assert found.read_s == pytest.approx(0.015) and found.copy_s == pytest.approx(0.01 + (200 << 16) / 1e9 + 0.015)
    slow = planned_with_disk(page_s=TOKEN_S * 100)
    assert isinstance(slow, PullPlan) and (slow.holder, slow.num_pages, slow.read_s) == ("b", 200, 0.0)
    in_memory = planned_with_disk(page_s=TOKEN_S * 100, b=0)
    assert isinstance(in_memory, PullPlan) and (in_memory.holder, in_memory.num_pages) == ("a", 100)


def test_nothing_is_pulled_that_the_targets_disk_has() -> None:
    found = planned_with_disk(target_disk=4000, page_s=1e-5)
    assert isinstance(found, NoPull) and found.code == "compute"
    slow = planned_with_disk(target_disk=4000, page_s=TOKEN_S * 100)
    assert isinstance(slow, PullPlan) and slow.holder == "b"
    assert slow.compute_s == pytest.approx((3200 - 800) * TOKEN_S), "computing is faster than its disk"


def test_draining_group_may_be_the_holder() -> None:
    assert isinstance(plan({"a": 4000}, is_draining=True), PullPlan)


@pytest.mark.parametrize("unknown", [{"page_bytes": 0}, {"step_model": UNKNOWN}])
def test_unknown_costs_mean_no_pull(unknown: dict[str, Any]) -> None:
    found = plan_pull(
        make_group_view("t", **(SAME | unknown)), [make_group_view("a", **SAME)], KnownPages({"a": 4000}), 4001, RATE
    )
    assert isinstance(found, NoPull) and found.code == "unknown"


def test_copy_must_beat_the_computation_by_the_margin() -> None:
    compute_s, num_bytes = 4000 * TOKEN_S, 250 << 16
    break_even = num_bytes / (compute_s / MARGIN)
    faster, slower = plan({"a": 4000}, rate=CopyRate(break_even * 1.01, 0.0)), plan({"a": 4000}, rate=CopyRate(break_even, 0.0))
    assert isinstance(faster, PullPlan)
    assert isinstance(slower, NoPull) and slower.code == "compute"
    late = plan({"a": 4000}, rate=CopyRate(1e12, compute_s))
    assert isinstance(late, NoPull) and late.code == "compute"


def test_rate_starts_with_that_of_moves() -> None:
    rates = PullRates()
    assert rates.rate(3e8, None, 0.0) == CopyRate(3e8, OVERHEAD_S)
    assert rates.rate(3e8, 1e8, 0.0).bytes_per_s == 1e8


def test_measured_rate_follows_pulls_and_is_forgotten() -> None:
    rates = PullRates()
    rates.record(1e8, prepare_s=0.1, copy_s=0.5, now=1.0)
    first = rates.rate(3e8, None, 1.0)
    assert first.bytes_per_s == 2e8 and OVERHEAD_S < first.overhead_s < 0.1
    for now in range(2, 40):
        rates.record(1e8, prepare_s=0.1, copy_s=1.0, now=now)
    last = rates.rate(3e8, None, 40.0)
    assert (last.bytes_per_s, last.overhead_s) == pytest.approx((1e8, 0.1), rel=0.01)
    assert rates.rate(3e8, None, 41.0 + REMEMBERED_S) == CopyRate(3e8, OVERHEAD_S)


@pytest.mark.parametrize("copy_s", [0.5, 0.4])
def test_copy_faster_than_its_disk_measures_no_rate(copy_s: float) -> None:
    rates = PullRates()
    rates.record(9e7, prepare_s=0.1, copy_s=copy_s, now=1.0, read_s=0.5)
    assert rates.rate(3e8, None, 1.0) == CopyRate(3e8, OVERHEAD_S)
    rates.record(9e7, prepare_s=0.1, copy_s=1.0, now=1.0, read_s=0.5)
    assert rates.rate(3e8, None, 1.0).bytes_per_s == 1.8e8


def test_timeout_prevents_the_same_pull() -> None:
    rates = PullRates()
    found = plan({"a": 4000}, rate=rates.rate(1e9, None, 0.0))
    assert isinstance(found, PullPlan)
    rates.record_timeout(found, found.timeout_s, 1.0)
    again = plan({"a": 4000}, rate=rates.rate(1e9, None, 1.0))
    assert isinstance(again, NoPull) and again.code == "compute"


def test_timeouts_measure_copies_without_their_preparation() -> None:
    rates = PullRates()
    found = plan({"a": 4000}, rate=rates.rate(1e9, None, 0.0))
    assert isinstance(found, PullPlan)
    rates.record_timeout(found, 0.4 * found.timeout_s, 1.0)  # the target took most of the time to prepare
    assert rates.rate(1e9, None, 1.0).bytes_per_s == 1e9
    rates.record_timeout(found, 0.8 * found.timeout_s, 1.0)
    assert rates.rate(1e9, None, 1.0).bytes_per_s == found.num_bytes / (1.6 * found.timeout_s)
