"""A rank's heart: what it says of the step that runs, and the thread that says it."""

import threading

import pytest

from phalanx_runtime.core.plan import StepPlan, StepResult
from phalanx_runtime.core.step_time import FIRST_BOUND_S, MIN_BOUND_S
from phalanx_runtime.rank.heart import Heart, WatchedRunner
from phalanx_runtime.rank_spec import BEAT_S, Beat
from tests.runtime.fake_runner import FakeRunner


def test_an_idle_rank_only_says_that_it_lives() -> None:
    assert Heart().beat(1.0) == Beat()


def test_a_step_grows_old_by_the_hearts_own_turns() -> None:
    heart = Heart()
    heart.began(7, 10.0)
    assert heart.beat(1.0) == Beat(step=7, step_s=0.0, bound_s=10.0)
    assert heart.beat(1.0) == Beat(step=7, step_s=1.0, bound_s=10.0)
    assert heart.beat(3600.0) == Beat(step=7, step_s=1.0 + 2 * BEAT_S, bound_s=10.0)
    heart.ended()
    assert heart.beat(1.0) == Beat()
    heart.began(8, 10.0)
    assert heart.beat(1.0) == Beat(step=8, step_s=0.0, bound_s=10.0)


def test_the_same_number_in_the_next_step_is_another_step() -> None:
    heart = Heart()
    for _ in range(2):
        heart.began(0, 10.0)
        assert heart.beat(1.0).step_s == 0.0
        assert heart.beat(1.0).step_s == 1.0


def test_the_thread_beats_until_nobody_listens() -> None:
    heard: list[Beat] = []
    done = threading.Event()

    def tell(beat: Beat) -> None:
        heard.append(beat)
        if len(heard) == 2:
            done.set()
            raise BrokenPipeError

    heart = Heart(tell)
    heart.start()
    assert done.wait(30)
    assert heard == [Beat(), Beat()]


class Looking:
    """A runner that notes what the heart says while it runs."""

    def __init__(self, heart: Heart) -> None:
        self._heart = heart
        self._runner = FakeRunner(8, 4)
        self.pool = self._runner.pool
        self.said: list[Beat] = []

    def run(self, plan: StepPlan) -> StepResult:
        self.said.append(self._heart.beat(1.0))
        return StepResult(plan.step, [])


def test_the_heart_tells_of_each_step_and_its_bound() -> None:
    heart = Heart()
    looking = Looking(heart)
    times = iter(float(second) for second in range(100))
    runner = WatchedRunner(looking, heart, lambda: next(times))
    assert runner.pool == looking.pool
    for step in range(4):
        runner.run(StepPlan(step, [], [0], [8], [1], [[]], [5], []))
        assert heart.beat(1.0) == Beat()
    assert [(beat.step, beat.bound_s) for beat in looking.said] == [
        *[(step, FIRST_BOUND_S) for step in range(3)],
        (3, MIN_BOUND_S),
    ]


def test_a_step_that_raises_is_no_step_that_ended() -> None:
    heart = Heart()

    class Failing(Looking):
        def run(self, plan: StepPlan) -> StepResult:
            raise RuntimeError

    with pytest.raises(RuntimeError):
        WatchedRunner(Failing(heart), heart).run(StepPlan(3, [], [0], [8], [1], [[]], [5], []))
    assert heart.beat(1.0).step == 3
