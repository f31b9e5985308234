"""What a router writes to its flight recorder."""

import msgspec

from phalanx_api.cost import StepModel
from phalanx_api.flight.entries import ClockOffset, GroupSize, HotspotChange, MovePlan, MoveRefusal, Shedding
from phalanx_router.balancing.balancer import BalanceDecision
from phalanx_router.balancing.hotspots import Transition
from phalanx_router.balancing.records import NoMove, PlannedCopy, PlannedMove
from phalanx_router.decisions import FLEET_INTERVAL_S, DecisionRecorder
from phalanx_router.routing.view_builder import GroupReport
from tests.flight import RecordedEntries
from tests.router.loads import ROOM
from tests.router.views import make_group_view

MODEL = StepModel(fixed_s=0.01, token_s=1e-4, knee_tokens=8, context_s=1e-7, attention_s=0.0)
MOVE = PlannedMove(
    stream="7", source="a/1", target="b/1", transfer="precopy", rung="migrate", context=9, bytes_per_s=None, why="hot"
)
COPY = PlannedCopy(stream="7", source="a/1", target="b/1", num_pages=2, bytes_per_s=None, why="prefix")


class Scene:
    """A recorder and a clock."""

    def __init__(self) -> None:
        self.now = 100.0
        self.recorded = RecordedEntries()
        self.decisions = DecisionRecorder(self.recorded, lambda key: f"group {key[0]}", lambda: self.now)

    def decide(self, decision: BalanceDecision) -> None:
        self.decisions.decided(decision, lambda stream: f"cmpl-{stream}~{'0123456789abcdef' * 2}")


def test_a_tick_is_recorded_with_its_reasons() -> None:
    scene = Scene()
    hot = Transition(group="group a", cause="kv", why="pages are full")
    scene.decide(BalanceDecision(moves=[MOVE], copies=[COPY], transitions=[hot]))
    assert scene.recorded.of(HotspotChange) == [HotspotChange(at=100.0, group="group a", cause="kv", why="pages are full")]
    move, copy = scene.recorded.of(MovePlan)
    assert (move.request, move.source, move.target) == ("cmpl-7~01234567", "group a", "group b")
    assert (move.rung, move.transfer, move.why) == ("migrate", "precopy", "hot")
    assert (copy.rung, copy.transfer, copy.why) == ("replicate", "copy", "prefix")


def test_a_refusal_is_recorded_when_it_begins() -> None:
    scene = Scene()
    slots = NoMove("a/1", "migrate", "slots", "the budget for slots is exhausted")
    for refusals in ([slots], [slots], [], [slots], [NoMove("a/1", "migrate", "bytes", "another reason")]):
        scene.decide(BalanceDecision(refusals=refusals))
    assert [refusal.code for refusal in scene.recorded.of(MoveRefusal)] == ["slots", "slots", "bytes"]


def test_shedding_nothing_is_not_recorded() -> None:
    scene = Scene()
    scene.decisions.shed(0, "no request is queued")
    scene.decisions.shed(3, "every group is loaded")
    assert [entry.requests for entry in scene.recorded.of(Shedding)] == [3]


def test_clocks_are_recorded_by_the_shortest_delay() -> None:
    scene = Scene()
    report, silent = GroupReport(key="a/1", group="group a"), GroupReport(key="b/1", group="group b")
    for sequence, delay_s in enumerate([0.5, 0.1, 0.4], 1):
        load = msgspec.structs.replace(ROOM, sequence=sequence, unix_s=50.0 + sequence)
        report.record(load, scene.now + sequence, 48.0 + sequence + delay_s)
    for later_s in (60.0, 120.0):  # an idle group repeats its last report
        report.record(load, scene.now + later_s, 48.0 + later_s)
    scene.decisions.fleet([report, silent], [])
    scene.decisions.fleet([report, silent], [])
    (offset,) = scene.recorded.of(ClockOffset)
    assert (offset.group, round(offset.ahead_s, 6)) == ("group a", 1.9), "two seconds ahead, less the shortest delay"
    for sequence in (1, 2):
        silent.record(msgspec.structs.replace(ROOM, sequence=sequence, unix_s=50.0 + sequence), scene.now, 50.0 + sequence)
    scene.decisions.fleet([report, silent], [])
    assert [entry.group for entry in scene.recorded.of(ClockOffset)] == ["group a", "group b"], "b as soon as it is known"
    scene.now += FLEET_INTERVAL_S
    scene.decisions.fleet([report], [make_group_view("a/1", group="group a", step_model=MODEL)])
    (shape,) = scene.recorded.of(GroupSize)
    assert (shape.group, StepModel.from_coefficients(shape.step_model)) == ("group a", MODEL)
    assert len(scene.recorded.of(ClockOffset)) == 3
