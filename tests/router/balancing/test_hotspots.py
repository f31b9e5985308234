"""Start, cause and end of hotspots."""

import random
from dataclasses import replace

import pytest

from phalanx_api import wire
from phalanx_api.conditions import Cause
from phalanx_router.balancing import hotspots
from phalanx_router.balancing.hotspots import HotspotReport, HotspotTargets, HotspotTracker, signals
from phalanx_router.routing.view import GroupView
from tests.router.balancing.groups import group

TARGETS = HotspotTargets(ttft_s=2.0, itl_s=0.1)
EVEN = [group(name, 0.4) for name in "bcde"]


def ticks(
    tracker: HotspotTracker, views: list[GroupView], count: int, start: float = 0.0, targets: HotspotTargets = TARGETS
) -> HotspotReport:
    for number in range(count):
        report = tracker.tick(views, targets, start + 0.25 * number)
    return report


HOT = {
    "pages": (group("a", 0.9), "kv"),
    "a preemption": (group("a", 0.7, has_recent_preemption=True), "kv"),
    "backlog": (group("a", 0.4, queued_prompt_tokens=15_000), "prefill"),
    "step time": (group("a", 0.4, running=900), "decode"),
    "one prefix": (group("a", 0.4, queued_prompt_tokens=15_000, hot_prefix=wire.HotPrefix(b"", 0, 0.6)), "prefix"),
    "about to be full": (group("a", 0.8, steps_to_full=3.0), "full"),
}


@pytest.mark.parametrize(("view", "cause"), HOT.values(), ids=HOT.keys())
def test_a_group_far_above_the_others_is_a_hotspot(view: GroupView, cause: Cause) -> None:
    report = ticks(HotspotTracker(), [view, *EVEN], 2)
    assert [(hot.group, hot.cause) for hot in report.hot.values()] == [("a", cause)]
    assert [(t.group, t.cause) for t in report.transitions] == [("a", cause)] or cause == "full"


COOL = {
    "high as all others": [group(name, 0.9) for name in "abcde"],
    "far from the others but low": [group("a", 0.7), *[group(name, 0.1) for name in "bcde"]],
    "within the spread of the others": [group(n, u) for n, u in zip("abcdef", (0.88, 0.3, 0.45, 0.6, 0.75, 0.84), strict=True)],
    "a prefix without load": [group("a", 0.3, hot_prefix=wire.HotPrefix(b"", 0, 0.9)), *EVEN],
    "alone": [group("a", 0.99)],
    "no target is set": [group("a", 0.4, queued_prompt_tokens=10**6, running=900), *EVEN],
}


@pytest.mark.parametrize("case", COOL)
def test_a_group_is_no_hotspot_when(case: str) -> None:
    targets = HotspotTargets() if case == "no target is set" else TARGETS
    assert ticks(HotspotTracker(), COOL[case], 8, targets=targets).hot == {}


def test_hotspot_needs_two_high_reports_of_three() -> None:
    tracker, hot, cool = HotspotTracker(), [group("a", 0.9), *EVEN], [group("a", 0.4), *EVEN]
    assert [bool(tracker.tick(views, TARGETS, 0.0).hot) for views in (hot, cool, cool, hot, cool, hot)] == [False] * 5 + [True]


def test_hotspot_ends_after_four_normal_reports() -> None:
    tracker, hot, cool = HotspotTracker(), [group("a", 0.9), *EVEN], [group("a", 0.7), *EVEN]
    ticks(tracker, hot, 3)
    between = [group("a", 0.8), *EVEN]
    report = [
        tracker.tick(views, TARGETS, 1.0 + i) for i, views in enumerate((cool, cool, cool, between, cool, cool, cool, cool))
    ]
    assert [bool(one.hot) for one in report] == [True] * 7 + [False]
    assert [(t.group, t.cause) for one in report for t in one.transitions] == [("a", None)]


def test_of_two_groups_the_distance_decides() -> None:
    assert ticks(HotspotTracker(), [group("a", 0.9), group("b", 0.85)], 4).hot == {}
    report = ticks(HotspotTracker(), [group("a", 0.9), group("b", 0.3)], 4)
    assert list(report.hot) == ["a/1/1"]


def test_straggler_needs_ten_seconds_and_explains_other_causes() -> None:
    tracker, views = HotspotTracker(), [group("a", 0.9, speed=1.6), *EVEN]
    assert ticks(tracker, views, 40).hot["a/1/1"].cause == "kv"
    report = ticks(tracker, views, 4, start=10.0)
    assert report.hot["a/1/1"].cause == "straggler"
    assert set(report.hot["a/1/1"].causes) == {"kv", "straggler"}
    assert not report.hot["a/1/1"].speed_rises
    slower = [group("a", 0.9, speed=1.8), *EVEN]
    assert ticks(tracker, slower, 1, start=11.0).hot["a/1/1"].speed_rises


def test_time_of_a_straggler_starts_with_its_slowness() -> None:
    """It was hot for another cause before; the operator replaces a group that is slow for a minute."""
    tracker = HotspotTracker()
    assert ticks(tracker, [group("a", 0.9), *EVEN], 4).hot["a/1/1"].since < 1.0
    slow = ticks(tracker, [group("a", 0.9, speed=1.6), *EVEN], 48, start=600.0).hot["a/1/1"]
    assert slow.cause == "straggler" and slow.since >= 610.0


def test_idle_straggler_remains_until_it_shows_its_speed() -> None:
    tracker = HotspotTracker()
    ticks(tracker, [group("a", 0.4, speed=2.0), *EVEN], 44)
    idle, recovered = [group("a", speed=2.0), *EVEN], [group("a", 0.4, speed=1.0), *EVEN]
    assert ticks(tracker, idle, 40, start=11.0).hot["a/1/1"].cause == "straggler"
    assert ticks(tracker, recovered, 4, start=21.0).hot == {}
    never = HotspotTracker()
    assert ticks(never, idle, 80).hot == {}


def test_pause_restarts_the_ten_seconds() -> None:
    tracker, slow, usual = HotspotTracker(), [group("a", 0.4, speed=1.6), *EVEN], [group("a", 0.4, speed=1.1), *EVEN]
    ticks(tracker, slow, 39)
    ticks(tracker, usual, 1, start=9.75)
    assert ticks(tracker, slow, 39, start=10.0).hot == {}
    assert ticks(tracker, slow, 4, start=20.0).hot


def test_fifty_slow_steps_take_longer_than_ten_seconds() -> None:
    tracker, views = HotspotTracker(), [group("a", 0.4, speed=40.0, running=16), *EVEN]
    assert views[0].itl_s * 50 > 12
    assert ticks(tracker, views, 48, targets=HotspotTargets()).hot == {}


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
    assert ticks(HotspotTracker(), views, 4).is_saturated == is_saturated


def test_group_without_fresh_reports_keeps_its_state() -> None:
    tracker = HotspotTracker()
    ticks(tracker, [group("a", 0.9), *EVEN], 4)
    stale = [group("a", 0.1, state="degraded"), *EVEN]
    assert ticks(tracker, stale, 20, start=1.0).hot["a/1/1"].cause == "kv"
    removed = ticks(tracker, EVEN, 1, start=6.0)
    assert removed.hot == {} and removed.transitions[0].cause is None


def test_idle_groups_that_stay_equal_are_not_evaluated(monkeypatch: pytest.MonkeyPatch) -> None:
    """The reports are those of a tracker that evaluates them at each tick, as each of its views is another object."""
    rng, num_evaluated = random.Random(5), 0

    def counted(view: GroupView, targets: HotspotTargets) -> dict[Cause, float]:
        nonlocal num_evaluated
        num_evaluated += 1
        return signals(view, targets)

    kept, fresh = HotspotTracker(), HotspotTracker()
    now, num_skipped, num_hot = 0.0, 0, 0
    for _ in range(150):
        views = [_random_group(rng, name) for name in "abcd"[: rng.randint(1, 4)]]
        targets = HotspotTargets(rng.choice((None, 1.0)), rng.choice((None, 0.05)))
        for _ in range(rng.choice((1, 2, 3, 8, 60))):
            now += 0.25
            expected = fresh.tick([replace(view) for view in views], targets, now)
            monkeypatch.setattr(hotspots, "signals", counted)
            before = num_evaluated
            assert kept.tick(views, targets, now) == expected
            monkeypatch.setattr(hotspots, "signals", signals)
            has_fresh = any(view.state == "fresh" for view in views)
            num_skipped += has_fresh and num_evaluated == before
            num_hot += bool(expected.hot)
    assert num_skipped > 100 and num_hot > 100


def _random_group(rng: random.Random, name: str) -> GroupView:
    """Returns an idle group in half of the cases; with or without a signal."""
    state, speed = rng.choice(("fresh", "fresh", "fresh", "suspect")), rng.choice((1.0, 1.0, 1.6))
    running, used = (0, rng.choice((0.0, 0.0, 0.95))) if rng.random() < 0.5 else (4, rng.choice((0.3, 0.5, 0.95)))
    queued = rng.choice((0, 0, 15_000))
    return group(name, used, running=running, state=state, speed=speed, queued_prompt_tokens=queued)
