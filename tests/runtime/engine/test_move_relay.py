"""Routing of move reports to routers, and the end of released requests."""

import pytest

from phalanx_api import moves, wire
from phalanx_runtime.engine.move_relay import MoveOrder, MoveRelay, MoveReport
from tests.runtime.fake_runner import make_request

OUT = moves.MoveOut(move="m", handle=7, epoch=0, prepared=moves.Prepared(move="m", cached_tokens=0, addresses=[], key=b"k"))
IN = wire.Prepare("m", make_request(3, 4))
FROZEN = moves.Frozen(move="m", epoch=0, num_output=1, num_computed=3)
FAILED = moves.MoveFailed("m", "lease", "lease expired")


class RelayEnds:
    """Records both ends of a relay."""

    def __init__(self) -> None:
        self.sent: list[MoveOrder] = []
        self.ended: list[int] = []
        self.reports: list[MoveReport] = []
        self.relay = MoveRelay(self.sent.append, self.ended.append)

    def order(self, *frames: MoveOrder) -> None:
        for frame in frames:
            self.relay.order(frame, self.reports.append)


def test_requesting_router_receives_updates_until_it_decides() -> None:
    ends = RelayEnds()
    ends.order(OUT)
    ends.relay.deliver(FROZEN)
    ends.order(moves.Thaw("m"))
    ends.relay.deliver(FAILED)
    assert ends.reports == [FROZEN]
    assert ends.sent == [OUT, moves.Thaw("m")]


@pytest.mark.parametrize("reports", [[], [FAILED]], ids=["frozen", "thawed by its lease"])
def test_a_released_request_ends_here(reports: list[MoveReport]) -> None:
    ends = RelayEnds()
    ends.order(OUT)
    for report in reports:
        ends.relay.deliver(report)
    ends.order(moves.Release("m"), moves.Release("m"))
    assert ends.ended == [7]


def test_abandoned_move_is_reported_once() -> None:
    ends = RelayEnds()
    ends.order(IN)
    ends.relay.deliver(FAILED)
    ends.relay.deliver(FAILED)
    assert ends.reports == [FAILED]
    assert ends.ended == []


@pytest.mark.parametrize("reports", [[], [FAILED]], ids=["open", "failed"])
@pytest.mark.parametrize("loss", ["router", "incarnation"])
def test_lost_router_or_incarnation_receives_no_updates(loss: str, reports: list[MoveReport]) -> None:
    """Nothing is kept of its moves, also of those that had failed."""
    ends = RelayEnds()
    handler = ends.reports.append
    ends.relay.order(OUT, handler)
    for report in reports:
        ends.relay.deliver(report)
    if loss == "router":
        ends.relay.unregister_handler(handler)
    else:
        ends.relay.clear()
    ends.relay.deliver(FROZEN)
    ends.order(moves.Release("m"))
    assert (ends.reports, ends.ended) == (reports, [])
