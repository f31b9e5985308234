"""Compares the online miss-ratio curve of the prefix cache with an exact simulation, and measures what it costs.

    python -m bench.engine.miss_ratio --trace CONVERSATIONS.jsonl      lines with `hash_ids` and `timestamp` (Mooncake's format)
    python -m bench.engine.miss_ratio --synthetic zipf

The pool has `--share` of the trace's distinct pages. Errors are in points of hit rate, from the smallest to the largest reported
size: half to four times the pool; those of smaller sizes, from a page on, are printed too. A sample depends on the keys' hashes:
errors are the largest of `--draws` draws of all keys. Each prompt is looked
up and released, as the engine does. The curve of the tiers beneath gets what the pool lacks and evicts, over a host tier that has
all evicted pages. The CPU time of each curve is divided by that of the page pool for the same prompts, and
that of both by the duration of the trace; for the latter, blocks of 512 tokens are cut into 32 pages of 16. Exits with 1 unless
the errors are below 2 points, and both curves take at most 8 MiB and 1 % of a core.
"""

import argparse
import json
import sys
import time
import tracemalloc
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from itertools import takewhile
from pathlib import Path

from bench.engine.eviction import Prompts, make_trace, read_trace
from bench.frame.figures import table
from phalanx_api.cache_curve import SIZES
from phalanx_runtime.core.kv.host_tier import HostTier
from phalanx_runtime.core.kv.miss_ratio import MissRatioCurve
from phalanx_runtime.core.kv.page_pool import PagePool
from phalanx_runtime.core.kv.tier_hits import TierHits

MAX_ERROR = 0.02
MAX_BYTES = 8 << 20
MAX_CORE_SHARE = 0.01
PAGES_PER_BLOCK = 32
NEVER = 10**15
DENSE_PAGES = 1000
"""Up to this size every size is compared, beyond it a thousand sizes."""


def hits_by_depth(prompts: Prompts) -> list[int]:
    """Returns the number of lookups at each depth of the LRU stack, exactly: a Fenwick tree over the time of each last use."""
    num_uses = sum(map(len, prompts))
    tree, last, hits, clock = [0] * (num_uses + 1), dict[bytes, int](), [0] * (num_uses + 1), 0

    def add(position: int, change: int) -> None:
        while position <= num_uses:
            tree[position] += change
            position += position & -position

    for keys in prompts:
        for key in keys:
            if (position := last.get(key)) is not None:
                depth = len(last)
                while position:
                    depth -= tree[position]
                    position &= position - 1
                hits[depth] += 1
        for key in reversed(keys):
            clock += 1
            if key in last:
                add(last[key], -1)
            last[key] = clock
            add(clock, 1)
    return hits


def exact_hit_rates(prompts: Prompts) -> list[float]:
    """Returns the hit rate of an LRU cache of each size from 0 pages on."""
    rates, found, total = [], 0, sum(map(len, prompts))
    for hits in hits_by_depth(prompts):
        rates.append(found / total)
        found += hits
    return rates


class EvictedPages(HostTier):
    """Records the pages that a pool evicts, and counts them for no curve."""

    def __init__(self) -> None:
        super().__init__()
        self.evicted: list[bytes] = []

    def store(self, page: int, key: bytes) -> None:
        """See `HostTier`."""
        self.evicted.append(key)


@dataclass(frozen=True, slots=True)
class PoolRun:
    """What a pool of the device does for each prompt."""

    found: list[int]
    """Pages that it has."""
    evicted: Prompts
    cpu_s: float

    def in_host(self, prompts: Prompts) -> list[int]:
        """Returns for each prompt the pages after the found ones that a host tier has which keeps all evicted pages."""
        kept, counts = set[bytes](), []
        for keys, num_found, evicted in zip(prompts, self.found, self.evicted, strict=True):
            counts.append(sum(1 for _ in takewhile(kept.__contains__, keys[num_found:])))
            kept.update(evicted)
        return counts


def run_pool(prompts: Prompts, num_pages: int) -> PoolRun:
    """Looks up, computes and releases the pages of each prompt."""
    pool, tier, found, evicted = PagePool(num_pages, 1, "adaptive"), EvictedPages(), list[int](), Prompts()
    pool.host = tier
    started = time.process_time()
    for keys in prompts:
        pages = pool.match(keys)
        found.append(len(pages))
        pool.reuse(pages, len(keys))
        pages += pool.allocate(len(keys) - len(pages)) or []
        for i in range(found[-1], len(keys)):
            pool.publish(pages[i], keys[i], pages[i - 1] if i else None)
            pool.mark_written(pages[i], 1)
        pool.release(pages)
        evicted.append(tier.evicted)
        tier.evicted = []
    return PoolRun(found, evicted, time.process_time() - started)


def measure_curve(prompts: Prompts, found: Sequence[int], num_pages: int) -> tuple[MissRatioCurve, float]:
    """Returns the curve for a pool of `num_pages`, and its CPU seconds."""
    curve = MissRatioCurve(round(SIZES[-1] * num_pages), half_life=NEVER)
    started = time.process_time()
    for keys, num_found in zip(prompts, found, strict=True):
        curve.look_up(keys, num_found)
        curve.use(keys)
    return curve, time.process_time() - started


def measure_tiers(prompts: Prompts, run: PoolRun, num_pages: int) -> float:
    """Returns the CPU seconds of the curve of the tiers beneath a pool of `num_pages`."""
    hits, in_host = TierHits(num_pages, has_host=True, has_disk=False), run.in_host(prompts)
    started = time.process_time()
    for keys, num_found, num_host, evicted in zip(prompts, run.found, in_host, run.evicted, strict=True):
        hits.look_up(keys, num_found, num_host, 0)
        for key in evicted:
            hits.evict(key)
    return time.process_time() - started


def rate_at(exact: Sequence[float], num_pages: int) -> float:
    """Returns the exact hit rate at a size, which may exceed the trace's pages."""
    return exact[min(num_pages, len(exact) - 1)]


def largest_error(curve: MissRatioCurve, exact: Sequence[float], first: float, last: float) -> tuple[float, int]:
    """Returns the largest error between two numbers of pages, and its size."""
    sizes = range(max(1, int(first)), round(last) + 1)
    chosen = [*sizes[:DENSE_PAGES], *sizes[DENSE_PAGES :: max(1, len(sizes) // 1000)], sizes[-1]]
    rates = zip(curve.hit_rates(chosen), chosen, strict=True)
    return max((abs(rate - rate_at(exact, size)), size) for rate, size in rates)


def drawn(prompts: Prompts, draw: int) -> Prompts:
    """Returns the prompts with other keys."""
    keys = {
        key: blake2b(key, digest_size=16, salt=draw.to_bytes(4)).digest() for key in {key for keys in prompts for key in keys}
    }
    return [[keys[key] for key in prompt] for prompt in prompts]


@dataclass(frozen=True, slots=True)
class CurveErrors:
    """The largest error of the reported sizes, and of smaller ones, each with its size."""

    reported: tuple[float, int]
    below: tuple[float, int]


def largest_errors(prompts: Prompts, found: Sequence[int], num_pages: int, draws: int) -> CurveErrors:
    """Returns the largest errors of curves of as many draws of keys; the first draw has the trace's own keys."""
    exact, errors = exact_hit_rates(prompts), list[CurveErrors]()
    first, last = SIZES[0] * num_pages, SIZES[-1] * num_pages
    for draw in range(draws):
        curve, _ = measure_curve(drawn(prompts, draw) if draw else prompts, found, num_pages)
        errors.append(CurveErrors(largest_error(curve, exact, first, last), largest_error(curve, exact, 1, first)))
    return CurveErrors(max(each.reported for each in errors), max(each.below for each in errors))


def memory_bytes(prompts: Prompts, num_pages: int) -> int:
    """Returns the peak memory of both curves, keys included, if each gets all pages."""
    copies = [b"".join(keys) for keys in prompts]
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    curve, tiers = MissRatioCurve(round(SIZES[-1] * num_pages)), TierHits(num_pages, has_host=True, has_disk=False)
    for joined in copies:
        keys = [joined[i : i + 16] for i in range(0, len(joined), 16)]
        curve.look_up(keys, 0)
        tiers.look_up(keys, 0, len(keys), 0)
    peak = tracemalloc.get_traced_memory()[1] - before
    tracemalloc.stop()
    return peak


def cut_blocks(prompts: Prompts) -> Prompts:
    """Returns prompts in which each block is `PAGES_PER_BLOCK` pages."""
    pages: dict[bytes, list[bytes]] = {}
    for key in {key for keys in prompts for key in keys}:
        pages[key] = [blake2b(key, digest_size=16, salt=bytes([i])).digest() for i in range(PAGES_PER_BLOCK)]
    return [[page for key in keys for page in pages[key]] for keys in prompts]


def duration_s(path: Path) -> float:
    """Returns the time of the last request; timestamps are in milliseconds."""
    with path.open() as lines:
        return max(float(json.loads(line)["timestamp"]) for line in lines if line.strip()) / 1000


def parser() -> argparse.ArgumentParser:
    flags = argparse.ArgumentParser(
        "python -m bench.engine.miss_ratio", description="Check the miss-ratio curve of the prefix cache."
    )
    source = flags.add_mutually_exclusive_group(required=True)
    source.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines with hash_ids and timestamp")
    source.add_argument("--synthetic", choices=["zipf", "scan"], help="a generated trace")
    flags.add_argument("--share", type=float, default=0.1, help="pages of the pool, as a share of the trace's distinct pages")
    flags.add_argument("--draws", type=int, default=5, metavar="N", help="draws of the keys, the trace's own included")
    flags.add_argument("--output", type=Path, metavar="FILE", help="file for the figures as JSON")
    return flags


def core_s(prompts: Prompts, run: PoolRun, num_pages: int) -> float:
    """Returns the CPU seconds of both curves if each block is `PAGES_PER_BLOCK` pages."""
    pages, num_pages = cut_blocks(prompts), num_pages * PAGES_PER_BLOCK
    cut = PoolRun([PAGES_PER_BLOCK * count for count in run.found], cut_blocks(run.evicted), 0.0)
    return measure_curve(pages, cut.found, num_pages)[1] + measure_tiers(pages, cut, num_pages)


def figures(prompts: Prompts, num_pages: int, trace: Path | None, draws: int) -> tuple[dict[str, float], list[list[str]]]:
    """Returns the figures, and the rows of the table of sizes."""
    exact = exact_hit_rates(prompts)
    run = run_pool(prompts, num_pages)
    curve, cpu_s = measure_curve(prompts, run.found, num_pages)
    tiers_s, num_lookups = measure_tiers(prompts, run, num_pages), sum(map(len, prompts))
    errors = largest_errors(prompts, run.found, num_pages, draws)
    (error, at), (below, below_at) = errors.reported, errors.below
    result = {"error": error, "at_pages": at, "error_below": below, "below_at_pages": below_at}
    result |= {"rate": curve.rate, "bytes": memory_bytes(prompts, num_pages)}
    result |= {"share_of_pool": cpu_s / run.cpu_s, "us_per_lookup": cpu_s / num_lookups * 1e6}
    result |= {"tiers_share_of_pool": tiers_s / run.cpu_s, "tiers_us_per_lookup": tiers_s / num_lookups * 1e6}
    if trace is not None:
        result["core_share"] = core_s(prompts, run, num_pages) / duration_s(trace)
    sizes = [round(size * num_pages) for size in SIZES]
    rows: list[list[str]] = [[f"{n:,}", f"{rate_at(exact, n):.4f}", f"{curve.hit_rate(n):.4f}"] for n in sizes]
    return result, rows


def verdicts(result: dict[str, float]) -> dict[str, bool]:
    """Returns each bound, and whether it holds."""
    kept = {
        f"error below {MAX_ERROR * 100:.0f} points": result["error"] < MAX_ERROR,
        "of smaller sizes too": result["error_below"] < MAX_ERROR,
        f"at most {MAX_BYTES >> 20} MiB": result["bytes"] <= MAX_BYTES,
    }
    if "core_share" in result:
        kept[f"at most {MAX_CORE_SHARE:.0%} of a core"] = result["core_share"] <= MAX_CORE_SHARE
    return kept


def main(arguments: Sequence[str] | None = None) -> int:
    flags = parser().parse_args(arguments)
    prompts = read_trace(flags.trace) if flags.trace else make_trace(flags.synthetic)
    footprint = len({key for keys in prompts for key in keys})
    num_pages = max(int(footprint * flags.share), max(map(len, prompts)))
    result, rows = figures(prompts, num_pages, flags.trace, flags.draws)
    print(
        f"{len(prompts):,} prompts, {footprint:,} distinct pages, a pool of {num_pages:,}, "
        f"1 in {1 / result['rate']:.0f} keys sampled"
    )
    print(table(["pages", "exact", "estimated"], rows))
    print(f"largest error {100 * result['error']:.2f} points, at {result['at_pages']:,} pages; {result['bytes'] / 2**20:.1f} MiB")
    print(f"of smaller sizes {100 * result['error_below']:.2f} points, at {result['below_at_pages']:,} pages")
    print(
        f"{result['us_per_lookup']:.2f} us per page looked up and released, {result['share_of_pool']:.1%} of the page pool's; "
        f"the tiers' curve {result['tiers_us_per_lookup']:.2f} us, {result['tiers_share_of_pool']:.1%}"
    )
    if "core_share" in result:
        print(f"both {result['core_share']:.3%} of a core at the speed of the trace, in pages of 16 tokens")
    kept = verdicts(result)
    for bound, holds in kept.items():
        print(f"{'yes' if holds else 'NO '}  {bound}")
    if flags.output:
        flags.output.write_text(
            json.dumps(result | {"prompts": len(prompts), "pool": num_pages, "bounds": kept}, indent=2) + "\n"
        )
    return 0 if all(kept.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
