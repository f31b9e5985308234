"""Draws recordings as a trace in Chrome's JSON format, which Perfetto opens.

A process per pod and one for the operator, a thread per rank, a slice per step. Engines add plans, counters, preemptions and
moves, routers dispatches, moves and hotspots. Times are microseconds since the first entry. Numbers of threads and
ids of intervals differ over the whole trace: Perfetto looks both up without the process.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec

from phalanx_api.flight.clocks import align
from phalanx_api.flight.entries import (
    Dispatch,
    EngineStep,
    HotspotChange,
    MoveEnd,
    MovePlan,
    MoveRefusal,
    PageTransfer,
    Preemption,
    RankStep,
    Recording,
    Shedding,
)
from phalanx_api.status import ScaleChange

Event = dict[str, Any]
ENGINE, TRANSFERS, DISPATCH, BALANCE = 1000, 1001, 1, 2
"""Threads of a pod beside its ranks, which have the numbers below."""
PER_PROCESS = 10_000
"""Numbers of threads of a process, from its own number times this."""
_THREADS = {ENGINE: "plans", TRANSFERS: "page transfers", DISPATCH: "dispatch", BALANCE: "balancing"}
OPERATOR = 1
"""Process number; pods have the numbers after it."""
US = 1_000_000


@dataclass(frozen=True, slots=True)
class _Place:
    """Where the events of a recording go, and the time of the first entry of all."""

    pid: int
    start_s: float

    def instant(self, at_s: float, tid: int, name: str, args: Event) -> Event:
        common = {"pid": self.pid, "tid": thread(self.pid, tid)}
        return {"ph": "i", "s": "t", "ts": self.us(at_s), "name": name, "args": args} | common

    def slice(self, at_s: float, seconds: float, *, tid: int, name: str, args: Event) -> Event:
        """A slice that ends at `at_s`."""
        start = self.us(at_s - seconds)
        common = {"pid": self.pid, "tid": thread(self.pid, tid)}
        return {"ph": "X", "ts": start, "dur": self.us(at_s) - start, "name": name, "args": args} | common

    def counter(self, at_s: float, name: str, values: Event) -> Event:
        return {"ph": "C", "pid": self.pid, "ts": self.us(at_s), "name": name, "args": values}

    def interval(self, start_s: float, end_s: float, *, kind: str, id: str, name: str, args: Event) -> list[Event]:
        """Begin and end of something that may overlap others of its kind. `id`: differs from those of its kind and process."""
        base = {"cat": kind, "id": f"{self.pid} {id}", "pid": self.pid, "tid": thread(self.pid, BALANCE), "name": name}
        return [{"ph": "b", "ts": self.us(start_s), "args": args} | base, {"ph": "e", "ts": self.us(end_s)} | base]

    def us(self, at_s: float) -> int:
        """Whole microseconds, so that the end of a step and the start of the next are equal."""
        return max(0, round((at_s - self.start_s) * US))


def thread(pid: int, number: int) -> int:
    """Returns the number of a thread of a process in the trace."""
    return pid * PER_PROCESS + number


def trace(recordings: Sequence[Recording], scaling: Sequence[ScaleChange] = ()) -> Event:
    """Returns the trace. `scaling`: changes of the number of groups; those before the first entry are left out."""
    aligned = align(recordings)
    entries = [timed for recording in aligned for timed in recording.entries]
    start_s = min((timed.unix_s - getattr(timed.entry, "seconds", 0.0) for timed in entries), default=0.0)
    end_s = max((timed.unix_s for timed in entries), default=0.0)
    pods = {pod: OPERATOR + 1 + index for index, pod in enumerate(dict.fromkeys(recording.pod for recording in aligned))}
    events = list(_names(aligned, pods))
    for recording in aligned:
        events += _without_overlaps(_events(recording, _Place(pods[recording.pod], start_s), end_s))
    events += _scaling(scaling, _Place(OPERATOR, start_s), end_s)
    begin = datetime.fromtimestamp(start_s, UTC).isoformat()
    return {"displayTimeUnit": "ms", "otherData": {"start": begin}, "traceEvents": events}


def _without_overlaps(events: list[Event]) -> list[Event]:
    """Starts each slice of a thread at the end of the one before it, if that is later: Perfetto drops overlapping ones."""
    ends: dict[int, int] = {}
    for event in sorted((event for event in events if event["ph"] == "X"), key=lambda event: event["ts"]):
        end = event["ts"] + event["dur"]
        event["ts"] = min(end, max(event["ts"], ends.get(event["tid"], 0)))
        event["dur"], ends[event["tid"]] = end - event["ts"], max(end, ends.get(event["tid"], 0))
    return events


def _names(recordings: Iterable[Recording], pods: dict[str, int]) -> Iterator[Event]:
    """Names of processes and threads."""

    def name(kind: str, pid: int, text: str, tid: int = 0) -> Event:
        return {"ph": "M", "name": kind, "pid": pid, "tid": thread(pid, tid), "args": {"name": text}}

    yield name("process_name", OPERATOR, "operator")
    yield name("thread_name", OPERATOR, "scaling", BALANCE)
    for recording in recordings:
        pid = pods[recording.pod]
        is_router = recording.kind == "router"
        yield name("process_name", pid, f"router {recording.pod}" if is_router else f"group {recording.group}: {recording.pod}")
        if not is_router:
            yield name("thread_name", pid, f"rank {recording.rank}", recording.rank)
        if is_router or recording.rank == 0:
            for tid in (DISPATCH, BALANCE) if is_router else (ENGINE, TRANSFERS):
                yield name("thread_name", pid, _THREADS[tid], tid)


def _events(recording: Recording, place: _Place, end_s: float) -> list[Event]:
    events: list[Event] = []
    hot: dict[str, tuple[float, HotspotChange]] = {}
    for timed in recording.entries:
        at_s, entry = timed.unix_s, timed.entry
        if isinstance(entry, HotspotChange):
            events += _hotspot(hot, at_s, entry, place)
        else:
            events += _entry_events(recording, at_s, entry, place)
    for since_s, change in hot.values():
        events += _hotspot_interval(since_s, end_s, change, place)
    return events


def _entry_events(recording: Recording, at_s: float, entry: object, place: _Place) -> list[Event]:
    match entry:
        case RankStep():
            return [place.slice(at_s, entry.seconds, tid=recording.rank, name=f"step {entry.step}", args=_args(entry, "seconds"))]
        case EngineStep():
            return _engine_step(at_s, entry, place)
        case Preemption():
            return [place.instant(at_s, ENGINE, "preemption", _args(entry))]
        case PageTransfer():
            return [place.instant(at_s, TRANSFERS, entry.phase, _args(entry))]
        case Dispatch():
            return [place.instant(at_s, DISPATCH, f"to {entry.group}", _args(entry))]
        case MovePlan():
            return [place.instant(at_s, BALANCE, f"plan {entry.source} to {entry.target}", _args(entry))]
        case MoveRefusal():
            return [place.instant(at_s, BALANCE, f"no move from {entry.source}", _args(entry))]
        case Shedding():
            return [place.instant(at_s, BALANCE, "shedding", _args(entry))]
        case MoveEnd():
            name = f"move {entry.source} to {entry.target}"
            return place.interval(at_s - entry.seconds, at_s, kind="move", id=entry.move, name=name, args=_args(entry))
        case _:
            return []


def _engine_step(at_s: float, entry: EngineStep, place: _Place) -> list[Event]:
    name = "mixed" if entry.decodes and entry.prefill_tokens else "decode" if entry.decodes else "prefill"
    return [
        place.slice(at_s, entry.seconds, tid=ENGINE, name=name, args=_args(entry, "seconds")),
        place.counter(at_s, "requests", {"running": entry.running, "waiting": entry.waiting}),
        place.counter(at_s, "pages in use", {"pages": entry.total_pages - entry.free_pages}),
    ]


def _hotspot(hot: dict[str, tuple[float, HotspotChange]], at_s: float, change: HotspotChange, place: _Place) -> list[Event]:
    """Ends the former hotspot of the group and begins the new one, if any."""
    before = hot.pop(change.group, None)
    if change.cause:
        hot[change.group] = at_s, change
    return [] if before is None else _hotspot_interval(before[0], at_s, before[1], place)


def _hotspot_interval(since_s: float, until_s: float, change: HotspotChange, place: _Place) -> list[Event]:
    name = f"hotspot {change.group}: {change.cause}"
    id = f"{change.group} {change.cause} {since_s}"
    return place.interval(since_s, until_s, kind="hotspot", id=id, name=name, args={"why": change.why})


def _scaling(changes: Iterable[ScaleChange], place: _Place, end_s: float) -> list[Event]:
    events = []
    for change in changes:
        at_s = datetime.fromisoformat(change.time).timestamp()
        if place.start_s <= at_s <= end_s:
            name = f"from {change.before} to {change.after} groups"
            events.append(place.instant(at_s, BALANCE, name, {"reason": change.reason, "why": change.message}))
    return events


def _args(entry: msgspec.Struct, *left_out: str) -> Event:
    return {name: value for name, value in msgspec.structs.asdict(entry).items() if name not in ("at", *left_out)}
