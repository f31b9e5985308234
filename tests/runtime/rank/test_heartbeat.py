"""Heartbeat of a rank: its contents, and its thread."""

import threading
from pathlib import Path

from phalanx_api import wire
from phalanx_api.cost import HANG_FLOOR_S
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.step_plan import StepPlan
from phalanx_runtime.core.step_timeout import FIRST_BOUND_S
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.progress import WeightProgress
from phalanx_runtime.rank.process.heartbeat import Heartbeat, StepWatch
from phalanx_runtime.rank_spec import BEAT_S, Beat
from tests.runtime.fake_runner import FakeRunner, make_request


def test_idle_rank_sends_only_heartbeats() -> None:
    assert Heartbeat().beat(1.0) == Beat()


def test_loading_rank_reports_its_weights(tmp_path: Path) -> None:
    file = tmp_path / "a.safetensors"
    file.write_bytes(bytes(100))
    heartbeat, progress = Heartbeat(), WeightProgress()
    heartbeat.loading = progress
    assert heartbeat.beat(1.0) == Beat()
    progress.opened([file, file])
    for tensor in ("a", "b", "a"):
        progress.read(tensor, 30)
    assert heartbeat.beat(1.0) == Beat(loaded_bytes=60, weight_bytes=100)
    heartbeat.loading = None
    assert heartbeat.beat(1.0) == Beat()


def test_step_time_adds_up_the_intervals_of_beats() -> None:
    heartbeat = Heartbeat()
    heartbeat.step_started(7, 10.0)
    assert heartbeat.beat(1.0) == Beat(step=7, step_s=0.0, bound_s=10.0)
    assert heartbeat.beat(1.0) == Beat(step=7, step_s=1.0, bound_s=10.0)
    assert heartbeat.beat(3600.0) == Beat(step=7, step_s=1.0 + 2 * BEAT_S, bound_s=10.0)
    heartbeat.step_ended(7)
    assert heartbeat.beat(1.0) == Beat()
    heartbeat.step_started(8, 10.0)
    assert heartbeat.beat(1.0) == Beat(step=8, step_s=0.0, bound_s=10.0)


def test_repeated_step_number_is_another_step() -> None:
    heartbeat = Heartbeat()
    for _ in range(2):
        heartbeat.step_started(0, 10.0)
        assert heartbeat.beat(1.0).step_s == 0.0
        assert heartbeat.beat(1.0).step_s == 1.0


def test_heartbeat_thread_ends_with_its_receiver() -> None:
    beats: list[Beat] = []
    done = threading.Event()

    def send(beat: Beat) -> None:
        beats.append(beat)
        if len(beats) == 2:
            done.set()
            raise BrokenPipeError

    heartbeat = Heartbeat(send)
    heartbeat.start()
    assert done.wait(30)
    assert beats == [Beat(), Beat()]


def plan(step: int) -> StepPlan:
    return StepPlan(step=step, admitted=[], rows=[0], starts=[8], counts=[1], pages=[[]], tokens=[5], draws=[])


def test_heartbeat_contains_each_step_and_its_bound() -> None:
    heartbeat = Heartbeat()
    watcher = StepWatch(heartbeat)
    bounds = []
    for step in range(5):
        watcher.step_started(plan(step), 4.0 if step == 4 else None)
        beat = heartbeat.beat(1.0)
        bounds.append((beat.step, beat.bound_s))
        watcher.step_ended(plan(step), 1.0)
        assert heartbeat.beat(1.0) == Beat()
    assert bounds == [(0, FIRST_BOUND_S), (1, FIRST_BOUND_S), (2, FIRST_BOUND_S), (3, HANG_FLOOR_S), (4, 20.0)]


def test_oldest_of_several_steps_is_reported() -> None:
    heartbeat = Heartbeat()
    heartbeat.step_started(1, 10.0)
    heartbeat.step_started(2, 20.0)
    assert heartbeat.beat(1.0) == Beat(step=1, step_s=0.0, bound_s=20.0), "rank 0 may be computing its part of the later step"
    assert heartbeat.beat(1.0) == Beat(step=1, step_s=1.0, bound_s=20.0)
    heartbeat.step_ended(1)
    assert heartbeat.beat(1.0) == Beat(step=2, step_s=0.0, bound_s=20.0)


class RecordingWatcher:
    """Records steps."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int]] = []
        self.expected: list[float | None] = []

    def step_started(self, plan: StepPlan, expected_s: float | None) -> None:
        self.events.append(("started", plan.step))
        self.expected.append(expected_s)

    def step_ended(self, plan: StepPlan, wall_s: float) -> None:
        self.events.append(("ended", plan.step))

    def step_failed(self, plan: StepPlan) -> None:
        self.events.append(("failed", plan.step))


def test_failed_step_is_no_longer_timed() -> None:
    heartbeat = Heartbeat(lambda beat: None)
    watch = StepWatch(heartbeat)
    plan = StepPlan(step=3, admitted=[], rows=[], starts=[], counts=[], pages=[], tokens=[], draws=[], copies=[])
    watch.step_started(plan, None)
    assert heartbeat.beat(1.0).step == 3
    watch.step_failed(plan)
    assert heartbeat.beat(1.0).step is None


def test_loop_reports_every_step_and_its_fitted_time() -> None:
    class Once:
        """A channel with one request."""

        def __init__(self) -> None:
            self._messages = [[wire.encode(wire.Submit(1, make_request(5, 40)))]]

        def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
            if self._messages:
                return self._messages.pop()
            return None if block else []

        def wake(self) -> None:
            raise AssertionError("no grammar is compiled in a thread")

        def send(self, message: bytes) -> None:
            pass

    watcher = RecordingWatcher()
    now = iter(range(10_000))
    EngineLoop(
        FakeRunner(64, 4),
        Limits(max_model_len=200, max_num_seqs=8, max_num_batched_tokens=64),
        Once(),
        clock=lambda: float(next(now)),
        watcher=watcher,
    ).run()
    steps = len(watcher.expected)
    assert steps >= 40 and [kind for kind, _ in watcher.events] == ["started", "ended"] * steps
    assert watcher.expected[0] is None
    assert watcher.expected[-1] is not None and watcher.expected[-1] > 0
