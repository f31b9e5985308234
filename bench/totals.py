"""Totals of searches, fuzzing and soaks over many runs and machines: `python -m bench.totals`.

    python -m bench.totals                  the sum of each kind, its aim, and the hours of processor time that remain
    python -m bench.totals --by-commit      a line for each commit
    python -m bench.totals --record         adds what the cache has to bench/totals.jsonl, to be committed
    python -m bench.totals --add FILE       adds the lines of another machine's cache to this one's

Each of these commands appends a line per batch to `totals.jsonl` in the cache folder, so that an interrupted run counts too.
PHALANX_TOTALS names another file; empty, nothing is recorded, as for programs with a planted fault.

The record outlives the cache. A cache has a random name, its source, in its first line, and only grows; a line of the record is
the sum of one kind, commit and source. Of two such lines the one with more batches contains the other, and counts alone.
So no batch counts twice, in whatever order caches and records of several machines are merged. A copy of a cache that grows on
another machine counts too little: its lines have the source of the original.
"""

import argparse
import os
import secrets
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from itertools import islice
from pathlib import Path
from typing import TypeVar

import msgspec

from tools.cache import cache_root

ROOT = Path(__file__).parents[1]
RECORD = ROOT / "bench" / "totals.jsonl"
AIMS: Mapping[str, tuple[str, float]] = {
    "operator search": ("worlds", 100_000),
    "fleet search": ("virtual hours", 10_000),
    "fuzz requests": ("cases", 1_000_000),
    "fuzz sockets": ("cases", 10_000),
    "soak": ("hours", 6),
}
FILE_AIM = ("cases", 100_000.0)
"""Of each kind of files."""
MAX_REPLAYS = 20
"""Failures of a line whose replays are kept."""
SOAK_HOURS = ("wall hours", "virtual hours")
"""What the hours of all soaks are the sum of: those of fleets are virtual."""


class Source(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The first line of a cache's file."""

    source: str


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
    source: str = ""
    """Of the cache that it ran with; empty: of the file."""
    seed: int | None = None
    """The first one; None if unknown."""
    replays: list[str] = []
    """Flags of the command that repeat the first failures, each with its seed."""
    peak_mib: int = 0
    """Resident memory of the largest process; 0 if not measured."""


class Seeds(msgspec.Struct, frozen=True, array_like=True):
    """Batches of one day whose seeds follow one another: those of one run, in most cases."""

    day: str
    first: int
    last: int
    batches: int
    cpu_s: float
    failures: int


class Recorded(msgspec.Struct, frozen=True, omit_defaults=True):
    """The sum of the batches of one kind, commit and source: a line of the record."""

    kind: str
    commit: str
    source: str
    day: str
    """Of the last batch."""
    batches: int
    counts: dict[str, float]
    failures: int = 0
    wall_s: float = 0.0
    cpu_s: float = 0.0
    """0 if unknown."""
    seed: int | None = None
    """The least of all batches."""
    replays: list[str] = []
    peak_mib: int = 0
    seeds: list[Seeds] = []
    """Of the batches whose seed is known; empty in lines of former versions."""


RecordKey = tuple[str, str, str]
"""Kind, commit and source."""
Records = Mapping[RecordKey, Recorded]


@dataclass(slots=True)
class Total:
    """The sum of batches."""

    batches: int = 0
    day: str = ""
    wall_s: float = 0.0
    cpu_s: float = 0.0
    failures: int = 0
    counts: dict[str, float] = field(default_factory=dict)
    timed: dict[str, float] = field(default_factory=dict)
    """Counts of those with a known processor time."""
    seed: int | None = None
    replays: list[str] = field(default_factory=list)
    peak_mib: int = 0

    def add(self, done: Batch | Recorded) -> None:
        """Adds one batch or recorded sum."""
        self.batches += 1 if isinstance(done, Batch) else done.batches
        self.day = max(self.day, _day(done.unix_s) if isinstance(done, Batch) else done.day)
        self.wall_s += done.wall_s
        self.cpu_s += done.cpu_s
        self.failures += done.failures
        self.seed = min((seed for seed in (self.seed, done.seed) if seed is not None), default=None)
        self.replays = [*self.replays, *done.replays][:MAX_REPLAYS]
        self.peak_mib = max(self.peak_mib, done.peak_mib)
        for name, count in done.counts.items():
            self.counts[name] = self.counts.get(name, 0.0) + count
            self.timed[name] = self.timed.get(name, 0.0) + (count if done.cpu_s else 0.0)


def _day(unix_s: float) -> str:
    return time.strftime("%Y-%m-%d", time.gmtime(unix_s))


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


def record(
    kind: str,
    counts: Mapping[str, float],
    *,
    wall_s: float,
    cpu_s: float,
    failures: int = 0,
    seed: int | None = None,
    replays: Iterable[str] = (),
    peak_mib: int = 0,
) -> None:
    """Appends a batch: one write, so that concurrent runs keep whole lines."""
    path = totals_file()
    if path is None:
        return
    batch = Batch(
        kind,
        _commit(),
        time.time(),
        wall_s,
        cpu_s,
        dict(counts),
        failures,
        source_of(path),
        seed=seed,
        replays=list(islice(replays, MAX_REPLAYS)),
        peak_mib=peak_mib,
    )
    _append(path, [batch])


def source_of(path: Path) -> str:
    """Returns the name of a cache's file, which gets one if it has none. Of two that are written at once the first counts."""
    if not (named := _decode(path, Source)):
        _append(path, [Source(secrets.token_hex(4))])
        named = _decode(path, Source)
    return named[0].source


def _append(path: Path, lines: Sequence[Batch | Source]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        file.write(b"".join(msgspec.json.encode(line) + b"\n" for line in lines))


@cache
def _commit() -> str:
    words = ["git", "-C", str(ROOT)]
    found = subprocess.run([*words, "rev-parse", "--short", "HEAD"], capture_output=True, text=True)
    changed = subprocess.run([*words, "status", "--porcelain"], capture_output=True, text=True)
    return f"{found.stdout.strip() or 'unknown'}{'+' if changed.stdout.strip() else ''}"


Line = TypeVar("Line", Source, Batch, Recorded)


def _decode(path: Path, kind: type[Line]) -> list[Line]:
    """Returns the lines of a kind. One that an interruption has cut is left out."""
    found = []
    for line in path.read_bytes().splitlines() if path.exists() else []:
        try:
            found.append(msgspec.json.decode(line, type=kind))
        except msgspec.MsgspecError:
            continue
    return found


def read(path: Path) -> list[Batch]:
    """Returns the batches of a cache's file with their sources; none without it."""
    batches = _decode(path, Batch)
    return batches if all(batch.source for batch in batches) else _with_source(batches, source_of(path))


def _with_source(batches: Sequence[Batch], source: str) -> list[Batch]:
    return [batch if batch.source else msgspec.structs.replace(batch, source=source) for batch in batches]


def read_record(path: Path = RECORD) -> Records:
    """Returns the committed sums by kind, commit and source."""
    return merged(_decode(path, Recorded))


def recorded(batches: Iterable[Batch]) -> list[Recorded]:
    """Returns the sums of batches by kind, commit and source."""
    found: dict[RecordKey, list[Batch]] = {}
    for batch in batches:
        found.setdefault((batch.kind, batch.commit, batch.source), []).append(batch)
    return [_line(key, own) for key, own in found.items()]


def _line(key: RecordKey, batches: Sequence[Batch]) -> Recorded:
    own = Total()
    for batch in batches:
        own.add(batch)
    return Recorded(
        *key,
        own.day,
        own.batches,
        {name: round(count, 4) for name, count in own.counts.items()},
        own.failures,
        wall_s=round(own.wall_s, 3),
        cpu_s=round(own.cpu_s, 3),
        seed=own.seed,
        replays=own.replays,
        peak_mib=own.peak_mib,
        seeds=_seeds(batches),
    )


def _seeds(batches: Iterable[Batch]) -> list[Seeds]:
    """Returns the seeds by day, with processor time and failures."""
    known = [
        Seeds(_day(batch.unix_s), batch.seed, batch.seed, 1, round(batch.cpu_s, 3), batch.failures)
        for batch in batches
        if batch.seed is not None
    ]
    found: list[Seeds] = []
    for new in sorted(known, key=lambda seeds: (seeds.day, seeds.first)):
        former = found[-1] if found else None
        if former is None or former.day != new.day or new.first > former.last + 1:
            found.append(new)
            continue
        cpu_s, failures = round(former.cpu_s + new.cpu_s, 3), former.failures + new.failures
        found[-1] = Seeds(new.day, former.first, new.last, former.batches + 1, cpu_s, failures)
    return found


def merged(lines: Iterable[Recorded]) -> Records:
    """Returns the lines by kind, commit and source, sorted; of two the one with more batches."""
    found: dict[RecordKey, Recorded] = {}
    for line in lines:
        key = (line.kind, line.commit, line.source)
        if key not in found or found[key].batches < line.batches:
            found[key] = line
    return dict(sorted(found.items()))


def write_record(batches: Iterable[Batch], path: Path = RECORD) -> int:
    """Merges the sums of a cache into the record. Returns the number of new and changed lines."""
    before = read_record(path)
    after = merged([*before.values(), *recorded(batches)])
    path.write_bytes(b"".join(msgspec.json.encode(line) + b"\n" for line in after.values()))
    return sum(before.get(key) != line for key, line in after.items())


def sums(lines: Iterable[Batch | Recorded], *, by_commit: bool = False) -> dict[tuple[str, str], Total]:
    """Returns the sums by kind and commit; the commit is empty unless wanted. `soak` is the sum of all targets."""
    found: dict[tuple[str, str], Total] = {}
    for line in lines:
        found.setdefault((line.kind, line.commit if by_commit else ""), Total()).add(line)
        if line.kind.startswith("soak ") and not by_commit:
            hours = sum(line.counts.get(name, 0.0) for name in SOAK_HOURS)
            found.setdefault(("soak", ""), Total()).add(msgspec.structs.replace(line, counts={"hours": hours}))
    return dict(sorted(found.items()))


def table(totals: Mapping[tuple[str, str], Total]) -> str:
    """Returns a table in Markdown, with the hours of processor time to the aim at the rate so far.

    The line of a commit has the flags that repeat its failures there. The last column: counts of lines without processor time,
    which have no seeds and failures either.
    """
    lines = ["| kind | commit | counts | failures | CPU hours | aim | CPU hours to it | without CPU time |", f"|{'---|' * 8}"]
    for (kind, commit), total in totals.items():
        shown = [f"{_shown(count)} {name}" for name, count in total.counts.items()]
        shown += [f"{_shown(total.peak_mib)} MiB in the largest process"] if total.peak_mib else []
        failed = ", ".join([str(total.failures), *(total.replays if commit else [])])
        aim, left, unknown = aim_of(kind), "", ""
        if aim is not None and (timed := total.timed.get(aim[0], 0.0)):
            left = f"{max(0.0, aim[1] - total.counts[aim[0]]) / timed * total.cpu_s / 3600:.1f}"
        if aim is not None and (untimed := total.counts.get(aim[0], 0.0) - total.timed.get(aim[0], 0.0)) > 0:
            unknown = f"{_shown(round(untimed, 4))} {aim[0]}"
        wanted = "" if aim is None else f"{aim[1]:,.0f} {aim[0]}"
        cells = [kind, commit, ", ".join(shown), failed, f"{total.cpu_s / 3600:.2f}", wanted, left, unknown]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _shown(count: float) -> str:
    digits = 0 if count % 1 == 0 else 1 if count >= 10 else 2
    return f"{count:,.{digits}f}"


def merge(path: Path, other: Path) -> int:
    """Adds the batches of another cache's file that this one lacks. Returns their number."""
    own, known = source_of(path), set(map(msgspec.json.encode, read(path)))
    named = _decode(other, Source)
    batches = _with_source(_decode(other, Batch), named[0].source if named else own)
    new = [batch for batch in batches if msgspec.json.encode(batch) not in known]
    _append(path, new)
    return len(new)


def main(arguments: Sequence[str] | None = None, record_path: Path = RECORD) -> int:
    """Prints the totals."""
    parser = argparse.ArgumentParser(prog="python -m bench.totals", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--by-commit", action="store_true")
    parser.add_argument("--record", action="store_true")
    parser.add_argument("--add", type=Path, default=None, metavar="FILE")
    options = parser.parse_args(arguments)
    path = totals_file()
    if path is None and (options.record or options.add):
        parser.error("PHALANX_TOTALS is empty")
    if path is not None and options.add is not None:
        print(f"{merge(path, options.add)} batches added")
    batches = read(path) if path is not None else []
    if options.record:
        print(f"{write_record(batches, record_path)} lines of {record_path.name} changed")
    lines = merged([*read_record(record_path).values(), *recorded(batches)])
    print(table(sums(lines.values(), by_commit=options.by_commit)))
    return 0


if __name__ == "__main__":
    sys.exit(main())
