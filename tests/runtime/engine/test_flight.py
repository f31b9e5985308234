"""What an engine writes to its flight recorder."""

from phalanx_api import moves, wire
from phalanx_api.flight.entries import EngineStep, PageTransfer, Preemption
from tests.flight import RecordedEntries
from tests.runtime.engine.stepped_engine import SteppedEngine, out
from tests.runtime.fake_runner import make_request


def test_each_step_is_recorded_with_its_work() -> None:
    recorder = RecordedEntries()
    engine = SteppedEngine(recorder=recorder)
    engine.turn(*[wire.Submit(handle, make_request(12, 5, seed=handle)) for handle in (1, 2)], times=12)
    steps = recorder.of(EngineStep)
    assert [step.step for step in steps] == list(range(1, len(steps) + 1))
    assert sum(step.prefill_tokens for step in steps) == 24
    assert sum(step.decodes for step in steps) == 2 * 4, "the first token of each comes from its prompt"
    assert all(step.free_pages < step.total_pages == 40 and step.seconds >= 0 for step in steps)
    assert {step.running for step in steps} == {2} and {step.waiting for step in steps} == {0}


def test_preemptions_and_moves_are_recorded() -> None:
    recorder = RecordedEntries()
    engine = SteppedEngine(num_pages=16, recorder=recorder)
    engine.turn(*[wire.Submit(handle, make_request(12, 26, seed=handle)) for handle in (1, 2)], times=14)
    engine.turn(out(handle=2), times=20)
    engine.turn(moves.Release("m"), times=30)
    (preemption,) = recorder.of(Preemption)
    assert len(preemption.requests) == engine.load.preemptions == 1
    transfers = recorder.of(PageTransfer)
    assert [transfer.phase for transfer in transfers] == ["MoveOut", "Frozen", "Release"]
    assert {transfer.move for transfer in transfers} == {"m"}
