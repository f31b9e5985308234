"""The group without a model: every request gets the step's token, which encodes its time; and the cost of traces."""

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from bench.router.cost import Bench, Sizes
from bench.router.fake_group import FIRST_ID, NUM_SYMBOLS, FakeEngine, StepClock
from bench.router.tracing import RECORDED, ratios_by_parts
from phalanx_api import wire
from tests.router.fakes import make_request


class RecordingSink:
    """A sink that records frames."""

    def __init__(self) -> None:
        self.frames: list[wire.Tokens] = []

    def tokens(self, frame: wire.Tokens) -> None:
        self.frames.append(frame)

    def refused(self, frame: wire.Refused) -> None:
        raise AssertionError(frame)


def test_each_step_yields_a_token_that_encodes_its_time(tmp_path: Path) -> None:
    clock = StepClock(tmp_path / "clock")
    engine, sink, other = FakeEngine(clock), RecordingSink(), RecordingSink()
    assert [engine.submit(make_request(max_tokens=2), sink), engine.submit(make_request(max_tokens=9), sink)] == [1, 2]
    engine.submit(make_request(max_tokens=9), other)
    for _ in range(3):
        engine.step()
    assert [frame.handles for frame in sink.frames] == [[1, 2], [1, 2], [2]]
    assert [frame.indices for frame in sink.frames] == [[0, 0], [1, 1], [2]]
    assert [frame.tokens[0] - FIRST_ID for frame in other.frames] == [1, 2, 3]
    assert [end.handle for frame in sink.frames for end in frame.finished] == [1]
    times = [StepClock(tmp_path / "clock").time_of(step % NUM_SYMBOLS) for step in (1, 2, 3)]
    assert times == sorted(times) and times[0] > 0
    assert (engine.load().running, engine.load().last_handle) == (2, 3)
    engine.abort([2, 3, 99])
    assert engine.load().running == 0


def test_cost_of_a_sample_adds_its_parts() -> None:
    found = {"off": [2.0, 4.0], "all": [3.0, 3.9], RECORDED: [0.01, 0.02]}
    assert ratios_by_parts(found) == pytest.approx([1 + 0.01 / 2 + 0.01 * 0.99 / 2, 1 + 0.02 / 4])


@pytest.mark.system
def test_a_router_serves_groups_without_a_model(tmp_path: Path) -> None:
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as clients:
        assert Bench(tmp_path, Sizes(requests=40), clients).requests()["ms_per_request"] > 0
