"""Totals of searches, fuzzing and soaks over many runs and machines: `python -m bench.totals`.

    python -m bench.totals                  the sum of each kind, its aim, and the hours of processor time that remain
    python -m bench.totals --by-commit      a line for each commit
    python -m bench.totals --add FILE       adds the lines of another machine's file

Each of these commands appends a line per batch to `totals.jsonl` in the cache folder, so that an interrupted run counts too.
PHALANX_TOTALS names another file; empty, nothing is recorded, as for programs with a planted fault.
"""

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import msgspec

from tools.cache import cache_root

ROOT = Path(__file__).parents[1]
AIMS: Mapping[str, tuple[str, float]] = {
    "operator search": ("worlds", 100_000),
    "fleet search": ("virtual hours", 10_000),
    "fuzz requests": ("cases", 1_000_000),
    "fuzz sockets": ("cases", 10_000),
    "soak engines": ("wall hours", 6),
}
FILE_AIM = ("cases", 100_000.0)
"""Of each kind of files."""


class Batch(msgspec.Struct, frozen=True):
    """What one batch did. `counts`: by what is counted; `failures`: counterexamples, violations, wrong answers."""

    kind: str
    commit: str
    """With `+` if the checkout differed from it."""
    unix_s: float
    wall_s: float
    cpu_s: float
    counts: dict[str, float]
    failures: int = 0


@dataclass(slots=True)
class Total:
    """The sum of batches."""

    wall_s: float = 0.0
    cpu_s: float = 0.0
    failures: int = 0
    counts: dict[str, float] = field(default_factory=dict)

    def add(self, batch: Batch) -> None:
        """Adds one batch."""
        self.wall_s += batch.wall_s
        self.cpu_s += batch.cpu_s
        self.failures += batch.failures
        for name, count in batch.counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + count


def aim_of(kind: str) -> tuple[str, float] | None:
    """Returns what is counted of a kind, and how much is wanted."""
    if kind.startswith("fuzz ") and kind not in AIMS:
        return FILE_AIM
    return AIMS.get(kind)


def totals_file() -> Path | None:
    """Returns where batches are recorded; None if nowhere."""
    named = os.environ.get("PHALANX_TOTALS")
    if named is not None:
        return Path(named) if named else None
    return cache_root() / "totals.jsonl"


def record(kind: str, counts: Mapping[str, float], *, wall_s: float, cpu_s: float, failures: int = 0) -> None:
    """Appends a batch: one write, so that concurrent runs keep whole lines."""
    path = totals_file()
    if path is None:
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    batch = Batch(kind, _commit(), time.time(), wall_s, cpu_s, dict(counts), failures)
    with path.open("ab", buffering=0) as file:
        file.write(msgspec.json.encode(batch) + b"\n")


@cache
def _commit() -> str:
    words = ["git", "-C", str(ROOT)]
    found = subprocess.run([*words, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*words, "status", "--porcelain"], capture_output=True, text=True)
    return f"{found.stdout.strip() or 'unknown'}{'+' if changed.stdout.strip() else ''}"


def read(path: Path) -> list[Batch]:
    """Returns the batches of a file; none without it. A line that an interruption has cut is left out."""
    lines = path.read_bytes().splitlines() if path.exists() else []
    found = []
    for line in lines:
        try:
            found.append(msgspec.json.decode(line, type=Batch))
        except msgspec.MsgspecError:
            continue
    return found


def sums(batches: Iterable[Batch], *, by_commit: bool = False) -> dict[tuple[str, str], Total]:
    """Returns the sums by kind and commit; the commit is empty unless wanted."""
    found: dict[tuple[str, str], Total] = {}
    for batch in batches:
        found.setdefault((batch.kind, batch.commit if by_commit else ""), Total()).add(batch)
    return dict(sorted(found.items()))


def table(totals: Mapping[tuple[str, str], Total]) -> str:
    """Returns a table in Markdown. The last column: hours of processor time to the aim at the rate so far."""
    lines = ["| kind | commit | counts | failures | CPU hours | aim | CPU hours to it |", "|---|---|---|---|---|---|---|"]
    for (kind, commit), total in totals.items():
        counts = ", ".join(
            f"{count:,.1f} {name}" if count % 1 else f"{count:,.0f} {name}" for name, count in total.counts.items()
        )
        aim, left = aim_of(kind), ""
        if aim is not None and (done := total.counts.get(aim[0], 0.0)):
            left = f"{max(0.0, aim[1] - done) / done * total.cpu_s / 3600:.1f}"
        wanted = "" if aim is None else f"{aim[1]:,.0f} {aim[0]}"
        lines.append(f"| {kind} | {commit} | {counts} | {total.failures} | {total.cpu_s / 3600:.2f} | {wanted} | {left} |")
    return "\n".join(lines)


def merge(path: Path, other: Path) -> int:
    """Adds the batches of another file that this one lacks. Returns their number."""
    known = set(map(msgspec.json.encode, read(path)))
    new = [line for line in map(msgspec.json.encode, read(other)) if line not in known]
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(b"".join(line + b"\n" for line in new))
    return len(new)


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the totals."""
    parser = argparse.ArgumentParser(prog="python -m bench.totals", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--by-commit", action="store_true")
    parser.add_argument("--add", type=Path, default=None, metavar="FILE")
    options = parser.parse_args(arguments)
    path = totals_file()
    if path is None:
        parser.error("PHALANX_TOTALS is empty")
    if options.add is not None:
        print(f"{merge(path, options.add)} batches added")
    print(table(sums(read(path), by_commit=options.by_commit)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
