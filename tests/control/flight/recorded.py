"""Recordings of two routers and two groups whose clocks differ."""

from typing import Any

from phalanx_api.flight.entries import (
    ClockOffset,
    Dispatch,
    EngineStep,
    HotspotChange,
    MoveEnd,
    PageTransfer,
    Preemption,
    RankStep,
    Recording,
    TimedEntry,
)

START_S = 1_790_000_000.0
"""Unix time of all, on the clock of router r-a."""
R_B_AHEAD_S, GROUP_AHEAD_S, WORKER_AHEAD_S = 0.5, {"g-a": -2.0, "g-b": 3.0}, 0.25
STEP_S = 0.010


def dispatch(at: float, group: str) -> Dispatch:
    """A dispatch to a group."""
    return Dispatch(
        at=at,
        request="req-1",
        group=group,
        reason="least",
        cost_s=0.2,
        first_token_s=0.1,
        decode_s=0.1,
        others_s=0.0,
        pages_s=0.0,
        prompt_tokens=64,
        hit_tokens=16,
        num_candidates=2,
        waited_s=0.0,
    )


def move_end(**changes: Any) -> MoveEnd:
    """A move of req-1 from g-a to g-b."""
    fields: dict[str, Any] = {
        "at": 3.0, "move": "m:1", "request": "req-1", "source": "g-a", "target": "g-b", "reason": "hotspot",
        "transfer": "precopy", "outcome": "moved", "why": "", "seconds": 1.0, "bytes": 4096, "stall_s": 0.02,
    }  # fmt: skip
    return MoveEnd(**fields | changes)


def router(pod: str, ahead_s: float) -> Recording:
    """A router whose clock is ahead."""
    offsets = [ClockOffset(at=0.0, group=group, ahead_s=offset - ahead_s) for group, offset in GROUP_AHEAD_S.items()]
    hotspot = HotspotChange(at=1.5, group="g-a", cause="kv", why="pages")
    entries: list[ClockOffset | Dispatch | HotspotChange | MoveEnd] = [*offsets, dispatch(1.0, "g-a"), hotspot, move_end()]
    return Recording(kind="router", pod=pod, entries=[TimedEntry(START_S + ahead_s + entry.at, entry) for entry in entries])


def rank(group: str, pod: str, number: int, ahead_s: float, delay_s: float = 0.0) -> Recording:
    """A rank of a group that computes three steps."""
    timed = []
    for step in range(1, 4):
        at = 1.0 + step * 2 * STEP_S
        entry = RankStep(at=at, step=step, seconds=STEP_S - delay_s, tokens=4, requests=2)
        timed.append(TimedEntry(START_S + ahead_s + at, entry))
        if number == 0:
            plan = EngineStep(
                at=at,
                step=step,
                seconds=STEP_S,
                expected_s=None,
                decodes=0 if step == 1 else 2,
                prefill_tokens=4 if step == 1 else 0,
                draft_tokens=0,
                running=2,
                waiting=1,
                free_pages=6,
                total_pages=8,
            )
            timed.append(TimedEntry(START_S + ahead_s + at, plan))
    if number == 0:
        preemption = Preemption(at=2.0, requests=["req-2"], free_pages=7)
        transfer = PageTransfer(at=2.1, move="m:1", phase="MoveOut")
        timed += [TimedEntry(START_S + ahead_s + entry.at, entry) for entry in (preemption, transfer)]
    return Recording(kind="rank", pod=pod, group=group, rank=number, entries=timed)


def fleet() -> list[Recording]:
    """Two routers, a group of two pods and a group of one."""
    return [
        router("r-a", 0.0),
        router("r-b", R_B_AHEAD_S),
        rank("g-a", "g-a-0", 0, GROUP_AHEAD_S["g-a"]),
        rank("g-a", "g-a-1", 1, WORKER_AHEAD_S, delay_s=0.001),
        rank("g-b", "g-b-0", 0, GROUP_AHEAD_S["g-b"]),
    ]
