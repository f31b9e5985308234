"""Compares a prefix cache on the device alone with those that have further tiers in host memory and on disk, in virtual time.

    python -m bench.kv_cache.tiers --trace CONVERSATIONS.jsonl [--requests 3000] [--length-share 0.125]
    python -m bench.kv_cache.tiers                                                        generated conversations

Then a restart in the middle of the requests: the first hundred after it, with the pages on disk and without.

Traces have lines with timestamp (ms), input_length, output_length and hash_ids (Mooncake's format). The device has a tenth of
the trace's distinct pages, host memory three tenths, the disk the rest; the last row has no limit. The scheduler is the engine's;
its steps take the time of a step-time function that `bench.engine.step_fit` measured (`--cost`), its copies that of the rate
measured here in CPU time, or of `--copy-rate` bytes/s, the disk that of cold reads and writes in `--disk-folder`, or of
`--disk-rate`. Requests arrive at such a rate that their work without a cache takes `--load` of the time.

Then the break-even: how fast host memory must be for a load of 1, 64 and 1,024 pages from the start of a prompt to take less
time than computing them, and how long a prefix must be at some rates; `bench.kv_cache.break_even` fits the times of loads here.
"""

import argparse
import json
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from bench.engine.step_grid import read_model
from bench.frame.figures import markdown_header, markdown_row, percentile
from bench.kv_cache.break_even import COST, PAGE, PAGE_COUNTS, CopyRate, break_even_rows, measure_copies
from bench.kv_cache.conversations import Conversations, generate, paced, read
from bench.kv_cache.disk import measure_rates
from bench.kv_cache.restart import FIRST, after_restart
from bench.kv_cache.virtual_disk import DiskTimes, VirtualDisk, at_rates
from bench.kv_cache.virtual_run import MAX_ROWS, Machine, Outcome, VirtualRun
from bench.simulate.machines import ANALYTIC
from bench.simulate.machines import Machine as AnalyticMachine
from phalanx_runtime.core.step_plan import PoolShape

DISK_PAGES = 512
"""Pages of the measurement of the disk."""
RATES = (1e7, 3e7, 1e8, 1e9, 1e10)
"""Bytes/s."""
TWO_TIERS, THREE_TIERS = "device and host memory", "device, host memory and disk"
ANALYTIC_PAGE_BYTES = AnalyticMachine().token_bytes * PAGE
COLUMNS = (
    "cache",
    "device pages",
    "host pages",
    "disk pages",
    "found on the device",
    "loaded from host memory",
    "read from disk before",
    "prompt tokens computed",
    "TTFT p50, s",
    "TTFT p99, s",
    "pages stored",
    "pages loaded",
    "pages read from disk",
    "pages declined",
    "preemptions",
)


@dataclass(frozen=True, slots=True)
class Setup:
    """A cache by name."""

    name: str
    pool: PoolShape
    disk_pages: int = 0


def setups(conversations: Conversations, device_share: float, host_share: float, disk_share: float | None = None) -> list[Setup]:
    """Returns the device alone, with host memory, with a disk too (default: for the rest), and without a limit."""
    num_pages = conversations.working_set(PAGE)
    longest = max(arrival.input_tokens + arrival.output_tokens for arrival in conversations.arrivals)
    device = max(int(device_share * num_pages), -(-longest // PAGE) + MAX_ROWS)
    answers = sum(-(-arrival.output_tokens // PAGE) + 1 for arrival in conversations.arrivals)
    host = int(host_share * num_pages)
    disk = max(1, num_pages - device - host) if disk_share is None else int(disk_share * num_pages)
    return [
        Setup("device", PoolShape(device, PAGE)),
        Setup(TWO_TIERS, PoolShape(device, PAGE, host)),
        Setup(THREE_TIERS, PoolShape(device, PAGE, host, has_disk=True), disk),
        Setup("no limit", PoolShape(num_pages + answers + MAX_ROWS, PAGE)),
    ]


def max_len(conversations: Conversations) -> int:
    """Returns a context length that fits all requests."""
    return 1 + max(arrival.input_tokens + arrival.output_tokens for arrival in conversations.arrivals)


def run(setup: Setup, conversations: Conversations, machine: Machine, times: DiskTimes) -> Outcome:
    """Runs all requests over a cache."""
    disk = VirtualDisk(times, setup.disk_pages) if setup.disk_pages else None
    return VirtualRun(machine, setup.pool, max_len(conversations), disk).run(conversations)


def cells(setup: Setup, outcome: Outcome) -> list[str]:
    """Returns the cells of `COLUMNS`."""
    times = [f"{percentile(outcome.ttft_s, percent):.2f}" for percent in (50, 99)]
    read_rate = outcome.fetched * PAGE / outcome.queried_tokens
    rates = [f"{rate:.1%}" for rate in (outcome.device_rate, outcome.host_rate, read_rate)]
    counts = outcome.computed_tokens, outcome.stored, outcome.loaded, outcome.fetched, outcome.declined, outcome.preemptions
    tokens, *pages = (f"{count:,}" for count in counts)
    sizes = [f"{size:,}" for size in (setup.pool.num_pages, setup.pool.num_host_pages, setup.disk_pages)]
    return [setup.name, *sizes, *rates, tokens, *times, *pages]


def make_machine(args: argparse.Namespace, rate: CopyRate | None) -> tuple[Machine, int]:
    """Returns the times of the engine, and the bytes of its pages. Raises ValueError for another file than one of `step_fit`."""
    model, size = read_model(args.cost), int(json.loads(args.cost.read_text())["page_bytes"])
    load, store = (args.copy_rate, args.copy_rate) if rate is None else (rate.load, rate.store)
    return Machine(model=model, load_page_s=size / load, store_page_s=size / store, step_tokens=args.step_tokens), size


def parser() -> argparse.ArgumentParser:
    """Returns the flags."""
    flags = argparse.ArgumentParser(
        "python -m bench.kv_cache.tiers", description="Compare one and two tiers of the prefix cache."
    )
    flags.add_argument("--trace", type=Path, metavar="FILE", help="JSON lines with hash_ids; default: generated conversations")
    flags.add_argument("--requests", type=int, metavar="N", help="the first N of the trace")
    flags.add_argument("--length-share", type=float, default=1.0, help="factor of the trace's lengths")
    flags.add_argument("--conversations", type=int, default=600, metavar="N", help="generated ones")
    flags.add_argument("--load", type=float, default=0.7, help="work of all requests without a cache, as a share of the time")
    flags.add_argument("--device-share", type=float, default=0.1, help="pages of the device, as a share of the distinct pages")
    flags.add_argument("--host-share", type=float, default=0.3, help="the same for host memory")
    flags.add_argument(
        "--disk-share", type=float, help="the same for the disk, which also has the pages in host memory; default: the rest"
    )
    flags.add_argument("--cost", type=Path, default=COST, metavar="FILE", help="of bench.engine.step_fit")
    flags.add_argument("--copy-rate", type=float, metavar="BYTES/S", help="default: measured here")
    flags.add_argument("--disk-folder", type=Path, metavar="FOLDER", help="default: that of temporary files")
    flags.add_argument("--disk-rate", type=float, metavar="BYTES/S", help="of reads and writes; default: measured here")
    flags.add_argument("--step-tokens", type=int, default=1024, metavar="N", help="maximum tokens of a step")
    flags.add_argument("--output", type=Path, metavar="FILE", help="file for the figures as JSON")
    return flags


def disk_times(args: argparse.Namespace, page_bytes: int) -> DiskTimes:
    """Returns `--disk-rate`, or the rates of the log in the folder: cold reads, and writes in CPU time."""
    if args.disk_rate:
        return at_rates(page_bytes, args.disk_rate, args.disk_rate)
    folder = args.disk_folder or Path(tempfile.gettempdir())
    rates = {rate.name: rate.ours * 1e6 for rate in measure_rates(folder, page_bytes, DISK_PAGES, 3)}
    print(f"GB/s of pages on disk: {rates['read, cold'] / 1e9:.2f} read, {rates['write'] / 1e9:.2f} written\n")
    return at_rates(page_bytes, rates["read, cold"], rates["write"])


def print_restart(setup: Setup, conversations: Conversations, machine: Machine, times: DiskTimes) -> dict[str, Outcome]:
    """Prints and returns the first requests after a restart."""
    pages, length = setup.disk_pages, max_len(conversations)
    warm, cold = after_restart(conversations, machine, setup.pool, pages, times=times, max_len=length)
    print(f"\nThe first {FIRST} requests after a restart:\n")
    print(markdown_header(["disk", "prompt tokens", "computed", "pages read from disk", "TTFT p50, s", "TTFT p99, s"]))
    outcomes = {"warm": warm, "cold": cold}
    for name, outcome in outcomes.items():
        counts = [f"{count:,}" for count in (outcome.queried_tokens, outcome.computed_tokens, outcome.fetched)]
        print(markdown_row([name, *counts, *(f"{percentile(outcome.ttft_s, at):.2f}" for at in (50, 99))]))
    return {f"{name} restart": outcome for name, outcome in outcomes.items()}


def print_copies(rate: CopyRate) -> None:
    """Prints the measured rates."""
    numbers = rate.load, rate.load_low, rate.load_high, rate.store, rate.load_wall
    loads, low, high, stores, wall = (number / 1e9 for number in numbers)
    print(
        f"GB per CPU second in pages of {rate.page_bytes:,} bytes: {loads:.2f} loaded (quartiles {low:.2f} and {high:.2f}; "
        f"{wall:.2f} of wall time), {stores:.2f} stored\n"
    )


def print_break_even(machine: Machine, page_bytes: int) -> None:
    """Prints the table: pages of the engine, of half and of twice the bytes, and a model on a GPU."""
    rates = [f"tokens at {rate / 1e9:g} GB/s" for rate in RATES]
    print(markdown_header(["steps", "bytes of a page", *(f"GB/s for {n:,} pages" for n in PAGE_COUNTS), *rates]))
    own = [("of --cost", machine.model, size) for size in (page_bytes // 2, page_bytes, 2 * page_bytes)]
    for row in break_even_rows([*own, ("analytic 32B model on an H200", ANALYTIC, ANALYTIC_PAGE_BYTES)], RATES):
        print(markdown_row(row))


def main(arguments: Sequence[str] | None = None) -> int:
    """Prints the tables."""
    args = parser().parse_args(arguments)
    conversations = read(args.trace, args.requests, args.length_share) if args.trace else generate(args.conversations)
    rate = None if args.copy_rate else measure_copies()
    machine, page_bytes = make_machine(args, rate)
    conversations = replace(conversations, arrivals=paced(conversations.arrivals, machine.model, args.step_tokens, args.load))
    if rate is not None:
        print_copies(rate)
    times = disk_times(args, page_bytes)
    prompts = sum(arrival.input_tokens for arrival in conversations.arrivals)
    print(f"{len(conversations.arrivals):,} requests, {prompts:,} prompt tokens, {conversations.working_set(PAGE):,} pages\n")
    print(markdown_header(COLUMNS), flush=True)
    outcomes: dict[str, Outcome] = {}
    caches = setups(conversations, args.device_share, args.host_share, args.disk_share)
    for setup in caches:
        outcomes[setup.name] = run(setup, conversations, machine, times)
        print(markdown_row(cells(setup, outcomes[setup.name])), flush=True)
    (setup,) = (each for each in caches if each.name == THREE_TIERS)
    outcomes |= print_restart(setup, conversations, machine, times)
    print()
    print_break_even(machine, page_bytes)
    if args.output:
        args.output.write_text(json.dumps({name: asdict(outcome) for name, outcome in outcomes.items()}, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
