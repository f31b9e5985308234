"""What happened, as text."""

from phalanx_api.flight.entries import Dispatch, MoveRefusal, Recording, RequestEnd, Shedding, TimedEntry
from phalanx_api.status import ScaleChange
from phalanx_kubectl.story import MAX_EVENTS, story, within
from tests.control.flight.recorded import START_S, fleet, move_end

CHANGE = ScaleChange(time="2026-09-21T14:13:22Z", before=1, after=2, reason="Out", message="more load")
ALL = (0.0, 1e12)


def test_events_are_told_in_order_with_their_reasons() -> None:
    lines = story(within(fleet(), *ALL), (CHANGE,)).splitlines()
    assert lines[0].endswith(" UTC, 5 processes")
    texts = [line.split("  ", 1)[1] for line in lines if line[2:3] == ":" and "  " in line]
    assert texts[:2] == ["g-a is a hotspot (kv): pages"] * 2
    assert "from 1 to 2 groups (Out): more load" in texts
    assert "g-a preempted req-2" in texts
    assert "req-1 moved from g-a to g-b (hotspot) in 1.00 s, stall 20 ms" in texts
    times = [line.split("  ", 1)[0] for line in lines if line[2:3] == ":" and "  " in line]
    assert times == sorted(times)
    assert "2 requests sent: g-a 2" in lines and "chosen as: least 2" in lines
    assert "g-a: 3 steps in 0.0 s, mean 10.0 ms, 1.3 decodes, 25% of the pages" in lines


def test_failures_and_refusals_are_told() -> None:
    end = {"at": 2.0, "request": "req-9", "arrived_at": 1.0, "first_token_at": 1.5, "prompt_tokens": 1, "output_tokens": 2}
    entries = [
        MoveRefusal(at=0.0, source="g-a", rung="migrate", code="no_target", why="no group has room"),
        Shedding(at=1.0, requests=3, why="every group is loaded"),
        RequestEnd(**end, block_tokens=64, blocks=[], moves=0, replays=2),  # type: ignore[arg-type]
        move_end(request="req-9", reason="drain", outcome="timeout", why="no answer"),
    ]
    recording = Recording(kind="router", pod="r", entries=[TimedEntry(entry.at, entry) for entry in entries])  # type: ignore[attr-defined, arg-type]
    text = story([recording])
    for expected in (
        "nothing moves from g-a (no_target): no group has room",
        "r refused 3 requests: every group is loaded",
        "req-9 ended after 2 replays",
        "req-9 did not move from g-a to g-b: timeout, no answer",
        "no request was sent to a group",
    ):
        assert expected in text


def test_a_window_has_the_groups_before_it() -> None:
    first = within(fleet(), START_S + 0.5, START_S + 1.2)[0]
    kinds = [type(timed.entry) for timed in first.entries]
    assert kinds == [Dispatch]
    assert story(within(fleet(), 0.0, 1.0)) == "nothing is recorded in this time\n"


def test_the_latest_events_are_kept() -> None:
    entries = [TimedEntry(float(at), Shedding(at=float(at), requests=1, why=str(at))) for at in range(MAX_EVENTS + 5)]
    text = story([Recording(kind="router", pod="r", entries=entries)])
    assert "5 earlier events are left out" in text and f": {MAX_EVENTS + 4}\n" in text and ": 4\n" not in text
