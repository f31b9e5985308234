"""Measures moves of requests between two real groups on this machine, without a router.

    python -m bench.moves.groups MODEL                       bytes/s of a copy, stall of the moved stream, delay of others
    python -m bench.moves.groups MODEL --forced 10000        as many moves at random indexes; compares tokens

Groups, links and this program share the cores; the load average is printed. The stall is the longest gap between two tokens
around a move. ITL of other streams in the source group is measured with and without copies. With `--forced` exits with 1 if
tokens differ. Further flags go to the groups.
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
from phalanx_api.wire.router import choice_seed

TOKEN = "bench"
MODES: tuple[moves.MoveMode, ...] = ("stop", "precopy")
SCHEMA = '{"type":"object","properties":{"a":{"type":"integer"},"b":{"type":"string","maxLength":40}},"required":["a","b"]}'
CONCURRENCY = 8
"""Concurrent streams during forced moves."""


@dataclass(frozen=True, slots=True)
class Case:
    mode: moves.MoveMode
    context: int
    count: int
    bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Row:
    """Measurements of one case, one value per move."""

    gap_s: list[float]  # gaps before the move
    stall_s: list[float]  # longest gap around the move
    copy_s: list[float]  # from MoveOut to Arrived
    num_bytes: list[int]  # bytes transferred


def make_request(name: str, prompt: int, max_tokens: int, **sampling: object) -> wire.Request:
    rng = random.Random(name)
    fields: dict[str, Any] = {"max_tokens": max_tokens, "seed": rng.randrange(1 << 31), "temperature": 0.0, **sampling}
    return wire.Request(
        id=name, epoch=0, prompt=[rng.randrange(250) for _ in range(prompt)], delivered=[], sampling=wire.Sampling(**fields)
    )


@contextmanager
def two_groups(model: str, flags: Sequence[str]) -> Iterator[Mover]:
    """Runs two groups of this model and connects a mover to them."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        (folder / "token").write_text(TOKEN)
        arguments = ["serve", model, "--served-model-name", "model", "--token-file", str(folder / "token"), *flags]
        programs = [stack.enter_context(running(f"group {name}", "phalanx_runtime", arguments, folder)) for name in "ab"]
        yield Mover([stack.enter_context(linked(program.base_url, TOKEN)) for program in programs])


def measure(mover: Mover, case: Case) -> Row:
    row = Row([], [], [], [])
    for i in range(case.count):
        stream = mover.submit(make_request(f"{case} {i} {time.time()}", case.context, 200))
        mover.until(lambda stream=stream: len(stream.tokens) >= 20)  # type: ignore[misc]
        before = len(stream.tokens)
        row.gap_s.extend(gaps(stream, 5))
        move = mover.prepare(stream, 1)
        started = time.perf_counter()
        mover.move_out(stream, move, case.mode, case.bytes_per_s)
        mover.wait_for_pages(move)
        row.copy_s.append(time.perf_counter() - started)
        arrived = mover.frames_of(moves.Arrived, move)
        if not arrived:
            raise RuntimeError(f"the move failed: {mover.frames_of(moves.MoveFailed, move)}")
        row.num_bytes.append(arrived[0].num_bytes)
        mover.commit(stream, move, 1)
        start = len(stream.tokens)
        mover.until(lambda stream=stream, start=start: len(stream.tokens) >= start + 20)  # type: ignore[misc]
        row.stall_s.append(max(gaps(stream, before)))
        mover.abort(stream)
        mover.settle()
    return row


def gaps(stream: Stream, first: int) -> list[float]:
    """Returns the gaps between tokens from index `first` on."""
    return [later - sooner for sooner, later in zip(stream.times[first - 1 :], stream.times[first:], strict=False)]


def measure_others(mover: Mover, context: int) -> tuple[list[float], list[float]]:
    """Returns the gaps of four streams in the source: undisturbed, and during repeated copies of a fifth stream."""
    others = [mover.submit(make_request(f"other {i} {time.time()}", 32, 600)) for i in range(4)]
    moved = mover.submit(make_request(f"moved {time.time()}", context, 2000))
    mover.until(lambda: all(len(stream.tokens) >= 20 for stream in [*others, moved]))
    starts = [len(stream.tokens) for stream in others]
    mover.until(lambda: all(len(stream.tokens) >= start + 100 for stream, start in zip(others, starts, strict=True)))
    copies_start = [len(stream.tokens) for stream in others]
    while all(len(stream.tokens) < start + 200 for stream, start in zip(others, copies_start, strict=True)):
        move = mover.prepare(moved, 1)
        mover.move_out(moved, move, "stop")
        mover.wait_for_pages(move)
        mover.groups[0].put(moves.Thaw(move))
        mover.groups[1].put(moves.Cancel(move))
    ends = [len(stream.tokens) for stream in others]
    for stream in [*others, moved]:
        mover.abort(stream)
    mover.settle()

    def between(firsts: Sequence[int], lasts: Sequence[int]) -> list[float]:
        return [
            stream.times[i] - stream.times[i - 1]
            for stream, first, last in zip(others, firsts, lasts, strict=True)
            for i in range(first + 1, last)
        ]

    return between(starts, copies_start), between(copies_start, ends)


@dataclass(slots=True)
class ForcedMoves:
    moves: int = 0
    streams: int = 0
    num_bytes: int = 0
    failed: Counter[str] = field(default_factory=Counter)  # failed moves by code
    different: list[str] = field(default_factory=list)  # request ids


def force_moves(mover: Mover, count: int, seed: int) -> ForcedMoves:
    """Moves streams at random indexes until `count` moves succeeded.

    Raises if an index is missing, a stream hangs or a page leaks.
    """
    rng, result = random.Random(seed), ForcedMoves()
    while result.moves < count:
        streams = result.streams
        requests = [request_of_kind(f"{seed} {streams} {i}", i) for i in range(CONCURRENCY)]
        plain = [mover.submit(request) for request in requests]
        mover.until(lambda plain=plain: all(stream.finish or stream.refused for stream in plain))  # type: ignore[misc]
        if refused := [stream.refused.message for stream in plain if stream.refused]:
            raise SystemExit(f"the model refuses a request: {refused[0]}")
        moved = [mover.submit(request, group=i % 2) for i, request in enumerate(requests)]
        while any(stream.finish is None for stream in moved):
            stream = rng.choice([stream for stream in moved if stream.finish is None])
            index = len(stream.tokens) + rng.randrange(1, 6)
            mover.until(lambda stream=stream, index=index: len(stream.tokens) >= index or stream.finish is not None)  # type: ignore[misc]
            if stream.finish is None:
                outcome = mover.move(stream, 1 - stream.group, rng.choice(MODES))
                if isinstance(outcome, moves.Arrived):
                    result.moves += 1
                    result.num_bytes += outcome.num_bytes
                else:
                    result.failed[outcome.code] += 1
        result.streams += len(moved)
        for a, b in zip(plain, moved, strict=True):
            if a.tokens != b.tokens or a.finish != b.finish:
                result.different.append(a.request.id)
        mover.settle()
    return result


def request_of_kind(name: str, number: int) -> wire.Request:
    """Returns a greedy request, a seeded one, one with a schema, and two siblings, in turn."""
    seed = random.Random(name).randrange(1 << 31)
    match number % 5:
        case 0:
            return make_request(name, 40, 64)
        case 1:
            return make_request(name, 40, 64, temperature=1.0)
        case 2:
            return make_request(name, 40, 64, temperature=1.0, grammar=wire.Grammar("json_schema", SCHEMA))
        case sibling:
            return make_request(name, 40, 64, temperature=1.0, seed=choice_seed(seed, sibling - 3))


def load_average() -> str:
    return f"load average {os.getloadavg()[0]:.1f} on {len(os.sched_getaffinity(0))} cores"


def print_report(mover: Mover, contexts: Sequence[int], count: int) -> None:
    """Prints the table of all cases and the ITL of other streams."""
    rows = []
    for context in contexts:
        for mode in MODES:
            row = measure(mover, Case(mode, context, count))
            size = statistics.median(row.num_bytes)
            rate = statistics.median(n / s for n, s in zip(row.num_bytes, row.copy_s, strict=True))
            stalls = [1e3 * s for s in row.stall_s]
            gap_ms = f"{1e3 * statistics.median(row.gap_s):.0f}"
            rows.append(
                [mode, str(context), gap_ms,
                 f"{size / 1e6:.1f}", f"{1e3 * statistics.median(row.copy_s):.0f}", f"{rate / 1e6:.0f}",
                 f"{statistics.median(stalls):.0f}", f"{max(stalls):.0f}"]
            )  # fmt: skip
    print(table(["mode", "context", "gap ms", "MB", "copy ms", "MB/s", "stall ms, median", "stall ms, longest"], rows))
    undisturbed, copying = measure_others(mover, max(contexts))
    for name, itl_s in (("undisturbed", undisturbed), ("during copies", copying)):
        print(
            f"ITL of 4 others, {name}: median {1e3 * statistics.median(itl_s):.1f} ms, p99 {1e3 * percentile(itl_s, 99):.1f} ms"
        )
    print(load_average())


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="bench.moves.groups", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", help="model folder")
    parser.add_argument("--contexts", type=int, nargs="+", default=[500, 4000], help="prompt tokens of the moved streams")
    parser.add_argument("--count", type=int, default=5, help="moves per row")
    parser.add_argument("--forced", type=int, help="make this many moves at random indexes and compare tokens")
    parser.add_argument("--seed", type=int, default=0)
    options, flags = parser.parse_known_args()
    with two_groups(options.model, flags) as mover:
        if options.forced is None:
            print_report(mover, options.contexts, options.count)
            return
        started = time.perf_counter()
        result = force_moves(mover, options.forced, options.seed)
        duration_s = time.perf_counter() - started
        print(f"{result.moves} moves of {result.streams} streams in {duration_s:.0f} s, {result.num_bytes / 1e6:.0f} MB of pages")
        print(f"failed moves by code: {dict(result.failed)}; streams with other tokens: {result.different}")
        print(load_average())
        if result.different:
            sys.exit(1)


if __name__ == "__main__":
    main()
