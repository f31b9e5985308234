import itertools
import threading
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest
import zmq

from phalanx_api import wire
from phalanx_api.roofline import DeviceRates, ModelShape, Roofline
from phalanx_api.trace import Trace
from phalanx_runtime.core.admission import Limits
from phalanx_runtime.core.scheduling.config import SchedulerConfig
from phalanx_runtime.core.step_plan import StepPlan, StepResult
from phalanx_runtime.engine.channel import ZmqChannel, open_channel
from phalanx_runtime.engine.loop import EngineLoop
from phalanx_runtime.errors import PeerLost
from tests.runtime.engine.stepped_engine import SteppedEngine
from tests.runtime.fake_runner import FakeRunner, expected_output, make_request

LIMITS = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16, max_waiting=3)


class Script:
    """A channel that returns one batch of frames per turn, then is closed; records sent frames."""

    def __init__(self, *batches: list[wire.ToEngine | bytes]) -> None:
        self._batches = [[m if isinstance(m, bytes) else wire.encode(m) for m in batch] for batch in batches]
        self.sent: list[wire.FromEngine] = []
        self.blocked: list[bool] = []

    def receive(self, block: bool, timeout_s: float | None = None) -> list[bytes] | None:
        self.blocked.append(block)
        if self._batches:
            return self._batches.pop(0)
        return None if block else []

    def send(self, message: bytes) -> None:
        frame = wire.decode_from_engine(message)
        assert isinstance(frame, wire.Tokens | wire.Refused | wire.Load | wire.PageChanges)
        self.sent.append(frame)

    def wake(self) -> None:
        raise AssertionError("no grammar is compiled")

    def of(self, kind: type[wire.Load]) -> list[wire.Load]:
        return [frame for frame in self.sent if isinstance(frame, kind)]


class Clock:
    """Advances by `tick_s` at each call."""

    def __init__(self, tick_s: float) -> None:
        self.now = 0.0
        self.tick_s = tick_s

    def __call__(self) -> float:
        self.now += self.tick_s
        return self.now


class StepTimes:
    """A watcher that records the time of each step."""

    def __init__(self) -> None:
        self.walls_s: list[float] = []

    def step_started(self, plan: StepPlan, expected_s: float | None) -> None:
        pass

    def step_ended(self, plan: StepPlan, wall_s: float) -> None:
        self.walls_s.append(wall_s)

    def step_failed(self, plan: StepPlan) -> None:
        raise AssertionError("memory suffices")


def run_script(script: Script, tick_s: float = 0.001) -> EngineLoop:
    loop = EngineLoop(FakeRunner(64, 4), LIMITS, script, Clock(tick_s))
    loop.run()
    return loop


def tokens_of(script: Script, handle: int) -> list[int]:
    frames = [frame for frame in script.sent if isinstance(frame, wire.Tokens)]
    return [t for frame in frames for h, t in zip(frame.handles, frame.tokens, strict=True) if h == handle]


def test_one_frame_per_step_has_all_requests_tokens() -> None:
    requests = {h: make_request(3, 3, seed=h) for h in range(3)}
    script = Script([wire.Submit(h, r) for h, r in requests.items()])
    run_script(script)
    frames = [frame for frame in script.sent if isinstance(frame, wire.Tokens)]
    assert [frame.handles for frame in frames] == [[0, 1, 2]] * 3
    assert {h: tokens_of(script, h) for h in requests} == {h: expected_output(r) for h, r in requests.items()}
    assert [end.handle for end in frames[-1].finished] == [0, 1, 2]


def test_loop_blocks_only_without_work() -> None:
    script = Script([wire.Submit(1, make_request(3, 3))])
    run_script(script)
    assert script.blocked == [True, False, False, True]


def test_an_abort_takes_effect_before_the_next_step() -> None:
    script = Script([wire.Submit(1, make_request(3, 9)), wire.Submit(2, make_request(3, 2))], [wire.Abort([1, 77])])
    run_script(script)
    assert len(tokens_of(script, 1)) == 1
    assert len(tokens_of(script, 2)) == 2


def test_refused_and_finished_requests_are_answered_at_once() -> None:
    script = Script([wire.Submit(1, make_request(64, 1, epoch=3)), wire.Submit(2, make_request(3, 2, delivered=[5, 6], epoch=4))])
    run_script(script)
    refused, over = [frame for frame in script.sent if not isinstance(frame, wire.Load)]
    assert isinstance(refused, wire.Refused)
    assert (refused.handle, refused.epoch, refused.status, refused.code) == (1, 3, 400, "context_length_exceeded")
    assert refused.retry_after_s is None
    assert over == wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[wire.Finished(2, 4, "length")])


@pytest.mark.parametrize(
    ("tick_s", "steps_before", "retry_after_s"),
    [(0.001, False, 1.0), (2.0, True, 36.0), (1000.0, True, 60.0)],
    ids=["no rate known", "backlog over rate", "never more than a minute"],
)
def test_full_queue_gives_the_retry_time(tick_s: float, steps_before: bool, retry_after_s: float) -> None:
    warm: list[list[wire.ToEngine | bytes]] = [[wire.Submit(0, make_request(1, 1))], []] if steps_before else []
    script = Script(*warm, [wire.Submit(h, make_request(n, 1)) for h, n in [(1, 4), (2, 5), (3, 6), (4, 7)]])
    run_script(script, tick_s)
    refused = next(frame for frame in script.sent if isinstance(frame, wire.Refused))
    assert (refused.handle, refused.status) == (4, 429)
    assert refused.retry_after_s == pytest.approx(retry_after_s, rel=0.1)


def test_load_is_reported_every_50_ms_or_once_idle() -> None:
    script = Script([wire.Submit(1, make_request(3, 40))], [])
    run_script(script, tick_s=0.02 / 3)
    loads = script.of(wire.Load)
    # 40 steps of 20 ms (three clock calls each), a report after every third; then one when idle.
    assert 10 <= len(loads) <= 20
    assert (loads[0].running, loads[0].free_pages, loads[0].total_pages) == (0, 64, 64)
    assert [load.sequence for load in loads] == list(range(1, len(loads) + 1))
    assert (loads[-1].waiting, loads[-1].running, loads[-1].free_pages, loads[-1].leaks) == (0, 0, 64, 0)
    assert len(loads[-1].step_model) == 8
    assert loads[1].running == 1
    assert [load for load in loads[1:-1] if load.running == 0] == []


def test_load_has_the_use_of_the_devices() -> None:
    class Busy(FakeRunner):
        def finish(self) -> StepResult:
            return msgspec.structs.replace(super().finish(), busy_s=0.01)

    shape = ModelShape(layers=2, hidden=8, heads=4, kv_heads=2, head_dim=4, intermediate=16, vocab=32)
    rates = DeviceRates(name="test", copy_bytes_per_s=1e6, matmul_flops_per_s=1e8)
    script = Script([wire.Submit(1, make_request(3, 40))], [])
    roofline = Roofline(shape=shape, rates=rates, num_devices=1)
    EngineLoop(Busy(64, 4), LIMITS, script, Clock(0.02 / 3), roofline=roofline).run()
    *_, busy, idle = script.of(wire.Load)
    assert 0.3 < busy.device_busy <= 1 and busy.bandwidth_utilization > 0 and busy.flop_utilization > 0
    assert (idle.device_busy, idle.bandwidth_utilization, idle.flop_utilization) == (0, 0, 0)


def test_an_unreadable_request_ends_and_harms_no_other(caplog: pytest.LogCaptureFixture) -> None:
    unreadable = msgspec.msgpack.encode(["submit", 7, ["request", 3, "no list of tokens"]])
    script = Script([unreadable, wire.Submit(1, make_request(3, 2))])
    run_script(script)
    assert len(tokens_of(script, 1)) == 2
    assert "frame for the engine cannot be read" in caplog.messages
    [refused] = [frame for frame in script.sent if isinstance(frame, wire.Refused)]
    assert (refused.handle, refused.epoch, refused.status, refused.code) == (7, 3, 500, "unreadable_request")


@pytest.mark.parametrize("frame", [b"\xc1", b"\x93\xa6submit\xa1x\x90", b"\x91\xa5abort"])
def test_unknown_frame_ends_the_incarnation(frame: bytes) -> None:
    with pytest.raises(msgspec.DecodeError, match="names no request"):
        run_script(Script([frame]))


@pytest.mark.parametrize(("tick_s", "num_checks"), [(0.001, 1), (0.5, 4)], ids=["at most once a second", "whenever idle"])
def test_pages_are_checked_once_a_second(tick_s: float, num_checks: int) -> None:
    """Each check counts the leaked page; a busy engine is not checked."""
    batches: list[list[wire.ToEngine | bytes]] = [[wire.Submit(handle, make_request(3, 1))] for handle in (1, 2, 3)]
    script = Script(*batches)
    loop = EngineLoop(FakeRunner(64, 4), LIMITS, script, Clock(tick_s))
    loop.scheduler.pool.allocate(1)
    loop.run()
    assert script.of(wire.Load)[-1].leaks == num_checks


def test_page_leak_is_logged_and_harmless(caplog: pytest.LogCaptureFixture) -> None:
    script = Script([wire.Submit(1, make_request(3, 2))])
    loop = EngineLoop(FakeRunner(64, 4), LIMITS, script, Clock(1.0))
    loop.scheduler.pool.allocate(1)
    loop.run()
    assert len(tokens_of(script, 1)) == 2
    defects = [vars(record)["why"] for record in caplog.records if record.message == "page pool is wrong"]
    assert any("page 0 has 1 holders, expected 0" in defect for defect in defects)
    assert [load.leaks for load in script.of(wire.Load)][-1] == 2, "counted each time the engine becomes idle"


def test_cached_tokens_are_reported_at_end_and_in_load() -> None:
    script = Script([wire.Submit(1, make_request(21, 2))], [], [], [wire.Submit(2, make_request(21, 2))])
    run_script(script)
    ends = [end for frame in script.sent if isinstance(frame, wire.Tokens) for end in frame.finished]
    assert [end.cached_tokens for end in ends] == [0, 20]
    reported = [(frame.handles, frame.cached) for frame in script.sent if isinstance(frame, wire.Tokens) and frame.cached]
    assert reported == [([2], [wire.Cached(2, 0, 20)])], "once, with the first token"
    load = script.of(wire.Load)[-1]
    assert (load.prefix_queried_tokens, load.prefix_hit_tokens, load.preemptions) == (42, 20, 0)


def test_requests_run_in_the_order_of_the_policy() -> None:
    first: list[wire.ToEngine | bytes] = [
        wire.Submit(h, msgspec.structs.replace(make_request(3, 2), priority=-h)) for h in (1, 2, 3)
    ]
    script = Script(first)
    limits = Limits(max_model_len=64, max_num_seqs=1, max_num_batched_tokens=16)
    EngineLoop(FakeRunner(64, 4), limits, script, Clock(0.001), SchedulerConfig(scheduling_policy="priority")).run()
    frames = [frame for frame in script.sent if isinstance(frame, wire.Tokens)]
    assert [end.handle for frame in frames for end in frame.finished] == [3, 2, 1]


@pytest.mark.parametrize("depth", [2, 3])
def test_plans_in_flight_equal_the_runners_depth(depth: int) -> None:
    requests = {h: make_request(5, 6, seed=h) for h in range(4)}
    script = Script([wire.Submit(h, r) for h, r in requests.items()], [], [], [wire.Abort([3])])
    runner = FakeRunner(64, 4, depth)
    loop = EngineLoop(runner, LIMITS, script, Clock(0.001))
    loop.run()
    assert runner.most_in_flight == depth
    assert {h: tokens_of(script, h) for h in range(3)} == {h: expected_output(requests[h]) for h in range(3)}
    assert len(tokens_of(script, 3)) < 6
    assert loop.scheduler.check() == []


def test_steps_start_before_the_previous_tokens_are_known() -> None:
    """Asynchronous scheduling. The request that stops has one token computed in vain."""
    requests = {h: make_request(5, 6, seed=h) for h in range(3)}
    stop = expected_output(requests[0])[2]
    requests[0] = make_request(5, 6, seed=0, stop=[stop])
    script = Script([wire.Submit(h, r) for h, r in requests.items()])
    runner = FakeRunner(64, 4, runs_ahead=True)
    loop = EngineLoop(runner, replace(LIMITS, async_scheduling=True), script, Clock(0.001))
    loop.run()
    assert runner.most_in_flight == 2 and runner.num_pending > 8
    assert {h: tokens_of(script, h) for h in requests} == {h: expected_output(r) for h, r in requests.items()}
    assert script.of(wire.Load)[-1].wasted_tokens == 1
    assert loop.scheduler.check() == [] and loop.scheduler.is_idle()


def test_pipelined_step_time_excludes_its_predecessor() -> None:
    """Two plans are always in flight, with three clock calls of 1 s between two ends."""
    script = Script([wire.Submit(h, make_request(1, 20, seed=h)) for h in range(2)])
    watcher = StepTimes()
    EngineLoop(FakeRunner(64, 4, depth=2), LIMITS, script, Clock(1.0), watcher=watcher).run()
    assert len(watcher.walls_s) > 20
    assert max(watcher.walls_s[2:]) <= 3.0
    loads = script.of(wire.Load)
    assert len(loads) > 20, "one per step"
    assert 0 < max(load.longest_step_s for load in loads[3:]) <= 3.0, "the scheduler gets the same times"


class LostRunner(FakeRunner):
    def finish(self) -> StepResult:
        raise PeerLost("rank 1 is lost")


def test_a_lost_peer_ends_the_loop() -> None:
    loop = EngineLoop(LostRunner(64, 4), LIMITS, Script([wire.Submit(1, make_request())]), Clock(0.001))
    with pytest.raises(PeerLost):
        loop.run()


def test_a_lost_peer_ends_the_engine_and_its_socket(tmp_path: Path) -> None:
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = context.socket(zmq.PAIR)
    endpoint = f"ipc://{tmp_path}/engine"
    server.bind(endpoint)

    def serve() -> None:
        with open_channel(endpoint) as channel:
            EngineLoop(LostRunner(64, 4), LIMITS, channel).run()

    with ThreadPoolExecutor(1) as pool:
        engine = pool.submit(serve)
        server.send(wire.encode(wire.Submit(1, make_request())))
        with pytest.raises(PeerLost):
            engine.result(10)
    context.destroy(linger=0)


def test_frames_pass_the_socket_and_closing_ends_the_loop(tmp_path: Path) -> None:
    endpoint = f"ipc://{tmp_path}/engine"
    server_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    engine_context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    server = server_context.socket(zmq.PAIR)
    server.bind(endpoint)
    channel = ZmqChannel(endpoint, engine_context)
    ended = threading.Event()

    def serve() -> None:
        EngineLoop(FakeRunner(64, 4), LIMITS, channel).run()
        channel.send(b"dropped")
        channel.close()
        ended.set()

    thread = threading.Thread(target=serve)
    thread.start()
    request = make_request(3, 5)
    server.send(wire.encode(wire.Submit(9, request)))
    tokens: list[int] = []
    while len(tokens) < 5:
        assert server.poll(10_000), "no frame"
        frame = wire.decode_from_engine(server.recv())
        if isinstance(frame, wire.Tokens):
            tokens += frame.tokens
    assert tokens == expected_output(request)
    engine_context.term()
    thread.join(10)
    assert ended.is_set()
    server.close()
    server_context.term()


def queue_times(script: Script) -> list[float]:
    return [wait_s for frame in script.sent if isinstance(frame, wire.Tokens) for wait_s in frame.queue_times_s]


def test_queue_time_is_reported_once_at_the_first_step() -> None:
    requests: list[wire.ToEngine | bytes] = [
        wire.Submit(h, make_request(3, 6, seed=h)) for h in range(5)
    ]  # four rows: the last request waits
    script = Script(requests[:2], requests[2:])
    run_script(script)
    waits = queue_times(script)
    assert len(waits) == 5 and all(wait_s > 0 for wait_s in waits)
    assert waits[-1] > 2 * max(waits[:4])


def test_preemption_adds_no_queue_time() -> None:
    requests: list[wire.ToEngine | bytes] = [wire.Submit(h, make_request(8, 16, seed=h)) for h in range(4)]
    script = Script(requests[:2], requests[2:])
    loop = EngineLoop(FakeRunner(14, 4), LIMITS, script, Clock(0.001))
    loop.run()
    assert loop.scheduler.num_preemptions > 0
    assert len(queue_times(script)) == 4


def test_traced_requests_report_their_times_again_after_preemptions() -> None:
    trace = Trace(trace_id="1" * 32, span_id="2" * 16)
    requests = [msgspec.structs.replace(make_request(8, 16, seed=h), trace=trace if h else None) for h in range(4)]
    submits: list[wire.ToEngine | bytes] = [wire.Submit(h, request) for h, request in enumerate(requests)]
    script = Script(submits[:2], submits[2:])
    loop = EngineLoop(FakeRunner(14, 4), LIMITS, script, Clock(0.001))
    loop.run()
    cached = [entry for frame in script.sent if isinstance(frame, wire.Tokens) for entry in frame.cached]
    times = [entry for entry in cached if entry.prefill is not None]
    assert {entry.handle for entry in times} == {1, 2, 3}, "those with a trace"
    num_again = len(times) - 3
    assert 0 < num_again <= loop.scheduler.num_preemptions
    again = [entry.prefill for entry in times[-num_again:] if entry.prefill is not None]
    assert all(sum(chunk.tokens for chunk in prefill.chunks) > 0 and prefill.submitted_ago_s > 0 for prefill in again)


def test_unserved_request_has_no_queue_time() -> None:
    requests: list[wire.ToEngine | bytes] = [wire.Submit(h, make_request(3, 6, seed=h)) for h in range(5)]
    script = Script(requests[:2], [*requests[2:], wire.Abort([4])])
    loop = run_script(script)
    assert len(queue_times(script)) == 4 and not loop.num_unstarted


def test_refusal_is_reported_before_the_next_step() -> None:
    warm: list[list[wire.ToEngine | bytes]] = [[wire.Submit(0, make_request(3, 40))], [], []]
    burst: list[wire.ToEngine | bytes] = [wire.Submit(h, make_request(4, 4, seed=h)) for h in range(1, 12)]
    script = Script(*warm, burst, [])
    run_script(script, tick_s=0.004)
    [at] = [i for i, frame in enumerate(script.sent) if isinstance(frame, wire.Load) and frame.refusals][:1]
    kinds = [type(frame) for frame in script.sent[:at]]
    last_refusal = max(i for i, kind in enumerate(kinds) if kind is wire.Refused)
    assert wire.Tokens not in kinds[last_refusal:]


class TimedScript(Script):
    """Records the time of each report."""

    def __init__(self, clock: Clock, *batches: list[wire.ToEngine | bytes]) -> None:
        super().__init__(*batches)
        self._clock = clock
        self.reports: list[tuple[float, wire.Load]] = []

    def send(self, message: bytes) -> None:
        super().send(message)
        if isinstance(self.sent[-1], wire.Load):
            self.reports.append((self._clock.now, self.sent[-1]))


def test_preemptions_are_reported_at_most_every_10_ms() -> None:
    limits, clock = Limits(max_model_len=64, max_num_seqs=4, max_num_batched_tokens=16), Clock(0.001)
    script = TimedScript(clock, [wire.Submit(h, make_request(6, 30, seed=h)) for h in range(4)])
    EngineLoop(FakeRunner(16, 4), limits, script, clock, SchedulerConfig(eviction_policy="lru")).run()
    pairs = [(b_s - a_s, b.preemptions - a.preemptions) for (a_s, a), (b_s, b) in itertools.pairwise(script.reports[:-1])]
    assert all(gap_s >= 0.01 for gap_s, _ in pairs)
    assert any(gap_s < 0.02 and rise for gap_s, rise in pairs), "some reports are sent before 50 ms"


def test_reports_contain_cache_changes() -> None:
    batches: list[list[wire.ToEngine | bytes]] = [[wire.Submit(h, make_request(21, 6, seed=h))] for h in range(30)]
    script = Script(*batches)
    loop = run_script(script, tick_s=0.003)
    frames = [frame for frame in script.sent if isinstance(frame, wire.PageChanges)]
    found: set[bytes] = set()
    for frame in frames:
        for is_added, key in frame.changes:
            (found.add if is_added else found.remove)(key)
    assert len(frames) > 2
    assert found == set(loop.scheduler.pool.keys())
    assert [frame.first for frame in frames] == [sum(len(f.changes) for f in frames[:i]) for i in range(len(frames))]
    assert any(not is_added for frame in frames for is_added, _ in frame.changes), "some pages are evicted"


def test_size_of_the_host_tier_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    engine = SteppedEngine(num_host_pages=16)
    with caplog.at_level("INFO"):
        engine.loop.scheduler.pool.host.want(8, "16 pages find no more than 8")
        assert engine.load.host_total_pages == 16, "it is fixed"
        assert engine.load.leaks == 0
    (record,) = [record for record in caplog.records if record.message == "the host tier gets another size"]
    assert record.__dict__["why"] == "16 pages find no more than 8"
