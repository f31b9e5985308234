"""Compares TLS with plain TCP on this machine: CPU of the link per token, and CPU and time of page transfers.

    python -m bench.engine.secure_wire [--pairs 7]

Plain and TLS alternate, so that other load on the machine meets both; a figure is the median ratio of the pairs with their range.
The link has 64 streams in frames of 64 tokens, both ends in one process. Pages: 8 layers, 4 KV heads of 64, in bf16.
"""

import argparse
import asyncio
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from websockets.asyncio.client import connect
from websockets.asyncio.server import ServerConnection, serve

from bench.engine.page_copy import SHAPES, copy
from bench.frame.figures import table
from phalanx_api import wire
from phalanx_frontend.tls import Certificate, client_arguments
from tests.certificates import Authority

STREAMS, FRAMES = 64, 1500
MEGABYTES = 100


def link_cpu_us(certificate: Certificate | None) -> float:
    """Returns CPU microseconds per token of both ends."""
    numbers = list(range(STREAMS))
    frame = wire.encode(wire.Tokens(handles=numbers, epochs=numbers, indices=numbers, tokens=numbers, finished=[]))

    async def send(connection: ServerConnection) -> None:
        for _ in range(FRAMES):
            await connection.send(frame)

    async def run() -> float:
        context = None if certificate is None else certificate.context
        arguments = client_arguments(certificate, "group")
        async with serve(send, "127.0.0.1", 0, ssl=context, compression=None) as server:
            port = server.sockets[0].getsockname()[1]
            scheme = "ws" if certificate is None else "wss"
            async with connect(f"{scheme}://127.0.0.1:{port}", compression=None, proxy=None, **arguments) as connection:
                started = time.process_time()
                for _ in range(FRAMES):
                    wire.decode_from_leader(await connection.recv(decode=False))
                return time.process_time() - started

    return 1e6 * asyncio.run(run()) / (FRAMES * STREAMS)


def transfer_s(certificate: Certificate | None) -> float:
    """Returns wall seconds per GiB."""
    return _transfer(certificate)[1]


def transfer_cpu_s(certificate: Certificate | None) -> float:
    """Returns CPU seconds of both ends per GiB."""
    return _transfer(certificate)[0]


def _transfer(certificate: Certificate | None) -> tuple[float, float]:
    page_bytes, count, cpu_s, wall_s = copy(SHAPES["8 layers, 4 x 64"], MEGABYTES * 1_000_000, certificate)
    per_gib = (1 << 30) / (page_bytes * count)
    return cpu_s * per_gib, wall_s * per_gib


def compared(measure: Callable[[Certificate | None], float], certificate: Certificate, pairs: int) -> list[str]:
    """Returns medians of both, and the median ratio with the range of all pairs."""
    measure(None), measure(certificate)
    both = [(measure(None), measure(certificate)) for _ in range(pairs)]
    ratios = [secure / plain for plain, secure in both]
    medians = [f"{statistics.median(values):.2f}" for values in zip(*both, strict=True)]
    return [*medians, f"{statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f})"]


def main() -> None:
    parser = argparse.ArgumentParser(prog="bench.engine.secure_wire", description=__doc__)
    parser.add_argument("--pairs", type=int, default=7)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        certificate = Authority().certificate(Path(folder), "group")
        rows = [
            ["link, CPU us per token", *compared(link_cpu_us, certificate, options.pairs)],
            ["pages, CPU seconds per GiB", *compared(transfer_cpu_s, certificate, options.pairs)],
            ["pages, seconds per GiB", *compared(transfer_s, certificate, options.pairs)],
        ]
    print(table(["", "TCP", "TLS", "ratio"], rows))


if __name__ == "__main__":
    main()
