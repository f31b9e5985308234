"""The condition that says whether groups propose tokens as the service asks: as a table, and from what routers say."""

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


def asking(speculative: dict[str, Any] | None) -> Any:
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
    ids=["all propose", "one lost it", "one is not seen", "another's group", "an older revision", "not ready", "no group"],
)
def test_speculation_condition_table(groups: tuple[ObservedGroup, ...], fleet: Fleet, verdict: tuple[str, str, str]) -> None:
    seen = make_snapshot(*groups)
    told = traffic.with_speculating_condition(seen.status, asking(DRAFT), seen, "new", fleet, NOW)
    condition = find_condition(told.conditions, "Speculating")
    assert condition and (condition.status, condition.reason, condition.message) == verdict


def test_the_router_that_sees_a_group_freshest_is_believed() -> None:
    fleet = fleet_of(summary(group("a", state="suspect", draft_lost=WHY)), summary(group("a")))
    assert fleet.groups["a"].draft_lost == ""


@pytest.mark.parametrize("speculative", [None, {"method": "None"}])
def test_condition_exists_only_with_speculation(speculative: dict[str, Any] | None) -> None:
    seen = make_snapshot(*READY)
    before = traffic.with_speculating_condition(
        seen.status, asking({"method": "NGram"}), seen, "new", fleet_of(summary(group("a"))), NOW
    )
    after = traffic.with_speculating_condition(before, asking(speculative), seen, "new", Fleet(), LATER)
    assert find_condition(before.conditions, "Speculating") and not find_condition(after.conditions, "Speculating")


def test_while_no_router_answers_it_stays_as_it_was() -> None:
    seen = make_snapshot(*READY)
    lost = traffic.with_speculating_condition(
        seen.status, asking(DRAFT), seen, "new", fleet_of(summary(group("a", draft_lost=WHY))), NOW
    )
    seen = replace(seen, status=lost)
    assert traffic.with_speculating_condition(lost, asking(DRAFT), seen, "new", Fleet(asked=1), LATER) == lost


async def test_lost_draft_is_reported_until_its_group_leaves() -> None:
    world = World(engine={"speculative": DRAFT})
    await world.settle()
    world.cluster.start_router_pods()
    (name,) = world.groups
    world.routers.says = summary(group(name))
    await world.look()
    assert world.condition("Speculating") == ("True", "Proposing")
    assert ("Normal", "Proposing") not in world.notes()
    world.routers.says = summary(group(name, draft_lost=WHY))
    await world.look()
    assert world.condition("Speculating") == ("False", "DraftLost")
    assert world.ready == ("True", "Ready"), "it serves as before"
    assert ("Warning", "DraftLost") in world.notes()
    assert await world.look() == []
    world.routers.says = summary(group(name))
    await world.look()
    assert world.condition("Speculating") == ("True", "Proposing")
    assert ("Normal", "Proposing") in world.notes()
