"""A rank's heart: what it says of the step that runs, and the thread that says it."""

import threading

from phalanx_api import wire
from phalanx_api.cost import HUNG_FLOOR_S
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.core.step_timeout import FIRST_BOUND_S
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.rank.process.heartbeat import Heartbeat, StepWatch
from phalanx_runtime.rank_spec import BEAT_S, Beat
from tests.runtime.fake_runner import FakeRunner, make_request


def test_idle_rank_sends_only_heartbeats() -> None:
    assert Heartbeat().beat(1.0) == Beat()


def test_a_step_grows_old_by_the_hearts_own_turns() -> None:
    heart = Heartbeat()
    heart.began(7, 10.0)
    assert heart.beat(1.0) == Beat(step=7, step_s=0.0, bound_s=10.0)
    assert heart.beat(1.0) == Beat(step=7, step_s=1.0, bound_s=10.0)
    assert heart.beat(3600.0) == Beat(step=7, step_s=1.0 + 2 * BEAT_S, bound_s=10.0)
    heart.ended(7)
    assert heart.beat(1.0) == Beat()
    heart.began(8, 10.0)
    assert heart.beat(1.0) == Beat(step=8, step_s=0.0, bound_s=10.0)


def test_repeated_step_number_is_another_step() -> None:
    heart = Heartbeat()
    for _ in range(2):
        heart.began(0, 10.0)
        assert heart.beat(1.0).step_s == 0.0
        assert heart.beat(1.0).step_s == 1.0


def test_heartbeat_thread_ends_with_its_receiver() -> None:
    heard: list[Beat] = []
    done = threading.Event()

    def tell(beat: Beat) -> None:
        heard.append(beat)
        if len(heard) == 2:
            done.set()
            raise BrokenPipeError

    heart = Heartbeat(tell)
    heart.start()
    assert done.wait(30)
    assert heard == [Beat(), Beat()]


def plan(step: int) -> StepPlan:
    return StepPlan(step=step, admitted=[], rows=[0], starts=[8], counts=[1], pages=[[]], tokens=[5], draws=[])


def test_heartbeat_contains_each_step_and_its_bound() -> None:
    heart = Heartbeat()
    watch = StepWatch(heart)
    bounds = []
    for step in range(5):
        watch.began(plan(step), 4.0 if step == 4 else None)
        said = heart.beat(1.0)
        bounds.append((said.step, said.bound_s))
        watch.ended(plan(step), 1.0)
        assert heart.beat(1.0) == Beat()
    assert bounds == [(0, FIRST_BOUND_S), (1, FIRST_BOUND_S), (2, FIRST_BOUND_S), (3, HUNG_FLOOR_S), (4, 20.0)]


def test_oldest_of_several_steps_is_reported() -> None:
    heart = Heartbeat()
    heart.began(1, 10.0)
    heart.began(2, 20.0)
    assert heart.beat(1.0) == Beat(step=1, step_s=0.0, bound_s=20.0), "what takes long may be the other's part"
    assert heart.beat(1.0) == Beat(step=1, step_s=1.0, bound_s=20.0)
    heart.ended(1)
    assert heart.beat(1.0) == Beat(step=2, step_s=0.0, bound_s=20.0)


class Noting:
    """A watch that keeps what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[str, int]] = []
        self.expected: list[float | None] = []

    def began(self, plan: StepPlan, expected_s: float | None) -> None:
        self.heard.append(("began", plan.step))
        self.expected.append(expected_s)

    def ended(self, plan: StepPlan, wall_s: float) -> None:
        self.heard.append(("ended", plan.step))


def test_loop_reports_every_step_and_its_fitted_time() -> None:
    class Once:
        """A channel with one request, then none."""

        def __init__(self) -> None:
            self._messages = [[wire.encode(wire.Submit(1, make_request(5, 40)))]]

        def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
            if self._messages:
                return self._messages.pop()
            return None if block else []

        def wake(self) -> None:
            raise AssertionError("nothing is compiled beside these steps")

        def send(self, message: bytes) -> None:
            pass

    watch = Noting()
    now = iter(range(10_000))
    EngineLoop(
        FakeRunner(64, 4),
        Limits(max_model_len=200, max_num_seqs=8, max_num_batched_tokens=64),
        Once(),
        clock=lambda: float(next(now)),
        watch=watch,
    ).run()
    steps = len(watch.expected)
    assert steps >= 40 and [what for what, _ in watch.heard] == ["began", "ended"] * steps
    assert watch.expected[0] is None
    assert watch.expected[-1] is not None and watch.expected[-1] > 0
