"""The benchmark of the live view runs, and reads what it shows."""

import asyncio
from contextlib import closing

import pytest

from bench.router.live_view import SimulatedRouter, frame_times_s, main
from phalanx_api.summary import StreamList
from phalanx_kubectl.gauges import read_router

MAX_READINGS = 40
"""Until a move that is not declined ends; how many are depends on when Python collects garbage."""


def test_benchmark_prints_both_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--groups", "3", "--streams", "30", "--frames", "2"]) in (0, 1)
    printed = capsys.readouterr().out
    assert "3 groups, 30 streams" in printed and "a frame" in printed and "router CPU" in printed


def test_readings_are_those_of_a_running_fleet() -> None:
    router = SimulatedRouter(4, 40, step_s=2.0)
    with closing(router.fleet):
        first, second = (read_router(router.read("get", "--raw")) for _ in range(2))
        assert len(first.groups) == 4 and first.streams == 40 and first.groups != second.groups
        assert sum(group.running for group in second.groups.values()) > 0
        listed = (_next_streams(router) for _ in range(MAX_READINGS))
        assert any(stream.left for streams in listed for stream in streams.streams), "some have moved"
        assert len(asyncio.run(frame_times_s(router, 2))) == 2 and len(router.reading_s) >= 5


def _next_streams(router: SimulatedRouter) -> StreamList:
    router.read("get", "--raw")
    streams = router.fleet.read(router.fleet.router.list_streams)
    assert streams.total == 40
    return streams
