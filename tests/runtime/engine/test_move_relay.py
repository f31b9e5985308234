"""Who hears of a move, for how long, and that a request that was released ends here whatever the engine said."""

import pytest

from phalanx_api import moves, wire
from phalanx_runtime.engine.move_relay import MoveOrder, MoveRelay, MoveReport
from tests.runtime.fake_runner import make_request

OUT = moves.MoveOut(move="m", handle=7, epoch=0, prepared=moves.Prepared(move="m", held_tokens=0, addresses=[], key=b"k"))
IN = wire.Prepare("m", make_request(3, 4))
FROZEN = moves.Frozen(move="m", epoch=0, num_output=1, num_computed=3)
FAILED = moves.MoveFailed("m", "lease", "it took too long")


class Ends:
    """Both ends of a relay."""

    def __init__(self) -> None:
        self.sent: list[MoveOrder] = []
        self.let_go: list[int] = []
        self.heard: list[MoveReport] = []
        self.relay = MoveRelay(self.sent.append, self.let_go.append)

    def order(self, *frames: MoveOrder) -> None:
        for frame in frames:
            self.relay.order(frame, self.heard.append)


def test_requesting_router_receives_updates_until_it_decides() -> None:
    ends = Ends()
    ends.order(OUT)
    ends.relay.tell(FROZEN)
    ends.order(moves.Thaw("m"))
    ends.relay.tell(FAILED)
    assert ends.heard == [FROZEN]
    assert ends.sent == [OUT, moves.Thaw("m")]


@pytest.mark.parametrize("said", [[], [FAILED]], ids=["frozen", "thawed by its lease"])
def test_a_released_request_ends_here(said: list[MoveReport]) -> None:
    ends = Ends()
    ends.order(OUT)
    for report in said:
        ends.relay.tell(report)
    ends.order(moves.Release("m"), moves.Release("m"))
    assert ends.let_go == [7]


def test_abandoned_move_is_reported_once() -> None:
    ends = Ends()
    ends.order(IN)
    ends.relay.tell(FAILED)
    ends.relay.tell(FAILED)
    assert ends.heard == [FAILED]
    assert ends.let_go == []


@pytest.mark.parametrize("how", ["left", "next incarnation"])
def test_lost_router_or_incarnation_receives_no_updates(how: str) -> None:
    ends = Ends()
    hear = ends.heard.append
    ends.relay.order(OUT, hear)
    if how == "left":
        ends.relay.leave(hear)
    else:
        ends.relay.clear()
    ends.relay.tell(FROZEN)
    ends.order(moves.Release("m"))
    assert (ends.heard, ends.let_go) == ([], [])
