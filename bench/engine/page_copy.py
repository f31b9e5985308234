"""Measures the cost of copying pages between two ranks over loopback, both ends in one process.

    python -m bench.engine.page_copy [--megabytes 200]

CPU time is independent of other load on the machine, MB/s is not. Rows are shapes of KV caches of one rank in bf16: layers, KV
heads, head dimension.
"""

import argparse
import threading
import time
from functools import partial

import torch

from bench.frame.figures import table
from phalanx_api.moves import PageAddress
from phalanx_frontend.tls import Certificate
from phalanx_runtime.core.migration.page_orders import (
    ExpectPages,
    PageCopy,
    PagesReceived,
    ReceiveFailed,
    Report,
    SendFailed,
    SendPages,
)
from phalanx_runtime.model.attention.paged import LayerCache
from phalanx_runtime.rank.memory.page_memory import PageAccess, open_pages
from phalanx_runtime.rank.transfer.page_wire import KEY_BYTES
from phalanx_runtime.rank.transfer.server import KvTransferServer, LocalReports, Secret

SHAPES = {"8 layers, 4 x 64": (8, 4, 64), "30 layers, 3 x 64": (30, 3, 64), "32 layers, 8 x 128": (32, 8, 128)}
PAGE_SIZE = 16


def make_caches(shape: tuple[int, int, int], num_pages: int) -> list[LayerCache]:
    layers, heads, dim = shape
    size = (num_pages, heads, PAGE_SIZE, dim)
    return [LayerCache(*(torch.randn(size).to(torch.bfloat16) for _ in range(2))) for _ in range(layers)]


def copy(shape: tuple[int, int, int], total_bytes: int, certificate: Certificate | None = None) -> tuple[int, int, float, float]:
    """Returns bytes per page, number of pages, CPU seconds of both ends, and wall seconds. certificate: of both, for TLS.

    Raises RuntimeError if the copy fails.
    """
    page_bytes = 2 * 2 * shape[0] * shape[1] * shape[2] * PAGE_SIZE
    count = max(1, total_bytes // page_bytes)
    reports: list[Report] = []
    done = threading.Event()

    def record(report: Report) -> None:
        if isinstance(report, SendFailed | ReceiveFailed) or (
            isinstance(report, PagesReceived) and report.num_computed is not None
        ):
            reports.append(report)
            done.set()

    caches = [make_caches(shape, count) for _ in range(2)]
    source, target = (
        KvTransferServer(
            0,
            Secret(b"bench", 1),
            PageAccess(page_size=PAGE_SIZE, open=partial(open_pages, pages)),
            LocalReports(record),
            certificate=certificate,
        )
        for pages in caches
    )
    key, pages = bytes(KEY_BYTES), list(range(count))
    target.execute(ExpectPages(move="copy", key=key, first=0, pages=pages, step=0))
    cpu_start, wall_start = time.process_time(), time.perf_counter()
    source.execute(
        SendPages(
            move="copy",
            address=PageAddress("localhost", target.port),
            key=key,
            copy=PageCopy(first=0, pages=pages, step=0, num_computed=count * PAGE_SIZE),
        )
    )
    done.wait()
    cpu_s, wall_s = time.process_time() - cpu_start, time.perf_counter() - wall_start
    for server in (source, target):
        server.close()
    if not isinstance(reports[0], PagesReceived):
        raise RuntimeError(f"the copy failed: {reports[0]}")
    return page_bytes, count, cpu_s, wall_s


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.engine.page_copy", description=__doc__)
    parser.add_argument("--megabytes", type=int, default=200)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for name, shape in SHAPES.items():
        page_bytes, count, cpu_s, wall_s = copy(shape, options.megabytes * 1_000_000)
        size = page_bytes * count / 1e6
        rows.append(
            [name, f"{page_bytes / 1e3:.0f}", f"{1e6 * cpu_s / count:.0f}", f"{size / cpu_s:.0f}", f"{size / wall_s:.0f}"]
        )
    print(table(["KV cache of a rank", "kB per page", "CPU us per page", "MB per CPU second", "MB/s"], rows))


if __name__ == "__main__":
    main()
