"""Measures all-reduce and broadcast between ranks, compared with gloo on this machine.

    python -m bench.engine.collective

Layouts: ranks of one pod over shared memory, ranks of several pods over TCP, and both. All-reduces have the sizes of a small
model's steps. Rounds alternate between the two libraries. Prints JSON with median microseconds per operation and the ratio gloo /
ours.
"""

import json
import multiprocessing
import os
import socket
import statistics
import sys
import time
from collections.abc import Callable
from multiprocessing.queues import Queue

import torch

from phalanx_runtime.collective.connect import RankPlace, connect, listen
from phalanx_runtime.collective.library import join_gloo
from phalanx_runtime.collective.protocol import Collective

LAYOUTS = {"shm 2": [2], "tcp 2": [1, 1], "shm 3": [3], "tcp 3": [1, 1, 1], "mixed 3": [2, 1]}
SIZES = {"batch 1": 576, "batch 16": 16 * 576, "prefill 512": 512 * 576}
ROUNDS = 7
PLAN_BYTES = 300

Figures = dict[str, dict[str, float]]


def main() -> None:
    results = {name: measure(pods) for name, pods in LAYOUTS.items()}
    json.dump({"processors": os.cpu_count(), "torch": str(torch.__version__), "us": results}, sys.stdout, indent=2)
    print()


def measure(pods: list[int]) -> Figures:
    """Returns rank 0's figures for a group with these numbers of ranks per pod."""
    context = multiprocessing.get_context("fork")
    results: Queue[Figures] = context.Queue()
    listeners = [listen(0) for _ in range(sum(pods))]
    addresses = [("127.0.0.1", listener.getsockname()[1]) for listener in listeners]
    ranks, first = [], 0
    for size in pods:
        for rank in range(first, first + size):
            name = f"bench-{os.getpid()}-{len(pods)}-{first}"
            place = RankPlace(
                rank=rank,
                world_size=sum(pods),
                pod_ranks=range(first, first + size),
                addresses=addresses,
                token=b"bench",
                incarnation=1,
                pod_name=name,
            )
            ranks.append(context.Process(target=run_rank, args=(place, listeners[rank], results)))
        first += size
    for process in ranks:
        process.start()
    figures = results.get(timeout=300)
    for process in ranks:
        process.join()
    return figures


def run_rank(place: RankPlace, listener: socket.socket, results: "Queue[Figures]") -> None:
    torch.set_num_threads(1)
    own = connect(place, 30.0, listener)
    gloo = join_gloo(own, "127.0.0.1")
    figures: Figures = {}
    for name, size in SIZES.items():
        tensor = torch.zeros(size)
        times: dict[str, list[float]] = {"own": [], "gloo": []}
        for _ in range(ROUNDS):
            for label, group in (("own", own), ("gloo", gloo)):
                times[label].append(timed(lambda: reduce_once(group, tensor), 100 if size < 10_000 else 10))  # noqa: B023
        ours, theirs = statistics.median(times["own"]), statistics.median(times["gloo"])
        figures[f"all_reduce, {name}"] = {"own": round(ours, 1), "gloo": round(theirs, 1), "ratio": round(theirs / ours, 1)}
    plan = bytes(PLAN_BYTES) if own.rank == 0 else None
    median_us = statistics.median(timed(lambda: broadcast_once(own, plan), 100) for _ in range(ROUNDS))
    figures["broadcast of a plan"] = {"own": round(median_us, 1)}
    if own.rank == 0:
        results.put(figures)
    gloo.close()


def reduce_once(group: Collective, tensor: torch.Tensor) -> None:
    group.all_reduce(tensor)


def broadcast_once(group: Collective, plan: bytes | None) -> None:
    """Broadcasts a plan and all-reduces one element, like a step."""
    group.broadcast(plan)
    group.all_reduce(torch.zeros(1))


def timed(work: Callable[[], None], times: int) -> float:
    started = time.perf_counter()
    for _ in range(times):
        work()
    return (time.perf_counter() - started) / times * 1e6


if __name__ == "__main__":
    main()
