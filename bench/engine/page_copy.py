"""`python -m bench.engine.page_copy`: the cost of sending pages between ranks over loopback, both ends in one process.

CPU seconds do not depend on what else runs on the machine; the rate by the clock does. The rows are shapes of KV caches: layers,
KV heads and head dimension on one rank, in bf16.
"""

import argparse
import threading
import time
from functools import partial

import torch

from bench.frame.figures import table
from phalanx_api.moves import PageAddress
from phalanx_runtime.core.migration.page_orders import ExpectPages, PagesReceived, ReceiveFailed, Report, SendFailed, SendPages
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.rank.memory.page_memory import open_pages
from phalanx_runtime.rank.transfer.page_wire import KEY_BYTES
from phalanx_runtime.rank.transfer.server import KvTransferServer, Secret

SHAPES = {"8 layers, 4 x 64": (8, 4, 64), "30 layers, 3 x 64": (30, 3, 64), "32 layers, 8 x 128": (32, 8, 128)}
PAGE_SIZE = 16


def make_caches(shape: tuple[int, int, int], num_pages: int) -> list[LayerCache]:
    """Pages with something in them."""
    layers, heads, dim = shape
    size = (num_pages, heads, PAGE_SIZE, dim)
    return [LayerCache(*(torch.randn(size).to(torch.bfloat16) for _ in range(2))) for _ in range(layers)]


def copy(shape: tuple[int, int, int], total_bytes: int) -> tuple[int, int, float, float]:
    """Bytes of a page, pages, CPU seconds of both ends, seconds by the clock. Raises RuntimeError when the copy fails."""
    page_bytes = 2 * 2 * shape[0] * shape[1] * shape[2] * PAGE_SIZE
    count = max(1, total_bytes // page_bytes)
    ends: list[Report] = []
    done = threading.Event()

    def tell(report: Report) -> None:
        if isinstance(report, SendFailed | ReceiveFailed) or (
            isinstance(report, PagesReceived) and report.num_computed is not None
        ):
            ends.append(report)
            done.set()

    caches = [make_caches(shape, count) for _ in range(2)]
    source, target = (
        KvTransferServer(0, Secret(b"bench", 1), PAGE_SIZE, partial(open_pages, one), lambda step: None, tell) for one in caches
    )
    key, pages = bytes(KEY_BYTES), list(range(count))
    target.obey(ExpectPages(move="copy", key=key, first=0, pages=pages, step=0))
    cpu, wall = time.process_time(), time.perf_counter()
    source.obey(
        SendPages(
            move="copy",
            address=PageAddress("localhost", target.port),
            key=key,
            first=0,
            pages=pages,
            step=0,
            num_computed=count * PAGE_SIZE,
        )
    )
    done.wait()
    cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
    for door in (source, target):
        door.close()
    if not isinstance(ends[0], PagesReceived):
        raise RuntimeError(f"the copy failed: {ends[0]}")
    return page_bytes, count, cpu, wall


def main() -> None:
    """Prints a row for each shape."""
    parser = argparse.ArgumentParser(prog="bench.engine.page_copy", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, shape in SHAPES.items():
        page_bytes, count, cpu, wall = copy(shape, options.megabytes * 1_000_000)
        size = page_bytes * count / 1e6
        rows.append([name, f"{page_bytes / 1e3:.0f}", f"{1e6 * cpu / count:.0f}", f"{size / cpu:.0f}", f"{size / wall:.0f}"])
    print(table(["cache of a rank", "kB a page", "CPU us a page", "MB per CPU second", "MB/s"], rows))


if __name__ == "__main__":
    main()
