"""Measures the console: a router's CPU time for a viewer of the fleet, and the time of a frame in Chromium.

    python -m bench.router.console_view [--groups 64] [--streams 1000] [--frames 20]

The router, its summary and its console are real, and so are the engines of its groups; models and time are simulated
(`bench.virtual.fleet`). Before each frame a tenth of the streams begin to move, and a second of the fleet passes. A router makes
one snapshot per second for all viewers; its answer by HTTP is not measured. Exits with 1 if a snapshot costs 1 % of a core or
more, or the median frame 100 ms or more.
"""

import argparse
import asyncio
import sys
import tempfile
import threading
import time
from pathlib import Path

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from bench.router.view_costs import print_costs
from bench.virtual.fleet import VirtualFleet
from phalanx_api.pages.static_files import PATH, static_files
from phalanx_router.console.answers import PERIOD_S
from phalanx_router.console.records import Viewer
from tests.chromium import opened_page
from tests.router.api_servers import http_server

MAX_TURNS = 20
"""Readings for each wanted frame: a page that draws nothing ends the benchmark."""


class SimulatedConsole:
    """The console of a simulated fleet, which runs for a second before each answer."""

    def __init__(self, num_groups: int, num_streams: int) -> None:
        self.fleet = VirtualFleet(num_groups, num_streams, has_console=True)
        self._moves_per_answer = max(1, num_streams // 10)
        self.snapshot_s: list[float] = []
        self._answering = threading.Lock()

    def answer(self) -> bytes:
        """Returns the next answer, and measures the CPU time of its summary, snapshot and encoding."""
        with self._answering:
            self.fleet.move_some(self._moves_per_answer)
            self.fleet.advance(PERIOD_S)
            return self.fleet.read(self._read)

    def wait(self) -> None:
        """Returns when no answer is being made."""
        with self._answering:
            pass

    def _read(self) -> bytes:
        assert self.fleet.console is not None, "it was asked for"
        started = time.thread_time()
        content = self.fleet.console.explained_fleet.get().content
        self.snapshot_s.append(time.thread_time() - started)
        return content


def make_app(console: SimulatedConsole) -> Starlette:
    """Returns a server of the page and of what its fleet reads."""
    files = static_files("phalanx_router.console")

    async def serve(request: Request) -> Response:
        file = files.get(request.url.path)
        if file is not None:
            return Response(file.content, media_type=file.media_type)
        if request.url.path == f"{PATH}/api/fleet":
            return Response(await asyncio.to_thread(console.answer), media_type="application/json")
        viewer = Viewer(tenant="", has_keys=False, may_write=False, sees_all=True)
        body = msgspec.json.encode(viewer) if request.url.path.startswith(PATH) else b'{"data": []}'
        return Response(body, media_type="application/json")

    return Starlette(routes=[Route("/{path:path}", serve)])


async def frame_times_s(console: SimulatedConsole, frames: int) -> list[float]:
    """Returns the seconds from the answer of the router to the drawn page, of each frame."""
    times: list[float] = []
    turns = iter(range(MAX_TURNS * frames))
    with tempfile.TemporaryDirectory() as folder:
        async with http_server(make_app(console)) as address, opened_page(Path(folder)) as page:
            await page.open(f"http://{address}/ui#fleet")
            while len(times) < frames and next(turns, None) is not None:
                count = len(console.snapshot_s)
                await asyncio.sleep(PERIOD_S)
                if len(console.snapshot_s) > count:
                    drawn_ms = await page.run("document.getElementById('map').dataset.frameMs ?? ''")
                    times += [float(drawn_ms) / 1e3] if drawn_ms else []  # a slow page has drawn nothing yet
            await page.run("location.hash = '#playground'")  # which reads nothing
            await asyncio.to_thread(console.wait)
    return times


def main(arguments: list[str] | None = None) -> int:
    """Runs the benchmark. Returns the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--groups", type=int, default=64)
    parser.add_argument("--streams", type=int, default=1000)
    parser.add_argument("--frames", type=int, default=20)
    options = parser.parse_args(arguments)
    console = SimulatedConsole(options.groups, options.streams)
    try:
        times = asyncio.run(frame_times_s(console, options.frames))
    finally:
        console.fleet.close()
    title = f"{options.groups} groups, {options.streams} streams"
    return print_costs(title, times, console.snapshot_s, PERIOD_S)


if __name__ == "__main__":
    sys.exit(main())
