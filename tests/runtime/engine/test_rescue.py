"""Requests that the engine loop offers to other groups before it preempts them, over a fake carrier."""

import pytest

from phalanx_api import moves, wire
from tests.runtime.engine.test_moves import Engine, out
from tests.runtime.fake_runner import expected_output, make_request


def test_requests_are_offered_before_preemption() -> None:
    engine = Engine(num_pages=16)
    requests = {handle: make_request(12, 26, seed=handle) for handle in (1, 2)}
    engine.turn(*[wire.Submit(handle, request) for handle, request in requests.items()], times=8)
    engine.turn(times=6)
    asked = engine.of(moves.AskRescue)
    assert [one.handles for one in asked] == [[2]], "the last of the order, once"
    assert engine.load.preemptions == 0
    engine.turn(out(handle=2), times=20)
    assert engine.load.preemptions == 1, "the other one, since the victim is frozen"
    engine.turn(moves.Release("m"), times=30)
    assert engine.tokens(1) == expected_output(requests[1])


@pytest.mark.parametrize("leaves", ["with pages", "computed anew"])
def test_offers_come_earlier_after_slow_departures(leaves: str) -> None:
    engine = Engine(depth=2)

    def until_asked(first: int) -> moves.AskRescue:
        """Three requests fill the pages; one of them is offered."""
        requests = [wire.Submit(first + more, make_request(12, 50, seed=first + more)) for more in range(3)]
        engine.turn(*requests)
        num_asked = len(engine.of(moves.AskRescue))
        while len(engine.of(moves.AskRescue)) == num_asked:
            engine.turn()
        return engine.of(moves.AskRescue)[-1]

    before = until_asked(1)
    assert before.handles[0] == 3
    engine.now += 0.5
    engine.turn(*([out(3)] if leaves == "with pages" else []), times=3)
    engine.turn(moves.Release("m") if leaves == "with pages" else wire.Abort([3]), wire.Abort([1, 2]), times=3)
    after = until_asked(4)
    assert before.within_s < 0.25 < after.within_s
    assert engine.load.preemptions == 0


def test_without_help_requests_are_preempted_as_ever() -> None:
    engine = Engine(num_pages=16)
    requests = {handle: make_request(12, 26, seed=handle) for handle in (1, 2)}
    engine.turn(*[wire.Submit(handle, request) for handle, request in requests.items()], times=80)
    assert engine.load.preemptions > 0
    assert engine.of(moves.AskRescue)
    assert [engine.tokens(handle) for handle in requests] == [expected_output(request) for request in requests.values()]
