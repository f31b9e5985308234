"""Copy rates and times of host memory as measured, and prompts for which loading takes less time than computing.

    python -m bench.kv_cache.break_even [--cost FILE]

Prints the times of loads as an engine fits them, the break-even length that follows with the step times of `--cost`, and what
checksums of the loaded pages would add to a load. The decision is the engine's (`core.kv.host_loads.pays_to_load`); here its
inputs are swept.
"""

import argparse
import hashlib
import sys
import time
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from random import Random

import numpy as np
import torch

from bench.engine.step_grid import read_model
from bench.frame.figures import Interval, markdown_header, markdown_row, mean_ratio, percentile
from phalanx_api.cost import StepModel
from phalanx_runtime.core.copy_fit import CopyFit, CopyTimes
from phalanx_runtime.core.kv.host_loads import pays_to_load
from phalanx_runtime.model.protocol import KvLayout
from phalanx_runtime.rank.memory.kv_cache import make_caches, page_bytes
from phalanx_runtime.rank.tiers.host_pages import HostPages

COST = Path(__file__).parents[1] / "simulate" / "costs" / "smollm2-135m-bf16.json"
"""Step times of SmolLM2-135M in bf16 on one thread."""
PAGE = 16
SMOLLM2 = KvLayout(kv_heads=3, head_dims=(64,) * 30, windows=(None,) * 30)
"""KV heads and head dimensions of SmolLM2-135M."""
PAGE_COUNTS = (1, 64, 1024)
LOAD_PAGES = (1, 4, 16, 64, 256)
"""Pages of the loads whose times are fitted."""
MAX_RATE = 1e12
"""Bytes/s; no memory is faster."""
LONGEST = 1 << 17
"""Tokens up to which a break-even is looked for."""


@dataclass(frozen=True, slots=True)
class CopyRate:
    """Median bytes/s of CPU time in each direction; the quartiles of loads, and their median in wall time."""

    page_bytes: int
    load: float
    store: float
    load_low: float
    load_high: float
    load_wall: float


def measure_copies(num_pages: int = 512, batch: int = 32, rounds: int = 9, seed: int = 0) -> CopyRate:
    """Measures `HostPages` with random pages of SmolLM2-135M's shape in bf16, `batch` per plan, stores and loads in turn."""
    host, rng, size = _stored(num_pages), Random(seed), page_bytes(SMOLLM2, PAGE, torch.bfloat16)
    rates: dict[bool, list[tuple[float, float]]] = {False: [], True: []}
    for _ in range(rounds * num_pages // batch):
        for is_load in (False, True):
            pages, slots = (rng.sample(range(num_pages), batch) for _ in range(2))
            wall, cpu = time.perf_counter(), time.process_time()
            host.start([(is_load, page, slot) for page, slot in zip(pages, slots, strict=True)], must_wait=True)
            took_s = time.process_time() - cpu, time.perf_counter() - wall
            rates[is_load].append((batch * size / took_s[0], batch * size / took_s[1]))
    loads, walls = ([pair[i] for pair in rates[True]] for i in (0, 1))
    low, middle, high = (percentile(loads, percent) for percent in (25, 50, 75))
    store = percentile([cpu for cpu, _ in rates[False]], 50)
    return CopyRate(size, middle, store, low, high, percentile(walls, 50))


def fit_loads(num_pages: int = 512, rounds: int = 9, seed: int = 0) -> CopyTimes:
    """Returns the times of loads of `LOAD_PAGES` random pages as the engine fits them, here of CPU time."""
    host, rng, fit = _stored(num_pages), Random(seed), CopyFit()
    for _ in range(rounds):
        for count in LOAD_PAGES:
            pages, slots = (rng.sample(range(num_pages), count) for _ in range(2))
            cpu = time.process_time()
            host.start([(True, page, slot) for page, slot in zip(pages, slots, strict=True)], must_wait=True)
            fit = fit.after(count, time.process_time() - cpu)
    times = fit.times()
    assert times is not None, "loads take time"
    return times


def _stored(num_pages: int) -> HostPages:
    """Returns host memory with `num_pages` stored pages: it is allocated at first use."""
    caches = make_caches(SMOLLM2, num_pages, PAGE, torch.bfloat16, torch.device("cpu"))
    for cache in caches:
        for tensor in cache.tensors:
            tensor.fill_(1)
    host = HostPages(caches, num_pages)
    host.start([(False, page, page) for page in range(num_pages)], must_wait=True)
    return host


def least_rate(model: StepModel, page_bytes: int, num_pages: int, start: int = 0) -> float:
    """Returns the bytes/s from which loading `num_pages` pages after `start` tokens pays."""
    low, high = 1.0, 1e15
    while high / low > 1.0001:
        rate = (low * high) ** 0.5
        pays = pays_to_load(num_pages * PAGE, start, model, num_pages * page_bytes / rate)
        low, high = (low, rate) if pays else (rate, high)
    return high


def break_even(model: StepModel, times: CopyTimes) -> int | None:
    """Returns the tokens from which on loading a prefix always pays; none if it never does up to `LONGEST`."""
    num_pages = LONGEST // PAGE
    lengths = range(num_pages, 0, -1)
    losing = (n for n in lengths if not pays_to_load(n * PAGE, 0, model, times.predict(n)))
    last = next(losing, 0)
    return None if last == num_pages else (last + 1) * PAGE


def break_even_rows(engines: Sequence[tuple[str, StepModel, int]], rates: Sequence[float]) -> list[list[str]]:
    """Returns a row for each (name, step times, bytes of a page): least GB/s of `PAGE_COUNTS`, break-even at each rate."""
    rows = []
    for name, model, size in engines:
        least = [least_rate(model, size, num_pages) for num_pages in PAGE_COUNTS]
        tokens = [break_even(model, CopyTimes(0.0, size / rate)) for rate in rates]
        ends = ["never" if n is None else f"{n:,}" for n in tokens]
        rows.append([name, f"{size:,}", *("none" if rate > MAX_RATE else f"{rate / 1e9:.2g}" for rate in least), *ends])
    return rows


def _sum_words(parts: Sequence[memoryview]) -> object:
    """Reads a page once, in one piece if it is one: less work than any checksum."""
    return [np.frombuffer(part, dtype=np.uint64).sum() for part in parts]


def _digest(parts: Sequence[memoryview]) -> object:
    hasher = hashlib.sha256()
    for part in parts:
        hasher.update(part)
    return hasher.digest()


def _chained(checksum: Callable[[memoryview, int], int], parts: Sequence[memoryview]) -> object:
    value = 0
    for part in parts:
        value = checksum(part, value)
    return value


CHECKS: dict[str, Callable[[Sequence[memoryview]], object]] = {
    "SHA-256, as on disk": _digest,
    "CRC-32, as between ranks": lambda parts: _chained(zlib.crc32, parts),
    "Adler-32": lambda parts: _chained(zlib.adler32, parts),
    "sum of 64-bit words": _sum_words,
}


def measure_checks(num_pages: int = 256, pairs: int = 9, batch: int = 16, seed: int = 0) -> dict[str, tuple[float, Interval]]:
    """Returns us per page, and the CPU time over that of the load, of each of `CHECKS` and of the sum of a page in one piece.

    Each checks the slots of a load of `batch` pages right after it.
    """
    host, rng = _stored(num_pages), Random(seed)
    whole = [memoryview(b"".join(host.read(slot))) for slot in range(batch)]
    times: dict[str, tuple[list[float], list[float]]] = {name: ([], []) for name in (*CHECKS, "the same, page in one piece")}
    for _ in range(pairs):
        for name, (checks, loads) in times.items():
            pages, slots = (rng.sample(range(num_pages), batch) for _ in range(2))
            started = time.process_time()
            host.start([(True, page, slot) for page, slot in zip(pages, slots, strict=True)], must_wait=True)
            loads.append(time.process_time() - started)
            check = CHECKS.get(name, _sum_words)
            checked = [host.read(slot) for slot in slots] if name in CHECKS else [[page] for page in whole]
            started = time.process_time()
            for parts in checked:
                check(parts)
            checks.append(time.process_time() - started)
    return {name: (1e6 * percentile(ours, 50) / batch, mean_ratio(ours, loads)) for name, (ours, loads) in times.items()}


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the fitted times, the break-even length and the table of checks."""
    flags = argparse.ArgumentParser("python -m bench.kv_cache.break_even", description="Fit the times of loads.")
    flags.add_argument("--cost", type=Path, default=COST, metavar="FILE", help="of bench.engine.step_fit")
    times = fit_loads()
    tokens = break_even(read_model(flags.parse_args(arguments).cost), times)
    length = "no length" if tokens is None else f"{tokens:,} tokens"
    print(f"Loads take {1e6 * times.fixed_s:.0f} us and {1e6 * times.page_s:.0f} us per page; they pay from {length} on.\n")
    print(markdown_header(["checksum of the loaded pages", "us per page", "of the load", "95 % interval"]))
    for name, (page_us, share) in measure_checks().items():
        print(markdown_row([name, f"{page_us:.0f}", f"{share.middle:.0%}", f"{share.low:.0%} to {share.high:.0%}"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
