"""The trace that Perfetto opens."""

from collections import Counter

from phalanx_api.status import ScaleChange
from phalanx_kubectl.perfetto import ENGINE, OPERATOR, trace
from tests.control.flight.recorded import fleet

CHANGES = (
    ScaleChange(time="2026-09-21T14:13:21.5Z", before=1, after=2, reason="Out", message="more load"),
    ScaleChange(time="2020-01-01T00:00:00Z", before=2, after=1, reason="In"),
)


def test_every_rank_and_router_has_its_thread() -> None:
    events = trace(fleet(), CHANGES)["traceEvents"]
    processes = {e["pid"]: e["args"]["name"] for e in events if e["name"] == "process_name"}
    groups = ["group g-a: g-a-0", "group g-a: g-a-1", "group g-b: g-b-0"]
    assert list(processes.values()) == ["operator", "router r-a", "router r-b", *groups]
    slices = Counter((processes[e["pid"]], e["tid"]) for e in events if e["ph"] == "X")
    assert slices == {
        ("group g-a: g-a-0", 0): 3,
        ("group g-a: g-a-0", ENGINE): 3,
        ("group g-a: g-a-1", 1): 3,
        ("group g-b: g-b-0", 0): 3,
        ("group g-b: g-b-0", ENGINE): 3,
    }
    plans = Counter(e["name"] for e in events if e["ph"] == "X" and e["tid"] == ENGINE)
    assert plans == {"prefill": 2, "decode": 4}


def test_equal_steps_of_all_ranks_coincide() -> None:
    events = trace(fleet())["traceEvents"]
    first = {round(e["ts"]) for e in events if e["ph"] == "X" and e["name"] == "step 1"}
    assert len(first) == 1 and all(e["ts"] >= 0 for e in events if "ts" in e)


def test_moves_and_hotspots_are_intervals_with_their_reasons() -> None:
    events = trace(fleet())["traceEvents"]
    move = [e for e in events if e.get("id") == "m:1" and e["pid"] == OPERATOR + 1]
    assert [e["ph"] for e in move] == ["b", "e"] and move[1]["ts"] - move[0]["ts"] == 1e6
    assert move[0]["args"]["bytes"] == 4096 and move[0]["args"]["outcome"] == "moved"
    hotspots = [e for e in events if e.get("cat") == "hotspot"]
    assert Counter(e["ph"] for e in hotspots) == {"b": 2, "e": 2}, "one that has not ended ends with the trace"


def test_scale_changes_are_events_of_the_operator() -> None:
    events = [e for e in trace(fleet(), CHANGES)["traceEvents"] if e["pid"] == OPERATOR and e["ph"] == "i"]
    assert [(e["name"], e["args"]["reason"]) for e in events] == [("from 1 to 2 groups", "Out")]


def test_no_recordings_give_an_empty_trace() -> None:
    assert [e["name"] for e in trace([])["traceEvents"]] == ["process_name"]
