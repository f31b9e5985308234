"""Measures `kubectl phalanx watch`: the time of a frame, and the CPU time that its readings cost a router.

    python -m bench.router.live_view [--groups 64] [--streams 1000] [--frames 10]
    python -m bench.router.live_view --show [--groups 8] [--streams 60]

The router, its metrics and its list of streams are real, and so are the engines of its groups; models and time are simulated
(`bench.virtual.fleet`). The view shows groups and streams on a terminal of 80 columns in memory; before each frame some streams
begin to move. Exits with 1 if the median frame takes 100 ms of CPU time or more, or if readings at the interval of the program
cost a router 1 % of a core or more. `--show` opens the view of such a fleet on this terminal instead, without a cluster.
"""

import argparse
import asyncio
import json
import queue
import random
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec
from prometheus_client import generate_latest

from bench.router.view_costs import print_costs
from bench.virtual.fleet import VirtualFleet
from phalanx_api.summary import StreamList
from phalanx_frontend.metrics import ApiMetrics, response_counter
from phalanx_frontend.objectives import ObjectiveCounter
from phalanx_kubectl.commands import Commands
from phalanx_kubectl.frame import Reading, frame, stream_frame
from phalanx_kubectl.gauges import read_router
from phalanx_kubectl.watch import INTERVAL_S, WatchApp

FRAME_S = 0.4
"""Between the frames of a measurement."""
SHOWN_GROUPS, SHOWN_STREAMS = 8, 60
"""Of a fleet that a person looks at: it runs in real time on one core."""


class ListedStreams:
    """Lists of streams as `phalanx-router streams --every` prints them. Implements `Lines`."""

    def __init__(self) -> None:
        self._lines: queue.Queue[str] = queue.Queue()

    def __iter__(self) -> Iterator[str]:
        """Returns the lines until `stop`."""
        return iter(self._lines.get, "")

    def put(self, line: str) -> None:
        """Adds a line."""
        self._lines.put(line)

    def stop(self) -> None:
        """Ends the lines."""
        self.put("")


class SimulatedRouter:
    """A router over a simulated fleet, which runs for some time before each reading. Implements `Kubectl`."""

    def __init__(self, num_groups: int, num_streams: int, step_s: float = FRAME_S) -> None:
        self.fleet = VirtualFleet(num_groups, num_streams)
        self.reading_s: list[float] = []
        self._step_s = step_s
        self._moves_per_reading = max(1, num_streams // 50)
        self._draw = random.Random(1)
        registry = self.fleet.registry
        api = ApiMetrics(registry, response_counter(registry, "r"), "phalanx_router", ObjectiveCounter(registry, "r"))
        self._latencies = (api.first_token.labels("m"), api.inter_token.labels("m"))
        self._followers: list[ListedStreams] = []

    def read(self, *words: str) -> str:
        """Returns the metrics, the only pod of a router, or the service."""
        if words[:2] == ("get", "--raw"):
            return self._metrics()
        if words[:2] == ("get", "pods"):
            ready = {"conditions": [{"type": "Ready", "status": "True"}]}
            return json.dumps({"items": [{"metadata": {"name": "router"}, "status": ready}]})
        groups = [{"name": name, "phase": "Ready"} for name in self.fleet.names]
        status: dict[str, Any] = {"groups": groups, "readyReplicas": len(groups)}
        body = {"metadata": {"namespace": "team", "name": "chat"}, "spec": {"replicas": len(groups)}, "status": status}
        return json.dumps(body)

    def run_attached(self, *words: str) -> int:
        """Refuses: nothing here is attached."""
        raise NotImplementedError

    def follow(self, *words: str) -> ListedStreams:
        """Returns the lists of streams, one per reading."""
        self._followers.append(ListedStreams())
        return self._followers[-1]

    def _metrics(self) -> str:
        self.fleet.move_some(self._moves_per_reading)
        self.fleet.advance(self._step_s)
        for latency in self._latencies:
            latency.observe(self._draw.random())
        page, streams = self.fleet.read(self._answers)
        for follower in self._followers:
            follower.put(streams)
        return page

    def _answers(self) -> tuple[str, str]:
        """The two answers of the router to a view."""
        started = time.process_time()
        page = generate_latest(self.fleet.registry).decode()
        streams = msgspec.json.encode(self.fleet.router.list_streams()).decode()
        self.reading_s.append(time.process_time() - started)
        return page, streams


async def frame_times_s(router: SimulatedRouter, frames: int) -> list[float]:
    """Returns the CPU seconds of each frame: from the texts of a router to the drawn cells."""
    app, times = WatchApp(Commands(router, print), "chat", interval_s=1e6), []
    lines = iter(router.follow())
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("s")
        before: Reading | None = None
        former: StreamList | None = None
        for _ in range(frames):
            page, body = await asyncio.to_thread(router.read, "get", "--raw"), json.loads(router.read("get", "service"))
            line = next(lines)
            started = time.process_time()
            now = Reading(service=body, routers={"router": read_router(page)}, at_s=time.monotonic())
            streams = msgspec.json.decode(line, type=StreamList)
            app.show_frame(frame(now, before))
            app.show_streams(stream_frame({"router": (streams, former)}))
            await pilot.pause()
            times.append(time.process_time() - started)
            before, former = now, streams
    return times


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--show", action="store_true", help="open the view on this terminal")
    parser.add_argument("--groups", type=int)
    parser.add_argument("--streams", type=int)
    parser.add_argument("--frames", type=int, default=10)
    options = parser.parse_args(arguments)
    groups = options.groups or (SHOWN_GROUPS if options.show else 64)
    streams = options.streams or (SHOWN_STREAMS if options.show else 1000)
    router = SimulatedRouter(groups, streams, INTERVAL_S if options.show else FRAME_S)
    try:
        if options.show:
            WatchApp(Commands(router, print), "chat").run()
            return 0
        times = asyncio.run(frame_times_s(router, options.frames))
    finally:
        router.fleet.close()
    return print_costs(f"{groups} groups, {streams} streams", times, router.reading_s, INTERVAL_S)


if __name__ == "__main__":
    sys.exit(main())
