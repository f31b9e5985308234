"""The benchmark of the live view runs, and reads what it shows."""

import asyncio

import pytest

from bench.router.live_view import ChangingRouter, frame_times_s, main
from phalanx_kubectl.gauges import read_router


def test_benchmark_prints_both_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--groups", "3", "--streams", "30", "--frames", "2"]) in (0, 1)
    printed = capsys.readouterr().out
    assert "3 groups, 30 streams" in printed and "a frame" in printed and "router CPU" in printed


def test_readings_change_and_are_measured() -> None:
    router = ChangingRouter(4, 40)
    first, second = (read_router(router.read("get", "--raw")) for _ in range(2))
    assert len(first.groups) == 4 and first.streams == 40 and first.groups != second.groups
    assert len(asyncio.run(frame_times_s(router, 2))) == 2 and len(router.page_s) >= 4
