"""When a group is a hotspot, of which cause, and when it no longer is."""

import pytest

from phalanx_api.summary import Cause
from phalanx_router.balancing.hotspots import HotspotBook, HotspotReport, HotspotTargets
from phalanx_router.routing.view import GroupView
from tests.router.balancing.groups import group

TARGETS = HotspotTargets(ttft_s=2.0, itl_s=0.1)
EVEN = [group(name, 0.4) for name in "bcde"]


def ticks(
    book: HotspotBook, views: list[GroupView], count: int, start: float = 0.0, targets: HotspotTargets = TARGETS
) -> HotspotReport:
    for number in range(count):
        seen = book.tick(views, targets, start + 0.25 * number)
    return seen


HOT = {
    "pages": (group("a", 0.9), "kv"),
    "a preemption": (group("a", 0.7, recently_preempted=True), "kv"),
    "backlog": (group("a", 0.4, queued_prompt_tokens=15_000), "prefill"),
    "step time": (group("a", 0.4, running=900), "decode"),
    "one prefix": (group("a", 0.4, queued_prompt_tokens=15_000, prefix_share=0.6), "prefix"),
    "about to be full": (group("a", 0.8, steps_to_full=3.0), "full"),
}


@pytest.mark.parametrize(("view", "cause"), HOT.values(), ids=HOT.keys())
def test_a_group_far_above_the_others_is_a_hotspot(view: GroupView, cause: Cause) -> None:
    seen = ticks(HotspotBook(), [view, *EVEN], 2)
    assert [(hot.group, hot.cause) for hot in seen.hot.values()] == [("a", cause)]
    assert [(t.group, t.cause) for t in seen.transitions] == [("a", cause)] or cause == "full"


COOL = {
    "high as all others": [group(name, 0.9) for name in "abcde"],
    "far from the others but low": [group("a", 0.7), *[group(name, 0.1) for name in "bcde"]],
    "within the spread of the others": [group(n, u) for n, u in zip("abcdef", (0.88, 0.3, 0.45, 0.6, 0.75, 0.84), strict=True)],
    "a prefix without load": [group("a", 0.3, prefix_share=0.9), *EVEN],
    "alone": [group("a", 0.99)],
    "no target is set": [group("a", 0.4, queued_prompt_tokens=10**6, running=900), *EVEN],
}


@pytest.mark.parametrize("case", COOL)
def test_a_group_is_no_hotspot_when(case: str) -> None:
    targets = HotspotTargets() if case == "no target is set" else TARGETS
    assert ticks(HotspotBook(), COOL[case], 8, targets=targets).hot == {}


def test_hotspot_needs_two_high_reports_of_three() -> None:
    book, hot, cool = HotspotBook(), [group("a", 0.9), *EVEN], [group("a", 0.4), *EVEN]
    assert [bool(book.tick(views, TARGETS, 0.0).hot) for views in (hot, cool, cool, hot, cool, hot)] == [False] * 5 + [True]


def test_hotspot_ends_after_four_normal_reports() -> None:
    book, hot, cool = HotspotBook(), [group("a", 0.9), *EVEN], [group("a", 0.7), *EVEN]
    ticks(book, hot, 3)
    between = [group("a", 0.8), *EVEN]
    seen = [book.tick(views, TARGETS, 1.0 + i) for i, views in enumerate((cool, cool, cool, between, cool, cool, cool, cool))]
    assert [bool(one.hot) for one in seen] == [True] * 7 + [False]
    assert [(t.group, t.cause) for one in seen for t in one.transitions] == [("a", None)]


def test_of_two_groups_the_distance_decides() -> None:
    assert ticks(HotspotBook(), [group("a", 0.9), group("b", 0.85)], 4).hot == {}
    seen = ticks(HotspotBook(), [group("a", 0.9), group("b", 0.3)], 4)
    assert list(seen.hot) == ["a/1/1"]


def test_straggler_needs_ten_seconds_and_explains_other_causes() -> None:
    book, views = HotspotBook(), [group("a", 0.9, speed=1.6), *EVEN]
    assert ticks(book, views, 40).hot["a/1/1"].cause == "kv"
    seen = ticks(book, views, 4, start=10.0)
    assert seen.hot["a/1/1"].cause == "straggler"
    assert set(seen.hot["a/1/1"].causes) == {"kv", "straggler"}
    assert not seen.hot["a/1/1"].speed_rises
    slower = [group("a", 0.9, speed=1.8), *EVEN]
    assert ticks(book, slower, 1, start=11.0).hot["a/1/1"].speed_rises


def test_idle_straggler_remains_until_it_shows_its_speed() -> None:
    book = HotspotBook()
    ticks(book, [group("a", 0.4, speed=2.0), *EVEN], 44)
    idle, recovered = [group("a", speed=2.0), *EVEN], [group("a", 0.4, speed=1.0), *EVEN]
    assert ticks(book, idle, 40, start=11.0).hot["a/1/1"].cause == "straggler"
    assert ticks(book, recovered, 4, start=21.0).hot == {}
    never = HotspotBook()
    assert ticks(never, idle, 80).hot == {}


def test_pause_restarts_the_ten_seconds() -> None:
    book, slow, usual = HotspotBook(), [group("a", 0.4, speed=1.6), *EVEN], [group("a", 0.4, speed=1.1), *EVEN]
    ticks(book, slow, 39)
    ticks(book, usual, 1, start=9.75)
    assert ticks(book, slow, 39, start=10.0).hot == {}
    assert ticks(book, slow, 4, start=20.0).hot


def test_fifty_slow_steps_take_longer_than_ten_seconds() -> None:
    book, views = HotspotBook(), [group("a", 0.4, speed=40.0, running=16), *EVEN]
    assert views[0].itl_s * 50 > 12
    assert ticks(book, views, 48, targets=HotspotTargets()).hot == {}


@pytest.mark.parametrize(
    ("views", "is_saturated"),
    [
        ([group(n, 0.9) for n in "abc"] + [group("d", 0.2)], True),
        ([group(n, 0.9) for n in "ab"] + [group(n, 0.2) for n in "cd"], False),
        ([group(n, 0.2, queued_prompt_tokens=10**6) for n in "abcd"], True),
        ([group("a", 0.95)], True),
        ([], False),
    ],
    ids=["pages of most", "pages of half", "all late", "the only one", "no group"],
)
def test_a_fleet_is_saturated_when_most_groups_are(views: list[GroupView], is_saturated: bool) -> None:
    assert ticks(HotspotBook(), views, 4).is_saturated == is_saturated


def test_group_without_fresh_reports_keeps_its_state() -> None:
    book = HotspotBook()
    ticks(book, [group("a", 0.9), *EVEN], 4)
    stale = [group("a", 0.1, state="degraded"), *EVEN]
    assert ticks(book, stale, 20, start=1.0).hot["a/1/1"].cause == "kv"
    gone = ticks(book, EVEN, 1, start=6.0)
    assert gone.hot == {} and gone.transitions[0].cause is None
