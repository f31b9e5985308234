"""Plays what flight recorders hold through the simulated fleet, under our policy and others.

    python -m bench.simulate.recorded FILE [--policies NAME ...] [--plot FILE.svg]

FILE has a recording per line, as `phalanx-router recording` prints them. Requests arrive as recorded, with their lengths and
shared blocks, at groups of the recorded sizes and step times. Groups that differ, start or end are not simulated: all have the
shape of the first, and one may be slow. The row "recorded" is what the routers measured.
"""

import argparse
import sys
from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass
from pathlib import Path

import msgspec
import numpy as np

from bench.frame.figures import table
from bench.router.replay import Arrival
from bench.simulate.cache import PAGE
from bench.simulate.engine import Engine, Shape
from bench.simulate.figures import figures
from bench.simulate.jobs import Job
from bench.simulate.policies.ours import Ours
from bench.simulate.policy import MoveOrder, Policy
from bench.simulate.timeline import Series, chart
from bench.simulate.workloads import POLICIES
from bench.simulate.world import Setting, World
from phalanx_api.cost import StepModel
from phalanx_api.flight.clocks import align
from phalanx_api.flight.entries import Dispatch, GroupSize, MovePlan, Recording, RequestEnd
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.flight import FlightRecorder
from phalanx_router.routing.late_binding import Dispatch as ChosenDispatch
from phalanx_router.routing.prefixes import BLOCK_TOKENS

SLOW = 1.25
"""Relative step time above which the slowest group is simulated as slow."""
NOT_REPLAYABLE = 3
"""Exit status."""
COMPARED = ("phalanx", "phalanx, no moves", "least requests", "round robin", "llm-d 2:1:1", "Dynamo cost")


class NotReplayable(Exception):
    """The recordings hold no request or no group."""


@dataclass(frozen=True, slots=True)
class RecordedLoad:
    """The requests and groups of recordings."""

    arrivals: list[Arrival]
    setting: Setting
    measured: list[RequestEnd]
    """In the order of `arrivals`."""


def read_load(recordings: Sequence[Recording], start_s: float | None = None) -> RecordedLoad:
    """Returns the load. Raises NotReplayable.

    `start_s`: time 0 of the simulation, on the recorder's clock; default: the first arrival.
    """
    routers = [recording for recording in align(recordings) if recording.kind == "router"]
    ends, shapes = [], dict[str, GroupSize]()
    for router in routers:
        for timed in router.entries:
            entry, shift_s = timed.entry, timed.unix_s - timed.entry.at if start_s is None else 0.0
            if isinstance(entry, RequestEnd) and entry.output_tokens:
                ends.append((entry.arrived_at + shift_s, entry.request, entry))
            elif isinstance(entry, GroupSize) and entry.step_model:
                shapes[entry.group] = entry  # the latest
    if not ends or not shapes:
        raise NotReplayable(f"{len(ends)} requests and {len(shapes)} groups with measured steps are recorded")
    ends.sort(key=lambda end: end[:2])
    first_s = ends[0][0] if start_s is None else start_s
    block_tokens = max((entry.block_tokens for _, _, entry in ends if entry.blocks), default=BLOCK_TOKENS)
    arrivals = [Arrival(at_s - first_s, entry.prompt_tokens, entry.output_tokens, tuple(entry.blocks)) for at_s, _, entry in ends]
    setting = _setting([shapes[group] for group in sorted(shapes)], block_tokens)
    return RecordedLoad(arrivals, setting, [entry for _, _, entry in ends])


def _setting(groups: Sequence[GroupSize], block_tokens: int) -> Setting:
    first = groups[0]
    slowest = max(range(len(groups)), key=lambda index: groups[index].speed)
    is_slow = len(groups) > 1 and groups[slowest].speed > SLOW
    model = StepModel.from_coefficients(first.step_model)
    assert model is not None, "shapes without coefficients are left out"
    shape = Shape(
        model,
        total_pages=first.total_pages * first.page_size // PAGE,
        max_num_seqs=first.max_num_seqs,
        max_num_batched_tokens=first.max_num_batched_tokens,
        token_bytes=max(1, first.page_bytes // first.page_size),
        copy_bytes_per_s=first.copy_bytes_per_s,
    )
    slow = (slowest, groups[slowest].speed, 0.0) if is_slow else None
    return Setting(len(groups), shape, slow=slow, block_tokens=block_tokens)


def play(load: RecordedLoad, policy: Policy) -> World:
    """Returns the fleet after all requests have ended."""
    world = World(load.setting, policy, load.arrivals)
    world.run()
    return world


class RecordedOurs(Ours):
    """Our policy with a flight recorder."""

    def __init__(self, shape: Shape, groups: int, mode: BalancePolicy, recorder: FlightRecorder) -> None:
        super().__init__(shape, groups, mode)
        self._recorder = recorder
        for group in range(groups):
            self._recorder.record(group_shape(f"g{group}", shape))

    def decided(self, dispatch: ChosenDispatch, now: float) -> None:
        choice = dispatch.choice
        self._recorder.record(
            Dispatch(
                at=now,
                request=_id(dispatch.queued.ticket),
                group=choice.key,
                reason=choice.reason,
                cost_s=choice.cost_s,
                first_token_s=choice.terms.first_token_s,
                decode_s=choice.terms.decode_s,
                others_s=choice.terms.others_s,
                pages_s=choice.terms.pages_s,
                prompt_tokens=dispatch.queued.demand.prompt_tokens,
                hit_tokens=choice.hit_tokens,
                num_candidates=choice.num_candidates,
                waited_s=now - dispatch.queued.arrived_at,
            )
        )

    def tick(self, now: float, engines: Sequence[Engine]) -> list[MoveOrder]:
        orders = super().tick(now, engines)
        for order in orders:
            self._planned(order, "migrate", now)
        return orders

    def rescue(self, job: Job, group: int, now: float, engines: Sequence[Engine]) -> MoveOrder | None:
        order = super().rescue(job, group, now, engines)
        if order is not None:
            self._planned(order, "rescue", now)
        return order

    def _planned(self, order: MoveOrder, rung: str, now: float) -> None:
        self._recorder.record(
            MovePlan(
                at=now,
                request=_id(order.job.number),
                source=f"g{order.source}",
                target=f"g{order.target}",
                rung=rung,
                transfer=order.mode,
                why="",
            )
        )

    def job_left(self, job: Job, group: int, now: float) -> None:
        if job.ended_s is not None:
            self._recorder.record(
                RequestEnd(
                    at=now,
                    request=_id(job.number),
                    arrived_at=job.at_s,
                    first_token_at=job.first_s,
                    prompt_tokens=job.prompt_tokens,
                    output_tokens=job.output_tokens,
                    block_tokens=BLOCK_TOKENS,
                    blocks=list(job.blocks),
                    moves=job.moves,
                    replays=0,
                )
            )
        super().job_left(job, group, now)


def group_shape(group: str, shape: Shape) -> GroupSize:
    """Returns the entry of a simulated group."""
    return GroupSize(
        at=0.0,
        group=group,
        total_pages=shape.total_pages,
        page_size=PAGE,
        page_bytes=PAGE * shape.token_bytes,
        max_num_seqs=shape.max_num_seqs,
        max_num_batched_tokens=shape.max_num_batched_tokens,
        step_model=list(astuple(shape.model)),
        speed=1.0,
        copy_bytes_per_s=shape.copy_bytes_per_s,
    )


def _id(number: int) -> str:
    return f"{number:08}"


def measured_figures(ends: Sequence[RequestEnd]) -> dict[str, float]:
    """Returns percentiles of what the routers measured."""
    ttft = [end.first_token_at - end.arrived_at for end in ends if end.first_token_at is not None]
    tpot = [
        (end.at - end.first_token_at) / (end.output_tokens - 1)
        for end in ends
        if end.first_token_at is not None and end.output_tokens > 1
    ]
    return {
        "ttft_p50": float(np.percentile(ttft, 50)) if ttft else 0.0,
        "ttft_p99": float(np.percentile(ttft, 99)) if ttft else 0.0,
        "tpot_p99": float(np.percentile(tpot, 99)) if tpot else 0.0,
        "moves": float(sum(end.moves for end in ends)),
    }


def series(load: RecordedLoad, worlds: Mapping[str, World]) -> dict[str, Series]:
    """Returns time of arrival and time to first token of each request, as recorded and by policy."""
    recorded = [
        (arrival.at_s, end.first_token_at - end.arrived_at)
        for arrival, end in zip(load.arrivals, load.measured, strict=True)
        if end.first_token_at is not None
    ]
    simulated = {name: [(job.at_s, (job.first_s or 0.0) - job.at_s) for job in world.jobs] for name, world in worlds.items()}
    return {"recorded": recorded, **simulated}


def _row(name: str, found: Mapping[str, float], preemptions: str) -> list[str]:
    times = [f"{found[key] * 1e3:.0f}" for key in ("ttft_p50", "ttft_p99")]
    return [name, *times, f"{found['tpot_p99'] * 1e3:.1f}", preemptions, f"{found['moves']:.0f}"]


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the figures of each policy. Returns 1 for an unreadable file, 3 without requests or groups."""
    parser = argparse.ArgumentParser("bench.simulate.recorded", description="Plays recordings through the simulated fleet.")
    parser.add_argument("file", type=Path, help="recordings, one JSON line each")
    parser.add_argument("--policies", nargs="+", default=list(COMPARED), choices=list(POLICIES), metavar="NAME")
    parser.add_argument("--plot", type=Path, help="file for an SVG chart of the time to first token over time")
    args = parser.parse_args(arguments)
    try:
        lines = args.file.read_text().splitlines()
        load = read_load([msgspec.json.decode(line, type=Recording) for line in lines if line])
    except NotReplayable as error:
        print(error, file=sys.stderr)
        return NOT_REPLAYABLE
    except (OSError, msgspec.MsgspecError) as error:
        print(f"{args.file}: {error}", file=sys.stderr)
        return 1
    setting = load.setting
    worlds = {name: play(load, POLICIES[name](setting.shape, setting.groups)) for name in args.policies}
    rows = [_row("recorded", measured_figures(load.measured), "")]
    for name, world in worlds.items():
        found = figures(world, setting.shape)
        values = {key: float(getattr(found, key)) for key in ("ttft_p50", "ttft_p99", "tpot_p99", "moves")}
        rows.append(_row(name, values, str(found.preemptions)))
    duration_s = load.arrivals[-1].at_s
    print(f"{len(load.arrivals)} requests in {duration_s:.0f} s, {setting.groups} groups; simulated, except the first row")
    print(table(["policy", "TTFT P50 ms", "TTFT P99 ms", "TPOT P99 ms", "preemptions", "moves"], rows))
    if args.plot is not None:
        args.plot.write_text(chart(series(load, worlds)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
