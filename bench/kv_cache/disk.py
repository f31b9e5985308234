"""Times the log of the disk tier beside plain files, and counts what compaction keeps.

    python -m bench.kv_cache.disk [--folder FOLDER] [--page-bytes 368640] [--pages 512] [--pairs 7] [--json FILE]

Prints, with 95 % intervals of pairs in turn:

    rates        write and read of a page, against one call of `os.pwritev` or `os.preadv` on a plain file without checksum;
                 cold reads are in random order from the disk, warm ones from the page cache
    checksum     SHA-256 of a page beside BLAKE2b and CRC-32
    opening      time per page to rebuild the index, by eviction policy, beside reading and verifying all pages
    compaction   hits in a trace with Zipf's popularity, against a cache of the same bytes without segments; pages dropped
                 with their segment per page put, and bytes that compaction wrote per byte put

Times are CPU times of the thread; those of cold reads are elapsed times. Use a folder on the disk of interest: the default is
the folder for temporary files.
"""

import argparse
import hashlib
import json
import os
import random
import tempfile
import time
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import accumulate
from pathlib import Path

from bench.frame.figures import Interval, mean_ratio, percentile
from phalanx_api.engine_config import EVICTION_POLICIES, EvictionPolicy
from phalanx_runtime.core.kv.eviction.adaptive import make_eviction
from phalanx_runtime.rank.tiers.page_log import PageLog
from phalanx_runtime.rank.tiers.segment import KEY_BYTES, page_checksum

PARTS = 60
"""Keys and values of 30 layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rate:
    """A comparison. `ours`, `theirs`: medians in MB/s. `ratio`: over 1 if ours is faster."""

    name: str
    ours: float
    theirs: float
    ratio: Interval


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """What a log of a policy and a write budget kept of a trace."""

    policy: EvictionPolicy
    budget: float
    """Bytes that compaction may write per byte that is put."""
    hit_ratio: float
    """Against a cache without segments."""
    displaced: float
    """Pages dropped with their segment, per page put."""
    compacted: float
    """Bytes written by compaction per byte put."""


def keys_of(count: int) -> list[bytes]:
    """Returns different keys."""
    return [hashlib.sha256(b"%d" % number).digest()[:KEY_BYTES] for number in range(count)]


def parts_of(page: bytes) -> list[memoryview]:
    """Returns a page in `PARTS` parts, as layers store it."""
    size = -(-len(page) // PARTS)
    return [memoryview(page)[start : start + size] for start in range(0, len(page), size)]


@contextmanager
def seconds(into: list[float], clock: Callable[[], float] = time.thread_time) -> Iterator[None]:
    """Appends the seconds of the block."""
    start = clock()
    yield
    into.append(clock() - start)


def make_cold(folder: Path) -> None:
    """Writes all files below to the disk and drops them from the page cache."""
    for path in folder.rglob("*"):
        if path.is_file():
            file = os.open(path, os.O_RDONLY)
            os.fsync(file)
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(file)


def measure_rates(folder: Path, page_bytes: int, count: int, pairs: int) -> list[Rate]:
    """Writes and reads `count` pages by log and by plain file, in turn."""
    pages = [parts_of(os.urandom(page_bytes)) for _ in range(8)]
    keys, into = keys_of(count), memoryview(bytearray(page_bytes))
    order = random.Random(1).sample(range(count), count)
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in ("write", "read, warm", "read, cold")}
    for turn in range(pairs):
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            log = PageLog(Path(scratch), max_bytes=4 * count * (page_bytes + 4096), page_bytes=page_bytes, identity=b"bench")
            plain = os.open(Path(scratch) / "plain", os.O_RDWR | os.O_CREAT)

            def write_log(log: PageLog = log) -> None:
                for number in range(count):
                    assert log.put(keys[number], pages[number % 8]) == []

            def write_plain(plain: int = plain) -> None:
                for number in range(count):
                    os.pwritev(plain, pages[number % 8], number * page_bytes)

            def read_log(log: PageLog = log) -> None:
                assert all(log.get(keys[number], into) for number in order)

            def read_plain(plain: int = plain) -> None:
                for number in order:
                    os.preadv(plain, [into], number * page_bytes)

            works = {
                "write": (write_log, write_plain),
                "read, warm": (read_log, read_plain),
                "read, cold": (read_log, read_plain),
            }
            for name, work in works.items():
                for which in ((0, 1), (1, 0))[turn % 2]:
                    is_cold = name == "read, cold"
                    if is_cold:
                        make_cold(Path(scratch))
                    with seconds(times[name][which], time.perf_counter if is_cold else time.thread_time):
                        work[which]()
            log.close()
            os.close(plain)
    return [_rate(name, *both, count * page_bytes) for name, both in times.items()]


def measure_checksums(page_bytes: int, pairs: int, repeat: int = 20) -> list[Rate]:
    """Times the checksum of a page beside others, in turn."""
    page = os.urandom(page_bytes)
    view, key = memoryview(page), bytes(KEY_BYTES)
    others: dict[str, Callable[[], object]] = {
        "BLAKE2b": lambda: hashlib.blake2b(page, digest_size=16).digest(),
        "CRC-32": lambda: zlib.crc32(page),
    }
    rates = []
    for name, other in others.items():
        times: tuple[list[float], list[float]] = ([], [])
        works: list[Callable[[], object]] = [lambda: page_checksum(key, key, [view]), other]
        for turn in range(pairs):
            for which in ((0, 1), (1, 0))[turn % 2]:
                with seconds(times[which]):
                    for _ in range(repeat):
                        works[which]()
        rates.append(_rate(f"checksum against {name}", *times, repeat * page_bytes))
    return rates


def measure_opening(folder: Path, counts: Sequence[int], page_bytes: int = 4096) -> Iterator[tuple[int, str, float, float]]:
    """Yields pages, policy, microseconds per page to open a cold log, and to read and verify all its pages after that."""
    into, page = memoryview(bytearray(page_bytes)), parts_of(os.urandom(page_bytes))
    for count in counts:
        with tempfile.TemporaryDirectory(dir=folder) as scratch:
            for policy in ("lru", *EVICTION_POLICIES):
                start = time.thread_time()
                log = PageLog(
                    Path(scratch), max_bytes=2 * count * page_bytes, page_bytes=page_bytes, identity=b"bench", eviction=policy
                )
                opened = time.thread_time()
                if not log.keys():
                    for key in keys_of(count):
                        log.put(key, page)
                else:
                    assert all(log.get(key, into) for key in log.keys())
                    yield count, policy, 1e6 * (opened - start) / count, 1e6 * (time.thread_time() - opened) / count
                log.close()
                make_cold(Path(scratch))


def zipf_trace(keys: Sequence[bytes], length: int, exponent: float = 0.9) -> list[bytes]:
    """Returns keys with Zipf's popularity."""
    weights = list(accumulate((rank + 1) ** -exponent for rank in range(len(keys))))
    return random.Random(7).choices(keys, cum_weights=weights, k=length)


def measure_compaction(folder: Path, policy: EvictionPolicy, budget: float, segments: int = 64) -> Kept:
    """Runs a trace. `budget`: bytes that compaction may write per byte put, in calls between accesses."""
    page_bytes, slots = 4096, 16
    max_bytes = segments * (page_bytes + slots * (page_bytes + 40))
    page, into = parts_of(os.urandom(page_bytes)), memoryview(bytearray(page_bytes))
    trace = zipf_trace(keys_of(8 * segments * slots), 20 * segments * slots)
    with tempfile.TemporaryDirectory(dir=folder) as scratch:
        log = PageLog(
            Path(scratch),
            max_bytes=max_bytes,
            page_bytes=page_bytes,
            identity=b"bench",
            eviction=policy,
            segment_bytes=max_bytes // segments,
            write_budget=budget * page_bytes,
        )
        for key in trace:
            if not log.get(key, into):
                log.put(key, page)
                log.compact(float(log.counters.writes))
        counters = log.counters
        log.close()
    return Kept(
        policy=policy,
        budget=budget,
        hit_ratio=counters.hits / _hits_without_segments(policy, max_bytes // page_bytes, trace),
        displaced=counters.displaced / counters.writes,
        compacted=counters.compacted_bytes / (counters.writes * page_bytes),
    )


def _hits_without_segments(policy: EvictionPolicy, capacity: int, trace: Sequence[bytes]) -> int:
    """Returns the hits of a cache of the same policy that can use every byte and drops page by page."""
    idle = bytearray(capacity)
    eviction, found, held = make_eviction(policy, capacity, idle), dict[bytes, int](), [b""] * capacity
    hits, free = 0, list(range(capacity))
    for time_of_use, key in enumerate(trace):
        page = found.get(key)
        if page is not None:
            hits += 1
            idle[page] = 0
            eviction.on_hit(page)
        else:
            if not free:
                free.append(victim := eviction.victim())
                idle[victim] = 0
                del found[held[victim]]
                eviction.on_remove(victim)
            page = found[key] = free.pop()
            held[page] = key
            eviction.on_insert(page, int.from_bytes(key[:8], "little"))
        eviction.on_release(page, time_of_use)
        idle[page] = 1
        eviction.on_idle(page)
    return hits


def _rate(name: str, ours: list[float], theirs: list[float], num_bytes: int) -> Rate:
    medians = [num_bytes / percentile(times, 50) / 1e6 for times in (ours, theirs)]
    return Rate(name=name, ours=medians[0], theirs=medians[1], ratio=mean_ratio(theirs, ours))


def rate_table(rates: Sequence[Rate]) -> str:
    """Returns a table in Markdown."""
    lines = ["| work | log, MB/s | plain, MB/s | speed against plain | interval |", "|---|---|---|---|---|"]
    for rate in rates:
        ratio = rate.ratio
        figures = f"{rate.ours:.0f} | {rate.theirs:.0f} | {ratio.middle:.2f} | {ratio.low:.2f} to {ratio.high:.2f}"
        lines.append(f"| {rate.name} | {figures} |")
    return "\n".join(lines)


def kept_table(found: Sequence[Kept]) -> str:
    """Returns a table in Markdown."""
    lines = [
        "| policy | budget | hits against no segments | dropped with a segment | bytes copied per byte put |",
        "|---|---|---|---|---|",
    ]
    lines += [f"| {k.policy} | {k.budget:g} | {k.hit_ratio:.3f} | {k.displaced:.3f} | {k.compacted:.2f} |" for k in found]
    return "\n".join(lines)


def main() -> None:
    """Prints the tables."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()), help="on the disk to measure")
    parser.add_argument("--page-bytes", type=int, default=368640, help="16 tokens of SmolLM2-135M in bf16")
    parser.add_argument("--pages", type=int, default=512)
    parser.add_argument("--pairs", type=int, default=7)
    parser.add_argument("--open", default="10000,50000", help="numbers of pages to open")
    parser.add_argument("--budgets", default="0,0.5,1,4", help="bytes that compaction may write per byte put")
    parser.add_argument("--json", type=Path, help="file for the figures")
    args = parser.parse_args()
    rates = measure_rates(args.folder, args.page_bytes, args.pages, args.pairs) + measure_checksums(args.page_bytes, args.pairs)
    print(rate_table(rates), flush=True)
    print("\n| pages | policy | opening, us per page | reading all, us per page |\n|---|---|---|---|")
    for count, policy, opening, reading in measure_opening(args.folder, [int(count) for count in args.open.split(",")]):
        print(f"| {count} | {policy} | {opening:.2f} | {reading:.2f} |", flush=True)
    budgets = [float(budget) for budget in args.budgets.split(",")]
    kept = [measure_compaction(args.folder, policy, budget) for policy in EVICTION_POLICIES for budget in budgets]
    print("\n" + kept_table(kept))
    if args.json:
        args.json.write_text(json.dumps({"rates": [asdict(rate) for rate in rates], "kept": [asdict(k) for k in kept]}, indent=1))


if __name__ == "__main__":
    main()
