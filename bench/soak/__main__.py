"""Runs a service for hours under load and random faults, and reports what grows.

    python -m bench.soak --folder FOLDER --minutes 360 [--seed N] [--groups 3] [--clients 6] [--fault-every 20]
    python -m bench.soak --folder FOLDER --report
    python -m bench.soak --folder FOLDER --trace FILE                         conversations of a trace (bench.soak.traced)
    python3 -m tests.cluster run python -m bench.soak --folder FOLDER --minutes 60 --target cluster
    python -m bench.soak --folder FOLDER --minutes 6000 --target fleet        virtual minutes (bench.soak.virtual)

Two routers and real groups with a tiny random model run as processes, the last group with two ranks, all with host memory and
disk for pages. Clients hold conversations; every text is compared with that of an undisturbed engine. The folder has the record,
which is the checkpoint: a second start with the same folder resumes after an interruption, with the settings of the first.

Writes report.md, report.json and plot.svg into the folder. Exits with 1 if a stream was lost, a text changed, something was
held without requests, or memory, descriptors, threads or exported series of a process grow distinguishably after its warm-up.
"""

import argparse
import asyncio
import os
import resource
import secrets
import sys
import time
from collections.abc import Sequence
from itertools import islice
from pathlib import Path

from bench import totals
from bench.router.replay import read_trace
from bench.soak.engines import Engines
from bench.soak.piece import Target, run_piece
from bench.soak.record import Run, Settings, read
from bench.soak.report import WARM_UP_S, Trend, new_failures, new_slopes, trends_of, write_report
from bench.soak.traced import joined


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.soak", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--folder", type=Path, required=True, help="record, logs and report; resumes what it has")
    parser.add_argument("--target", choices=("engines", "cluster", "fleet"), default="engines")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="of this piece; of a fleet in virtual time, and then to the end of a round"
    )
    parser.add_argument("--seed", type=int, default=None)
    parser.add_argument("--groups", type=int, default=3)
    parser.add_argument("--clients", type=int, default=6)
    parser.add_argument("--fault-every", type=float, default=20.0, help="seconds from a recovery to the next fault")
    parser.add_argument("--trace", type=_trace, metavar="FILE", help="JSON lines with hash_ids (Mooncake's format)")
    parser.add_argument("--warm-up", type=float, default=WARM_UP_S, help="seconds of a process that do not count")
    parser.add_argument("--report", action="store_true", help="report only")
    args = parser.parse_args(argv)
    if args.trace and args.target == "fleet":
        parser.error("--trace is for engines and cluster: a fleet in virtual time draws its requests")
    args.folder.mkdir(parents=True, exist_ok=True)
    former = read(args.folder)
    if not args.report:
        os.environ["PYTHONPATH"] = os.pathsep.join(sys.path)
        seed = secrets.randbelow(1_000_000) if args.seed is None else args.seed
        new = Settings(args.target, seed, args.groups, args.clients, args.fault_every, trace=args.trace or "")
        settings = former.settings if former else new
        print(f"seed {settings.seed}, from {former.seconds if former else 0:.0f} s", file=sys.stderr, flush=True)
        started = time.monotonic()
        try:
            _run(args.folder, settings, former, 60 * args.minutes)
        finally:  # also of an interrupted one
            wall_s = time.monotonic() - started
            _record(former or Run(settings), read(args.folder) or Run(settings), wall_s, args.warm_up)
    run = read(args.folder)
    if run is None:
        parser.error(f"{args.folder} has no record")
    trends = trends_of(run, args.warm_up)
    if not args.report:
        _record_slopes(former or Run(run.settings), trends, args.warm_up)
    return write_report(args.folder, run, trends, args.warm_up)


def _trace(text: str) -> str:
    """Returns the absolute path of a trace. Raises ArgumentTypeError unless its first request has blocks."""
    path = Path(text).resolve()
    try:
        joined(islice(read_trace(path), 1))
    except (OSError, ValueError) as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    return str(path)


def _run(folder: Path, settings: Settings, former: Run | None, seconds: float) -> None:
    if settings.target == "fleet":
        from bench.soak.virtual import run_fleet  # imports the operator

        run_fleet(folder, settings, former, seconds)
    else:
        asyncio.run(run_piece(folder, open_target(folder, settings), settings, former, seconds))


def _record(former: Run, run: Run, wall_s: float, warm_up_s: float) -> None:
    """Adds the piece that has ended to the totals of all runs, with the failures for which the exit status is 1.

    Slopes take minutes after a long run, and follow when they are known.
    """
    own, ended = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    counts: dict[str, float] = {
        "virtual hours" if run.settings.target == "fleet" else "wall hours": (run.seconds - former.seconds) / 3600,
        "faults": len(run.strikes) - len(former.strikes),
    }
    counts |= {f"streams {name}": count - former.streams.get(name, 0) for name, count in run.streams.items()}
    wrong, failures = new_failures(former, run, warm_up_s)
    totals.record(
        f"soak {run.settings.target}",
        counts | wrong,
        wall_s=wall_s,
        cpu_s=own.ru_utime + own.ru_stime + ended.ru_utime + ended.ru_stime,
        failures=failures,
        seed=run.settings.seed,
        replays=_replays(run.settings, failures),
    )


def _record_slopes(former: Run, trends: Sequence[Trend], warm_up_s: float) -> None:
    """Adds the slopes that grow since the piece that has ended."""
    growing = new_slopes(former, trends, warm_up_s)
    totals.record(
        f"soak {former.settings.target}",
        {"growing slopes": growing},
        wall_s=0.0,
        cpu_s=0.0,
        failures=growing,
        seed=former.settings.seed,
        replays=_replays(former.settings, growing),
    )


def _replays(settings: Settings, failures: int) -> list[str]:
    """Returns the flags of a run with the same requests and faults, if it had a failure."""
    fleet = f"--target {settings.target} --seed {settings.seed} --groups {settings.groups}"
    trace = f" --trace {Path(settings.trace).name}" if settings.trace else ""
    return [f"{fleet} --clients {settings.clients} --fault-every {settings.fault_every_s:g}{trace}"] if failures else []


def open_target(folder: Path, settings: Settings) -> Target:
    """Returns what the settings name."""
    if settings.target == "engines":
        return Engines(folder, settings)
    from bench.soak.cluster import InCluster  # imports torch, which takes seconds

    return InCluster(folder, settings)


if __name__ == "__main__":
    sys.exit(main())
