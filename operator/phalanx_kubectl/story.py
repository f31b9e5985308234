"""Recordings as text: a line per event that changed something, then requests and steps by group."""

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from datetime import UTC, datetime

import msgspec

from phalanx_api.flight.clocks import align
from phalanx_api.flight.entries import (
    Dispatch,
    EngineStep,
    GroupSize,
    HotspotChange,
    MoveEnd,
    MoveRefusal,
    Preemption,
    Recording,
    RequestEnd,
    Shedding,
    TimedEntry,
)
from phalanx_api.status import ScaleChange

MAX_EVENTS = 200
"""Printed; the latest."""
SIZES_S = 15.0
"""Routers record the sizes of groups more often."""


def within(recordings: Sequence[Recording], start_s: float, end_s: float) -> list[Recording]:
    """Returns the recordings on one clock, with the entries of a time and the sizes of the groups of a little before it."""

    def is_within(timed: TimedEntry) -> bool:
        return start_s - (SIZES_S if _is_size(timed) else 0.0) <= timed.unix_s <= end_s

    return [
        msgspec.structs.replace(recording, entries=[timed for timed in recording.entries if is_within(timed)])
        for recording in align(recordings)
    ]


def _is_size(timed: TimedEntry) -> bool:
    return isinstance(timed.entry, GroupSize)


def story(recordings: Sequence[Recording], scaling: Sequence[ScaleChange] = ()) -> str:
    """Returns the text. `recordings`: on one clock. `scaling`: changes of the number of groups."""
    times = [timed.unix_s for found in recordings for timed in found.entries if not _is_size(timed)]
    if not times:
        return "nothing is recorded in this time\n"
    start_s, end_s = min(times), max(times)
    events = sorted([*_events(recordings), *_scaling(scaling, start_s, end_s)])
    lines = [f"{_clock(at_s)}  {text}" for at_s, text in events[-MAX_EVENTS:]]
    left_out = [f"{len(events) - MAX_EVENTS} earlier events are left out"] if len(events) > MAX_EVENTS else []
    head = f"{_clock(start_s)} to {_clock(end_s)} UTC, {len(recordings)} processes"
    return "\n".join([head, *left_out, *lines, *_requests(recordings), *_steps(recordings)]) + "\n"


def _events(recordings: Iterable[Recording]) -> Iterator[tuple[float, str]]:
    for recording in recordings:
        for timed in recording.entries:
            text = _sentence(recording, timed.entry)
            if text:
                yield timed.unix_s, text


def _sentence(recording: Recording, entry: object) -> str:
    match entry:
        case HotspotChange(group=group, cause="", why=why):
            return f"{group} is no hotspot any more: {why}"
        case HotspotChange(group=group, cause=cause, why=why):
            return f"{group} is a hotspot ({cause}): {why}"
        case MoveEnd(outcome="moved") as move:
            stall = "" if move.stall_s is None else f", stall {move.stall_s * 1e3:.0f} ms"
            return f"{move.request} moved from {move.source} to {move.target} ({move.reason}) in {move.seconds:.2f} s{stall}"
        case MoveEnd() as move:
            return f"{move.request} did not move from {move.source} to {move.target}: {move.outcome}, {move.why}"
        case MoveRefusal(source=source, code=code, why=why):
            return f"nothing moves from {source} ({code}): {why}"
        case Preemption(requests=requests):
            return f"{recording.group} preempted {', '.join(requests)}"
        case Shedding(requests=count, why=why):
            return f"{recording.pod} refused {count} requests: {why}"
        case RequestEnd(replays=replays, request=request) if replays:
            return f"{request} ended after {replays} replays"
        case _:
            return ""


def _scaling(changes: Iterable[ScaleChange], start_s: float, end_s: float) -> Iterator[tuple[float, str]]:
    for change in changes:
        at_s = datetime.fromisoformat(change.time).timestamp()
        if start_s <= at_s <= end_s:
            yield at_s, f"from {change.before} to {change.after} groups ({change.reason}): {change.message}"


def _requests(recordings: Iterable[Recording]) -> list[str]:
    """Where requests went, and why."""
    entries = [timed.entry for recording in recordings for timed in recording.entries]
    sent = [entry for entry in entries if isinstance(entry, Dispatch)]
    ttft = sorted(
        entry.first_token_at - entry.arrived_at
        for entry in entries
        if isinstance(entry, RequestEnd) and entry.first_token_at is not None
    )
    if not sent:
        return ["no request was sent to a group"]
    groups = ", ".join(f"{group} {count}" for group, count in sorted(Counter(entry.group for entry in sent).items()))
    reasons = ", ".join(f"{reason} {count}" for reason, count in Counter(entry.reason for entry in sent).most_common())
    lines = [f"{len(sent)} requests sent: {groups}", f"chosen as: {reasons}"]
    if ttft:
        lines.append(f"TTFT of {len(ttft)} that ended: P50 {_ms(ttft, 0.5)}, P95 {_ms(ttft, 0.95)}")
    return lines


def _ms(values: Sequence[float], share: float) -> str:
    return f"{values[min(len(values) - 1, int(share * len(values)))] * 1e3:.0f} ms"


def _steps(recordings: Iterable[Recording]) -> list[str]:
    lines = []
    for recording in recordings:
        steps = [timed.entry for timed in recording.entries if isinstance(timed.entry, EngineStep)]
        if steps:
            total_s = sum(step.seconds for step in steps)
            used = 1 - sum(step.free_pages for step in steps) / sum(step.total_pages for step in steps)
            batch = sum(step.decodes for step in steps) / len(steps)
            mean = f"mean {total_s / len(steps) * 1e3:.1f} ms, {batch:.1f} decodes, {used:.0%} of the pages"
            lines.append(f"{recording.group}: {len(steps)} steps in {total_s:.1f} s, {mean}")
    return lines


def _clock(at_s: float) -> str:
    return datetime.fromtimestamp(at_s, UTC).strftime("%H:%M:%S.%f")[:-3]
