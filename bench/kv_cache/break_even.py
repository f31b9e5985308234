"""Copy rates and times of host memory as measured, and prompts for which loading takes less time than computing.

The decision is the engine's (`core.kv.host_tier.pays_to_load`); here its inputs are swept.
"""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from random import Random

import torch

from bench.frame.figures import percentile
from phalanx_api.cost import StepModel
from phalanx_runtime.core.copy_fit import CopyFit, CopyTimes
from phalanx_runtime.core.kv.host_loads import pays_to_load
from phalanx_runtime.model.protocol import KvLayout
from phalanx_runtime.rank.memory.kv_cache import make_caches, page_bytes
from phalanx_runtime.rank.tiers.host_pages import HostPages

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
