"""The condition `Speculating`, from router reports."""

from dataclasses import replace
from typing import Any

import pytest

from phalanx_api.conditions import find_condition
from phalanx_operator.decide.conditions import traffic
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import ObservedGroup
from tests.control.builders import NOW, make_group, make_service, make_snapshot
from tests.control.summaries import fleet_of, group, summary
from tests.control.worlds import World

DRAFT = {"method": "Draft", "draftModel": "hf://org/small"}
WHY = "draft model small cannot be loaded: no tensors"
LATER = "2027-01-01T00:00:00Z"
READY = (make_group("a"), make_group("b"))


def engine(speculative: dict[str, Any] | None) -> Any:
    return make_service(engine={"speculative": speculative} if speculative else {}).spec.engine


@pytest.mark.parametrize(
    ("groups", "fleet", "verdict"),
    [
        (READY, fleet_of(summary(group("a"), group("b"))), ("True", "Proposing", "")),
        (READY, fleet_of(summary(group("a"), group("b", draft_lost=WHY))), ("False", "DraftLost", f"b: {WHY}")),
        (READY, fleet_of(summary(group("a"))), ("True", "Proposing", "")),
        (READY, fleet_of(summary(group("x", draft_lost=WHY))), ("Unknown", "NoReadyGroup", "")),
        ((make_group("a", "old"),), fleet_of(summary(group("a", draft_lost=WHY))), ("Unknown", "NoReadyGroup", "")),
        ((make_group("a", ready=False),), fleet_of(summary(group("a", draft_lost=WHY))), ("Unknown", "NoReadyGroup", "")),
        ((), Fleet(), ("Unknown", "NoReadyGroup", "")),
    ],
    ids=[
        "all speculate",
        "one lost its draft",
        "one is not reported",
        "an unknown group",
        "an older revision",
        "not ready",
        "no group",
    ],
)
def test_speculation_condition_table(groups: tuple[ObservedGroup, ...], fleet: Fleet, verdict: tuple[str, str, str]) -> None:
    snapshot = make_snapshot(*groups)
    status = traffic.with_speculating_condition(snapshot.status, engine(DRAFT), snapshot, "new", fleet, NOW)
    condition = find_condition(status.conditions, "Speculating")
    assert condition and (condition.status, condition.reason, condition.message) == verdict


def test_freshest_report_of_a_group_counts() -> None:
    fleet = fleet_of(summary(group("a", state="suspect", draft_lost=WHY)), summary(group("a")))
    assert fleet.groups["a"].engine.draft_loss == ""


@pytest.mark.parametrize("speculative", [None, {"method": "None"}])
def test_condition_exists_only_with_speculation(speculative: dict[str, Any] | None) -> None:
    snapshot = make_snapshot(*READY)
    before = traffic.with_speculating_condition(
        snapshot.status, engine({"method": "NGram"}), snapshot, "new", fleet_of(summary(group("a"))), NOW
    )
    after = traffic.with_speculating_condition(before, engine(speculative), snapshot, "new", Fleet(), LATER)
    assert find_condition(before.conditions, "Speculating") and not find_condition(after.conditions, "Speculating")


def test_silent_routers_keep_the_condition() -> None:
    snapshot = make_snapshot(*READY)
    lost = traffic.with_speculating_condition(
        snapshot.status, engine(DRAFT), snapshot, "new", fleet_of(summary(group("a", draft_lost=WHY))), NOW
    )
    snapshot = replace(snapshot, status=lost)
    assert traffic.with_speculating_condition(lost, engine(DRAFT), snapshot, "new", Fleet(polled=1), LATER) == lost


async def test_lost_draft_is_reported_until_its_group_leaves() -> None:
    world = World(engine={"speculative": DRAFT})
    await world.settle()
    world.cluster.start_router_pods()
    (name,) = world.groups
    world.routers.summary = summary(group(name))
    await world.reconcile()
    assert world.condition("Speculating") == ("True", "Proposing")
    assert ("Normal", "Proposing") not in world.events()
    world.routers.summary = summary(group(name, draft_lost=WHY))
    await world.reconcile()
    assert world.condition("Speculating") == ("False", "DraftLost")
    assert world.ready == ("True", "Ready"), "it still serves"
    assert ("Warning", "DraftLost") in world.events()
    assert await world.reconcile() == []
    world.routers.summary = summary(group(name))
    await world.reconcile()
    assert world.condition("Speculating") == ("True", "Proposing")
    assert ("Normal", "Proposing") in world.events()
