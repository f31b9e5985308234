"""Puts recordings of several machines on one clock, that of the first router.

    group    its leader's clock less the offset that a router measured
    router   by the offsets of the groups that both measured
    rank     in another pod than its leader, by the steps of both: their usual delay counts as none

A rank starts a step when rank 0 has sent its plan.
"""

from collections.abc import Sequence
from statistics import median

import msgspec

from phalanx_api.flight.entries import ClockOffset, RankStep, Recording, TimedEntry


def align(recordings: Sequence[Recording]) -> list[Recording]:
    """Returns the recordings with times of one clock, without offsets. Those without a measured offset keep theirs."""
    routers = [recording for recording in recordings if recording.kind == "router"]
    offsets = [_group_offsets(router) for router in routers]
    reference = next((found for found in offsets if found), {})
    ahead_of_router = {router.pod: -_router_shift(found, reference) for router, found in zip(routers, offsets, strict=True)}
    ahead_of_group = _merge(offsets, [ahead_of_router[router.pod] for router in routers])
    leaders = {recording.group: recording for recording in recordings if recording.kind == "rank" and recording.rank == 0}
    aligned = []
    for recording in recordings:
        if recording.kind == "router":
            ahead_s = ahead_of_router[recording.pod]
        else:
            ahead_s = ahead_of_group.get(recording.group, 0.0)
            leader = leaders.get(recording.group)
            if leader is not None and leader.pod != recording.pod:
                ahead_s += _ahead_of_leader(recording, leader)
        aligned.append(_shifted(recording, ahead_s))
    return aligned


def _group_offsets(router: Recording) -> dict[str, float]:
    """The latest offset of each group."""
    entries = (timed.entry for timed in router.entries)
    return {entry.group: entry.ahead_s for entry in entries if isinstance(entry, ClockOffset)}


def _router_shift(offsets: dict[str, float], reference: dict[str, float]) -> float:
    """Seconds to add to a router's times."""
    shifts = [offsets[group] - reference[group] for group in offsets.keys() & reference.keys()]
    return median(shifts) if shifts else 0.0


def _merge(offsets: Sequence[dict[str, float]], ahead_of_routers: Sequence[float]) -> dict[str, float]:
    """How far each group's clock is ahead of the reference, by the first router that knows."""
    merged: dict[str, float] = {}
    for found, router_s in zip(offsets, ahead_of_routers, strict=True):
        merged = {group: ahead_s + router_s for group, ahead_s in found.items()} | merged
    return merged


def _ahead_of_leader(recording: Recording, leader: Recording) -> float:
    """The median: a few steps may be of another incarnation, with the same numbers."""
    starts = _starts(leader)
    delays = [start - starts[step] for step, start in _starts(recording).items() if step in starts]
    return median(delays) if delays else 0.0


def _starts(recording: Recording) -> dict[int, float]:
    """Start of each step since the last start of the group, which counts from 1 again."""
    starts: dict[int, float] = {}
    last = 0
    for timed in recording.entries:
        if isinstance(timed.entry, RankStep):
            if timed.entry.step <= last:
                starts = {}
            last = timed.entry.step
            starts[last] = timed.unix_s - timed.entry.seconds
    return starts


def _shifted(recording: Recording, ahead_s: float) -> Recording:
    entries = [
        TimedEntry(timed.unix_s - ahead_s, timed.entry) for timed in recording.entries if not isinstance(timed.entry, ClockOffset)
    ]
    return msgspec.structs.replace(recording, entries=entries)
