"""Measures the console: a router's CPU time for a viewer of the fleet, and the time of a frame in Chromium.

    python -m bench.router.console_view [--groups 64] [--streams 1000] [--frames 20]

Groups and streams are made up; the code of router and page is real. Each frame moves a tenth of the streams. A router makes one
snapshot per second for all viewers. Exits with 1 if a snapshot costs 1 % of a core or more, or the median frame 100 ms or more.
"""

import argparse
import asyncio
import random
import sys
import tempfile
import time
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bench.router.made_up import PAGES, group_summary, print_costs
from phalanx_api import wire
from phalanx_api.pages.static_files import PATH, static_files
from phalanx_api.summary import BalancePolicy, Histogram, RouterSummary
from phalanx_router.console.records import Viewer
from phalanx_router.console.snapshot import fleet_state
from phalanx_router.request_log import GroupSegment, RequestTimeline, StreamMove
from tests.chromium import opened_page
from tests.router.api_servers import http_server

PERIOD_S, MAX_MOVES = 1.0, 50


class ChangingFleet:
    """A router's state that changes at each reading."""

    def __init__(self, num_groups: int, num_streams: int) -> None:
        self._names = [f"chat-g-{number:05}" for number in range(num_groups)]
        self._draw = random.Random(1)
        self._lines = [self._line(number) for number in range(num_streams)]
        self._moves: list[StreamMove] = []
        self.snapshot_s: list[float] = []

    def _line(self, number: int) -> RequestTimeline:
        line = RequestTimeline(
            number=number, name="", tenant="", prompt_tokens=self._draw.randrange(4000), arrived_at=time.monotonic(), session=None
        )
        line.assigned(self._draw.choice(self._names), 0)
        return line

    def answer(self) -> bytes:
        """Returns the next answer, and measures the CPU time of its snapshot."""
        self._move_some()
        summary, loads = self._summary(), {name: self._load() for name in self._names}
        started = time.process_time()
        state = fleet_state(
            summary,
            loads=loads,
            timelines=self._lines,
            moves=self._moves,
            drain_requests=(),
            policy=BalancePolicy(),
            now=time.monotonic(),
        )
        content = msgspec.json.encode(state)
        self.snapshot_s.append(time.process_time() - started)
        return content

    def _move_some(self) -> None:
        now = time.monotonic()
        for line in self._draw.sample(self._lines, len(self._lines) // 10):
            source, target = line.group, self._draw.choice(self._names)
            line.segments[:] = [GroupSegment(target, 1, 0)]
            self._moves.append(StreamMove(number=line.number, at=now, source=source, target=target, index=9, outcome="moved"))
        self._moves = self._moves[-MAX_MOVES:]

    def _load(self) -> wire.Load:
        free = self._draw.randrange(PAGES)
        return wire.Load(
            waiting=0,
            running=16,
            outstanding_tokens=0,
            free_pages=free,
            total_pages=PAGES,
            cached_pages=free // 2,
        )

    def _summary(self) -> RouterSummary:
        return RouterSummary(
            router="router",
            groups=[group_summary(name, 16, self._draw) for name in self._names],
            traffic=[],
            queued=0,
            queued_tokens=0,
            held=0,
            idle_s=0.0,
            ttft=Histogram(),
            itl=Histogram(),
        )


def make_app(fleet: ChangingFleet) -> Starlette:
    """Returns a server of the page and of what its fleet reads."""
    files = static_files("phalanx_router.console")

    async def serve(request: Request) -> Response:
        file = files.get(request.url.path)
        if file is not None:
            return Response(file.content, media_type=file.media_type)
        if request.url.path == f"{PATH}/api/fleet":
            return Response(fleet.answer(), media_type="application/json")
        viewer = Viewer(tenant="", has_keys=False, may_write=False, sees_all=True)
        body = msgspec.json.encode(viewer) if request.url.path.startswith(PATH) else b'{"data": []}'
        return Response(body, media_type="application/json")

    return Starlette(routes=[Route("/{path:path}", serve)])


async def frame_times_s(fleet: ChangingFleet, frames: int) -> list[float]:
    """Returns the seconds from the answer of the router to the drawn page, of each frame."""
    times: list[float] = []
    with tempfile.TemporaryDirectory() as folder:
        async with http_server(make_app(fleet)) as address, opened_page(Path(folder)) as page:
            await page.open(f"http://{address}/ui#fleet")
            while len(times) < frames:
                count = len(fleet.snapshot_s)
                await asyncio.sleep(PERIOD_S)
                if len(fleet.snapshot_s) > count:
                    times.append(float(await page.run("document.getElementById('map').dataset.frameMs ?? 'NaN'")) / 1e3)
    return [seconds for seconds in times if seconds == seconds]


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--frames", type=int, default=20)
    options = parser.parse_args(arguments)
    fleet = ChangingFleet(options.groups, options.streams)
    times = asyncio.run(frame_times_s(fleet, options.frames))
    title = f"{options.groups} groups, {options.streams} streams"
    return print_costs(title, times, fleet.snapshot_s, PERIOD_S)


if __name__ == "__main__":
    sys.exit(main())
