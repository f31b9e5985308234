"""Requests that the engine loop offers to other groups before it preempts them, over a fake transport."""

import pytest

from phalanx_api import moves, wire
from tests.runtime.engine.stepped_engine import SteppedEngine, out
from tests.runtime.fake_runner import expected_output, make_request


def test_requests_are_offered_before_preemption() -> None:
    engine = SteppedEngine(num_pages=16)
    requests = {handle: make_request(12, 26, seed=handle) for handle in (1, 2)}
    engine.turn(*[wire.Submit(handle, request) for handle, request in requests.items()], times=8)
    engine.turn(times=6)
    rescues = engine.of(moves.RescueRequest)
    assert [rescue.handles for rescue in rescues] == [[2]], "the first victim, once"
    assert engine.load.preemptions == 0
    engine.turn(out(handle=2), times=20)
    assert engine.load.preemptions == 1, "of the other request, since the victim is frozen"
    engine.turn(moves.Release("m"), times=30)
    assert engine.tokens(1) == expected_output(requests[1])


@pytest.mark.parametrize("departure", ["with pages", "recomputed"])
def test_offers_come_earlier_after_slow_departures(departure: str) -> None:
    engine = SteppedEngine(depth=2)

    def until_offer(first: int) -> moves.RescueRequest:
        """Three requests fill the page pool; one of them is offered."""
        requests = [wire.Submit(first + more, make_request(12, 50, seed=first + more)) for more in range(3)]
        engine.turn(*requests)
        num_rescues = len(engine.of(moves.RescueRequest))
        while len(engine.of(moves.RescueRequest)) == num_rescues:
            engine.turn()
        return engine.of(moves.RescueRequest)[-1]

    before = until_offer(1)
    assert before.handles[0] == 3
    engine.now += 0.5
    engine.turn(*([out(3)] if departure == "with pages" else []), times=3)
    engine.turn(moves.Release("m") if departure == "with pages" else wire.Abort([3]), wire.Abort([1, 2]), times=3)
    after = until_offer(4)
    assert before.within_s < 0.25 < after.within_s
    assert engine.load.preemptions == 0


def test_requests_without_another_group_are_preempted() -> None:
    engine = SteppedEngine(num_pages=16)
    requests = {handle: make_request(12, 26, seed=handle) for handle in (1, 2)}
    engine.turn(*[wire.Submit(handle, request) for handle, request in requests.items()], times=80)
    assert engine.load.preemptions > 0
    assert engine.of(moves.RescueRequest)
    assert [engine.tokens(handle) for handle in requests] == [expected_output(request) for request in requests.values()]
