"""What Perfetto needs of a trace in Chrome's JSON format. Sources: the Trace Event Format, and Perfetto's importer of it."""

import json
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

Event = dict[str, Any]
FIELDS = {"M": (), "X": ("ts", "dur"), "i": ("ts", "s"), "C": ("ts",), "b": ("ts", "cat", "id"), "e": ("ts", "cat", "id")}
"""Fields that an event of a phase needs beside `pid` and `name`."""
ON_THREADS = "MXi"


def problems(trace: Event) -> list[str]:
    """Returns what Perfetto would drop, or show in another place than meant."""
    try:
        json.dumps(trace, allow_nan=False)
    except ValueError as error:
        return [f"no JSON: {error}"]
    events = trace["traceEvents"]
    if (unit := trace.get("displayTimeUnit")) not in ("ms", "ns"):
        return [f"displayTimeUnit {unit}"]
    if malformed := [problem for event in events for problem in _malformed(event)]:
        return malformed
    return [*_names(events), *_slices(events), *_intervals(events), *_counters(events)]


def _malformed(event: Event) -> Iterator[str]:
    phase = event.get("ph")
    if phase not in FIELDS:
        yield f"unknown phase {phase}"
        return
    needed = [*FIELDS[phase], "pid", "name", *(["tid"] if phase in ON_THREADS else [])]
    yield from (f"{phase} without {field}" for field in needed if event.get(field) in (None, ""))
    for field in ("ts", "dur", "pid", "tid"):
        if field in event and (not isinstance(event[field], int) or not 0 <= event[field] < 2**53):
            yield f"{field} {event[field]!r} of {event['name']}"
    if not isinstance(event.get("args", {}), dict):
        yield f"args of {event['name']}"
    if phase == "i" and event.get("s") not in ("t", "p", "g"):
        yield f"scope {event.get('s')} of {event['name']}"


def _names(events: Iterable[Event]) -> Iterator[str]:
    """Each process and each thread with events has one name, and no thread belongs to two processes."""
    names: dict[tuple[str, int], set[str]] = defaultdict(set)
    pids, used = defaultdict[int, set[int]](set), set[tuple[str, int]]()
    for event in events:
        if event["ph"] in ON_THREADS:
            pids[event["tid"]].add(event["pid"])
        if event["ph"] == "M":
            kind = event["name"].removesuffix("_name")
            names[kind, event["pid" if kind == "process" else "tid"]].add(event["args"]["name"])
        else:
            used |= {("process", event["pid"])} | ({("thread", event["tid"])} if event["ph"] in ON_THREADS else set())
    yield from (f"{kind} {number} has no name" for kind, number in used - names.keys())
    yield from (f"{kind} {number} has the names {sorted(found)}" for (kind, number), found in names.items() if len(found) > 1)
    yield from (f"thread {tid} is one of {sorted(found)}" for tid, found in pids.items() if len(found) > 1)


def _slices(events: Iterable[Event]) -> Iterator[str]:
    """Slices of a thread follow or contain each other."""
    slices: dict[int, list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] == "X":
            slices[event["tid"]].append(event)
    for found in slices.values():
        open_until: list[int] = []
        for event in sorted(found, key=lambda event: (event["ts"], -event["dur"])):
            end = event["ts"] + event["dur"]
            while open_until and open_until[-1] <= event["ts"]:
                open_until.pop()
            if open_until and end > open_until[-1]:
                yield f"{event['name']} at {event['ts']} overlaps the slice before it"
            open_until.append(end)


def _intervals(events: Iterable[Event]) -> Iterator[str]:
    """Begins and ends of a category and id alternate, in one process and with one name."""
    found: dict[tuple[str, str], list[Event]] = defaultdict(list)
    for event in events:
        if event["ph"] in "be":
            found[event["cat"], event["id"]].append(event)
    for key, pair in found.items():
        if [event["ph"] for event in pair] != ["b", "e"] * (len(pair) // 2):
            yield f"{key} has {''.join(event['ph'] for event in pair)}"
        elif [event["ts"] for event in pair] != sorted(event["ts"] for event in pair):
            yield f"{key} ends before it begins"
        elif len({(event["pid"], event["name"]) for event in pair}) > 1:
            yield f"{key} has two names or processes"


def _counters(events: Iterable[Event]) -> Iterator[str]:
    """Values are numbers, and those of a counter have the same names each time."""
    series: dict[tuple[int, str], set[tuple[str, ...]]] = defaultdict(set)
    for event in events:
        if event["ph"] == "C":
            series[event["pid"], event["name"]].add(tuple(event["args"]))
            yield from (f"{event['name']} has {value!r}" for value in event["args"].values() if type(value) not in (int, float))
    yield from (f"{name} has other values at times" for (_, name), found in series.items() if len(found) > 1 or () in found)
