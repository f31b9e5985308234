"""What a move costs, and that it changes no token: two groups of this runtime on this machine, moved by hand over their links.

    python -m bench.moves.groups MODEL                       bytes per second of a copy, and how long a stream stands still
    python -m bench.moves.groups MODEL                   bytes per second of a copy, and how long a stream pauses

Figures are of one machine on which both groups, the links and this program share the cores; the load average is printed beside.
A stream stands still for the longest gap between two tokens around its move. What others in the source wait is given with and
without a copy beside their steps.
"""

import argparse
import os
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.frame.figures import percentile, table
from bench.frame.programs import running
from bench.moves.mover import Mover, Stream, linked
from phalanx_api import moves, wire
from phalanx_api.wire.router import mix

TOKEN = "bench"
MODES: tuple[moves.MoveMode, ...] = ("stop", "precopy")
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string","maxLength":40}},"required":["a","b"]}'
AT_ONCE = 8
"""Streams that run side by side while moves are forced."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a mode and a context; how many repetitions."""

    mode: moves.MoveMode
    context: int
    count: int
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """What one case took: usual gaps before the move, the longest around it, from MoveOut to Arrived, bytes over the network."""

    gap_s: list[float]
    still_s: list[float]
    copy_s: list[float]
    num_bytes: list[int]


def make_request(name: str, prompt: int, max_tokens: int, **sampling: object) -> wire.Request:
    """A request whose prompt no other one shares."""
    chance = random.Random(name)
    fields: dict[str, Any] = {"max_tokens": max_tokens, "seed": chance.randrange(1 << 31), "temperature": 0.0, **sampling}
    return wire.Request(
        id=name, epoch=0, prompt=[chance.randrange(250) for _ in range(prompt)], delivered=[], sampling=wire.Sampling(**fields)
    )


@contextmanager
def two_groups(model: str, flags: Sequence[str]) -> Iterator[Mover]:
    """A mover over two groups that serve this model."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "token").write_text(TOKEN)
        arguments = ["serve", model, "--served-model-name", "model", "--token-file", str(folder / "token"), *flags]
        programs = [stack.enter_context(running(f"group {name}", "phalanx_runtime", arguments, folder)) for name in "ab"]
        yield Mover([stack.enter_context(linked(program.base_url, TOKEN)) for program in programs])


def measure(mover: Mover, case: Case) -> Row:
    """Moves streams of this context, one after the other, each alone."""
    row = Row([], [], [], [])
    for i in range(case.count):
        stream = mover.submit(make_request(f"{case} {i} {time.time()}", case.context, 200))
        mover.until(lambda stream=stream: len(stream.tokens) >= 20)  # type: ignore[misc]
        before = len(stream.tokens)
        row.gap_s.extend(gaps(stream, 5))
        move = mover.prepare(stream, 1)
        began = time.perf_counter()
        mover.move_out(stream, move, case.mode, case.bytes_per_s)
        mover.wait_for_pages(move)
        row.copy_s.append(time.perf_counter() - began)
        arrived = mover.heard(moves.Arrived, move)
        if not arrived:
            raise RuntimeError(f"the move failed: {mover.heard(moves.MoveFailed, move)}")
        row.num_bytes.append(arrived[0].num_bytes)
        mover.commit(stream, move, 1)
        at = len(stream.tokens)
        mover.until(lambda stream=stream, at=at: len(stream.tokens) >= at + 20)  # type: ignore[misc]
        row.still_s.append(max(gaps(stream, before)))
        mover.abort(stream)
        mover.settle()
    return row


def gaps(stream: Stream, first: int) -> list[float]:
    """Gaps between tokens from index `first` on."""
    return [later - sooner for sooner, later in zip(stream.times[first - 1 :], stream.times[first:], strict=False)]


def beside(mover: Mover, context: int) -> tuple[list[float], list[float]]:
    """Gaps of four streams in the source: undisturbed, and while a fifth one is copied over and over."""
    others = [mover.submit(make_request(f"other {i} {time.time()}", 32, 600)) for i in range(4)]
    moved = mover.submit(make_request(f"moved {time.time()}", context, 2000))
    mover.until(lambda: all(len(one.tokens) >= 20 for one in [*others, moved]))
    quiet, busy = [len(one.tokens) for one in others], []
    mover.until(lambda: all(len(one.tokens) >= start + 100 for one, start in zip(others, quiet, strict=True)))
    until = [len(one.tokens) for one in others]
    while all(len(one.tokens) < end + 200 for one, end in zip(others, until, strict=True)):
        move = mover.prepare(moved, 1)
        mover.move_out(moved, move, "stop")
        mover.wait_for_pages(move)
        mover.ends[0].put(moves.Thaw(move))
        mover.ends[1].put(moves.Cancel(move))
    busy = [len(one.tokens) for one in others]
    for one in [*others, moved]:
        mover.abort(one)
    mover.settle()

    def between(starts: Sequence[int], ends: Sequence[int]) -> list[float]:
        return [
            one.times[i] - one.times[i - 1]
            for one, start, end in zip(others, starts, ends, strict=True)
            for i in range(start + 1, end)
        ]

    return between(quiet, until), between(until, busy)


@dataclass(slots=True)
class Forced:
    """What forced moves came to. `failed`: moves that left a stream where it was, by code; `different`: names of streams."""

    moves: int = 0
    streams: int = 0
    num_bytes: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    different: list[str] = field(default_factory=list)


def forced(mover: Mover, count: int, seed: int) -> Forced:
    """Moves at random indexes until so many were made. Raises when an index is missing, a stream hangs or a page is lost."""
    chance, all_of_it = random.Random(seed), Forced()
    while all_of_it.moves < count:
        streams = all_of_it.streams
        requests = [kind(f"{seed} {streams} {i}", i) for i in range(AT_ONCE)]
        plain = [mover.submit(request) for request in requests]
        mover.until(lambda plain=plain: all(one.finish or one.refused for one in plain))  # type: ignore[misc]
        if refused := [one.refused.message for one in plain if one.refused]:
            raise SystemExit(f"this model cannot do what is asked of it: {refused[0]}")
        moved = [mover.submit(request, at=i % 2) for i, request in enumerate(requests)]
        while any(one.finish is None for one in moved):
            stream = chance.choice([one for one in moved if one.finish is None])
            at = len(stream.tokens) + chance.randrange(1, 6)
            mover.until(lambda stream=stream, at=at: len(stream.tokens) >= at or stream.finish is not None)  # type: ignore[misc]
            if stream.finish is None:
                outcome = mover.move(stream, 1 - stream.at, chance.choice(MODES))
                if isinstance(outcome, moves.Arrived):
                    all_of_it.moves += 1
                    all_of_it.num_bytes += outcome.num_bytes
                else:
                    all_of_it.failed[outcome.code] += 1
        all_of_it.streams += len(moved)
        for a, b in zip(plain, moved, strict=True):
            if a.tokens != b.tokens or a.finish != b.finish:
                all_of_it.different.append(a.request.id)
        mover.settle()
    return all_of_it


def kind(name: str, number: int) -> wire.Request:
    """Greedy, seeded, with a schema, and two siblings, in turn."""
    seed = random.Random(name).randrange(1 << 31)
    match number % 5:
        case 0:
            return make_request(name, 40, 64)
        case 1:
            return make_request(name, 40, 64, temperature=1.0)
        case 2:
            return make_request(name, 40, 64, temperature=1.0, grammar=wire.Grammar("json_schema", SCHEMA))
        case place:
            return make_request(name, 40, 64, temperature=1.0, seed=mix(seed, place - 3))


def load_average() -> str:
    """Of the last minute."""
    return f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"


def show(mover: Mover, contexts: Sequence[int], count: int) -> None:
    """Prints the table of all cases."""
    rows = []
    for context in contexts:
        for mode in MODES:
            row = measure(mover, Case(mode, context, count))
            size = statistics.median(row.num_bytes)
            rate = statistics.median(n / s for n, s in zip(row.num_bytes, row.copy_s, strict=True))
            still = [1e3 * s for s in row.still_s]
            usual = f"{1e3 * statistics.median(row.gap_s):.0f}"
            rows.append(
                [mode, str(context), usual,
                 f"{size / 1e6:.1f}", f"{1e3 * statistics.median(row.copy_s):.0f}", f"{rate / 1e6:.0f}",
                 f"{statistics.median(still):.0f}", f"{max(still):.0f}"]
            )  # fmt: skip
    print(table(["mode", "context", "usual gap ms", "MB", "copy ms", "MB/s", "still ms, median", "still ms, longest"], rows))
    quiet, busy = beside(mover, max(contexts))
    for name, waits in (("undisturbed", quiet), ("beside copies", busy)):
        print(
            f"ITL of 4 others, {name}: median {1e3 * statistics.median(waits):.1f} ms, p99 {1e3 * percentile(waits, 99):.1f} ms"
        )
    print(load_average())


def main() -> None:
    """Runs what the flags ask for."""
    parser = argparse.ArgumentParser(
        prog="bench.moves.groups", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="folder of a checkpoint")
    parser.add_argument("--contexts", type=int, nargs="+", default=[500, 4000], help="prompt tokens of the moved streams")
    parser.add_argument("--count", type=int, default=5, help="moves of each row")
    parser.add_argument("--forced", type=int, help="make so many moves at random indexes and compare tokens")
    parser.add_argument("--seed", type=int, default=0)
    options, flags = parser.parse_known_args()
    with two_groups(options.model, flags) as mover:
        if options.forced is None:
            show(mover, options.contexts, options.count)
            return
        began = time.perf_counter()
        done = forced(mover, options.forced, options.seed)
        took_s = time.perf_counter() - began
        print(f"{done.moves} moves of {done.streams} streams in {took_s:.0f} s, {done.num_bytes / 1e6:.0f} MB of pages")
        print(f"moves that failed and left the stream where it was: {dict(done.failed)}; streams that differ: {done.different}")
        print(load_average())
        if done.different:
            sys.exit(1)


if __name__ == "__main__":
    main()
