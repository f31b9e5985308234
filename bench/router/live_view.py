"""Measures `kubectl phalanx watch`: the time of a frame, and the CPU time that its readings cost a router.

    python -m bench.router.live_view [--groups 64] [--streams 1000] [--frames 30]

The metrics of a router are real, those of groups and streams are made up; the view runs on a terminal of 80 columns in memory.
Each frame changes the load of every group. Exits with 1 if the median frame takes 100 ms of CPU time or more, or if readings at
the interval of the program cost a router 1 % of a core or more.
"""

import argparse
import asyncio
import json
import random
import sys
import time
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest

from bench.router.made_up import group_summary, print_costs
from phalanx_api.summary import GroupSummary
from phalanx_frontend.metrics import ApiMetrics, response_counter
from phalanx_frontend.objectives import ObjectiveCounter
from phalanx_kubectl.commands import Commands
from phalanx_kubectl.frame import Reading, frame
from phalanx_kubectl.gauges import read_router
from phalanx_kubectl.watch import INTERVAL_S, WatchApp
from phalanx_router.metrics import GroupGauges, RouterMetrics


class ChangingRouter:
    """The metrics page of a router whose groups change at each reading. Implements `Kubectl`."""

    def __init__(self, num_groups: int, num_streams: int) -> None:
        self._names = [f"chat-g-{number:05}" for number in range(num_groups)]
        self._num_streams = num_streams
        self._draw = random.Random(1)
        self._registry = CollectorRegistry()
        self._metrics = RouterMetrics(self._registry)
        objectives = ObjectiveCounter(self._registry, "r")
        api = ApiMetrics(self._registry, response_counter(self._registry, "r"), "phalanx_router", objectives)
        self._latencies = (api.first_token.labels("m"), api.inter_token.labels("m"))
        self._registry.register(GroupGauges(self._groups))
        self.page_s: list[float] = []

    def read(self, *words: str) -> str:
        """Returns the page, the only pod of a router, or the service."""
        if words[:2] == ("get", "--raw"):
            for latency in self._latencies:
                latency.observe(self._draw.random())
            self._metrics.show_streams(self._num_streams)
            started = time.process_time()
            page = generate_latest(self._registry).decode()
            self.page_s.append(time.process_time() - started)
            return page
        if words[:2] == ("get", "pods"):
            ready = {"conditions": [{"type": "Ready", "status": "True"}]}
            return json.dumps({"items": [{"metadata": {"name": "router"}, "status": ready}]})
        groups = [{"name": name, "phase": "Ready"} for name in self._names]
        status: dict[str, Any] = {"groups": groups, "readyReplicas": len(groups)}
        body = {"metadata": {"namespace": "team", "name": "chat"}, "spec": {"replicas": len(groups)}, "status": status}
        return json.dumps(body)

    def run_attached(self, *words: str) -> int:
        """Refuses: nothing here is attached."""
        raise NotImplementedError

    def _groups(self) -> list[GroupSummary]:
        mean = self._num_streams / len(self._names)
        return [group_summary(name, int(mean * self._draw.random() * 2), self._draw) for name in self._names]


async def frame_times_s(router: ChangingRouter, frames: int) -> list[float]:
    """Returns the CPU seconds of each frame: from the text of a router's metrics to the drawn cells."""
    app, times = WatchApp(Commands(router, print), "chat", interval_s=1e6), []
    async with app.run_test(size=(80, 24)) as pilot:
        before: Reading | None = None
        for _ in range(frames):
            page = router.read("get", "--raw")
            body = json.loads(router.read("get", "service"))
            started = time.process_time()
            now = Reading(service=body, routers={"router": read_router(page)}, at_s=time.monotonic())
            app.show_frame(frame(now, before))
            await pilot.pause()
            times.append(time.process_time() - started)
            before = now
    return times


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--frames", type=int, default=30)
    options = parser.parse_args(arguments)
    router = ChangingRouter(options.groups, options.streams)
    times = asyncio.run(frame_times_s(router, options.frames))
    title = f"{options.groups} groups, {options.streams} streams"
    return print_costs(title, times, router.page_s, INTERVAL_S)


if __name__ == "__main__":
    sys.exit(main())
