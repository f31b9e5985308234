"""The trace that Perfetto opens."""

import math
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from phalanx_api.flight.entries import EngineStep, MoveEnd, RankStep, TimedEntry
from phalanx_api.status import ScaleChange
from phalanx_kubectl.perfetto import ENGINE, OPERATOR, PER_PROCESS, trace
from tests.control.flight.recorded import fleet
from tests.plugin.trace_rules import problems

CHANGES = (
    ScaleChange(time="2026-09-21T14:13:21.5Z", before=1, after=2, reason="Out", message="more load"),
    ScaleChange(time="2020-01-01T00:00:00Z", before=2, after=1, reason="In"),
)


def test_every_rank_and_router_has_its_thread() -> None:
    events = trace(fleet(), CHANGES)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    groups = ["group g-a: g-a-0", "group g-a: g-a-1", "group g-b: g-b-0"]
    assert list(processes.values()) == ["operator", "router r-a", "router r-b", *groups]
    slices = Counter((processes[e["pid"]], e["tid"] % PER_PROCESS) for e in events if e["ph"] == "X")
    assert slices == {
        ("group g-a: g-a-0", 0): 3,
        ("group g-a: g-a-0", ENGINE): 3,
        ("group g-a: g-a-1", 1): 3,
        ("group g-b: g-b-0", 0): 3,
        ("group g-b: g-b-0", ENGINE): 3,
    }
    plans = Counter(e["name"] for e in events if e["ph"] == "X" and e["tid"] % PER_PROCESS == ENGINE)
    assert plans == {"prefill": 2, "decode": 4}


def test_equal_steps_of_all_ranks_coincide() -> None:
    events = trace(fleet())["traceEvents"]
    first = {round(e["ts"]) for e in events if e["ph"] == "X" and e["name"] == "step 1"}
    assert len(first) == 1 and all(e["ts"] >= 0 for e in events if "ts" in e)


def test_moves_and_hotspots_are_intervals_with_their_reasons() -> None:
    events = trace(fleet())["traceEvents"]
    move = [e for e in events if e.get("id") == f"{OPERATOR + 1} m:1"]
    assert [e["ph"] for e in move] == ["b", "e"] and move[1]["ts"] - move[0]["ts"] == 1e6
    assert move[0]["args"]["bytes"] == 4096 and move[0]["args"]["outcome"] == "moved"
    hotspots = [e for e in events if e.get("cat") == "hotspot"]
    assert Counter(e["ph"] for e in hotspots) == {"b": 2, "e": 2}, "one that has not ended ends with the trace"


def test_scale_changes_are_events_of_the_operator() -> None:
    events = [e for e in trace(fleet(), CHANGES)["traceEvents"] if e["pid"] == OPERATOR and e["ph"] == "i"]
    assert [(e["name"], e["args"]["reason"]) for e in events] == [("from 1 to 2 groups", "Out")]


def test_no_recordings_give_an_empty_trace() -> None:
    assert [e["name"] for e in trace([])["traceEvents"]] == ["process_name", "thread_name"]
    assert problems(trace([])) == []


def test_trace_keeps_the_rules_of_its_format() -> None:
    assert problems(trace(fleet(), CHANGES)) == []


def test_trace_of_any_times_keeps_the_rules() -> None:
    draw = random.Random(1)
    for _ in range(50):
        recordings = [
            msgspec.structs.replace(recording, entries=[_shifted(draw, timed) for timed in recording.entries])
            for recording in fleet()
        ]
        assert problems(trace(recordings, CHANGES)) == []


def _shifted(draw: random.Random, timed: TimedEntry) -> TimedEntry:
    entry = timed.entry
    if isinstance(entry, RankStep | EngineStep | MoveEnd):
        entry = msgspec.structs.replace(entry, seconds=draw.uniform(0, 5))
    return TimedEntry(timed.unix_s + draw.uniform(-2, 2), entry)


def _first(events: list[dict[str, Any]], phase: str) -> dict[str, Any]:
    return next(event for event in events if event["ph"] == phase)


DEFECTS: dict[str, Callable[[list[dict[str, Any]]], object]] = {
    "no JSON": lambda events: _first(events, "X")["args"].update(x=math.nan),
    "unknown phase": lambda events: events.append({"ph": "Z"}),
    "X without dur": lambda events: _first(events, "X").pop("dur"),
    "i without ts": lambda events: _first(events, "i").pop("ts"),
    "ts -1": lambda events: _first(events, "i").update(ts=-1),
    "ts 1.5": lambda events: _first(events, "i").update(ts=1.5),
    "scope x": lambda events: _first(events, "i").update(s="x"),
    "args of": lambda events: _first(events, "i").update(args=[]),
    "has no name": lambda events: _first(events, "i").update(tid=77),
    "has the names": lambda events: events.append(_first(events, "M") | {"args": {"name": "a"}}),
    "is one of": lambda events: _first(events, "X").update(pid=1),
    "overlaps": lambda events: events.append(_first(events, "X") | {"ts": _first(events, "X")["ts"] + 1}),
    "has b": lambda events: _first(events, "e").update(id="other"),
    "ends before": lambda events: _first(events, "e").update(ts=0),
    "two names": lambda events: _first(events, "e").update(name="other"),
    "requests has": lambda events: _first(events, "C")["args"].update(running="1"),
    "other values": lambda events: _first(events, "C").update(args={"x": 1}),
}  # fmt: skip


@pytest.mark.parametrize("problem", DEFECTS)
def test_a_broken_rule_is_found(problem: str) -> None:
    drawn = trace(fleet(), CHANGES)
    DEFECTS[problem](drawn["traceEvents"])
    assert any(problem in found for found in problems(drawn)), problems(drawn)
