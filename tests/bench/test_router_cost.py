"""The group without a model that the router is measured against: every request gets the step's token, and its time is told."""

from pathlib import Path

from bench.router.fake_group import FIRST_ID, SPELLED, Pacer, StepClock
from phalanx_api import wire
from tests.router.fakes import make_request


class Ear:
    """A sink that keeps what it hears."""

    def __init__(self) -> None:
        self.frames: list[wire.Tokens] = []

    def tokens(self, frame: wire.Tokens) -> None:
        self.frames.append(frame)

    def refused(self, frame: wire.Refused) -> None:
        raise AssertionError(frame)


def test_each_step_yields_a_token_that_encodes_its_time(tmp_path: Path) -> None:
    clock = StepClock(tmp_path / "clock")
    pacer, ear, other = Pacer(clock), Ear(), Ear()
    assert [pacer.submit(make_request(max_tokens=2), ear), pacer.submit(make_request(max_tokens=9), ear)] == [1, 2]
    pacer.submit(make_request(max_tokens=9), other)
    for _ in range(3):
        pacer.step()
    assert [frame.handles for frame in ear.frames] == [[1, 2], [1, 2], [2]]
    assert [frame.indices for frame in ear.frames] == [[0, 0], [1, 1], [2]]
    assert [frame.tokens[0] - FIRST_ID for frame in other.frames] == [1, 2, 3]
    assert [end.handle for frame in ear.frames for end in frame.finished] == [1]
    times = [StepClock(tmp_path / "clock").when(step % SPELLED) for step in (1, 2, 3)]
    assert times == sorted(times) and times[0] > 0
    assert (pacer.load().running, pacer.load().last_handle) == (2, 3)
    pacer.abort([2, 3, 99])
    assert pacer.load().running == 0
