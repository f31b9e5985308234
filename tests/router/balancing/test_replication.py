"""Replication of a hot prefix."""

from collections.abc import Sequence
from typing import Any

import pytest

from phalanx_api.summary import BalancePolicy, Budgets, Mode
from phalanx_router.balancing.balancer import Balancer
from phalanx_router.balancing.records import HotspotAction
from tests.router.balancing.groups import FREE, World, first_moves, prefix_world


def test_hot_prefix_is_replicated_by_the_cheapest_stream() -> None:
    world = prefix_world()
    decision = first_moves(world)
    (spot,) = decision.hotspots
    assert (spot.cause, spot.action) == ("prefix", "replicate")
    (planned,) = decision.moves
    assert (planned.stream, planned.rung, planned.transfer, planned.context) == ("s01", "replicate", "precopy", 2700)
    assert "gets the prefix of 2000 tokens, 50% of the prompt tokens of a" in planned.why
    world.obey(planned, 0.5)
    found = {0.25 * number: [p.rung for p in world.tick(0.25 * number).moves] for number in range(3, 60)}
    assert [now for now, rungs in found.items() if rungs] == [10.25], "the prefix went at 0.25"


def test_hot_prefix_goes_to_a_group_with_compatible_pages() -> None:
    world = prefix_world()
    for name in world.names[1:]:
        world.fields[name] = {"used_pages": 100}
    world.fields[world.names[-1]] = {"layout": "tp4"}
    (planned,) = first_moves(world).moves
    assert (planned.target, planned.transfer) == ("b/1/1", "precopy")


def pull_world(**fields: Any) -> World:
    """`prefix_world`, whose group a can send its prefix."""
    world = prefix_world(**fields)
    world.balancer = Balancer(world.balancer.policy, lambda key: ["a/1/1"], can_send=lambda key: key == "a/1/1")
    return world


def test_hot_prefix_is_pulled_from_its_group() -> None:
    world = pull_world()
    decisions = {0.25 * number: world.tick(0.25 * number) for number in range(60)}
    assert not any(decision.moves for decision in decisions.values())
    copies = {now: decision.copies for now, decision in decisions.items() if decision.copies}
    first = min(copies)
    assert next(now for now in copies if now > first) == first + 10.0, "at most once per 10 s"
    (planned,) = copies[first]
    assert (planned.source, planned.num_pages) == ("a/1/1", 125) and planned.target != planned.source
    assert "gets the prefix of 2000 tokens" in planned.why


def test_pulled_prefix_needs_a_stream_that_begins_with_it() -> None:
    world = pull_world()
    world.records = {}
    decisions = [world.tick(0.25 * number) for number in range(8)]
    assert not any(decision.copies for decision in decisions)
    assert [(refusal.rung, refusal.code) for refusal in decisions[-1].refusals] == [("replicate", "no_victim")]


def test_pulls_and_moves_share_the_budget() -> None:
    world = pull_world(policy=BalancePolicy(budgets=Budgets(moves_per_group=1, bytes_per_s=None, tokens_share_per_s=1.0)))
    (planned,) = next(decision.copies for number in range(8) if (decision := world.tick(0.25 * number)).copies)
    balancer = world.balancer
    assert balancer.start_pull(planned.source, "other", 1.0, [], 9.0) == "slots"
    balancer.end_pull(planned.source, planned.target)
    assert balancer.start_pull(planned.source, "other", 1.0, [], 9.0) is None


NO_HOME = {
    "three hold it": ({}, ("a", "b", "c"), "no_target"),
    "all cool groups hold it": ({}, ("b", "a"), "no_target"),
    "it is computed as soon": ({"page_bytes": 1 << 24}, ("a",), "no_victim"),
    "no prompt begins with it": ({"records": None}, ("a",), "no_victim"),
    "others have no room": ({"others": {"used_pages": 810}}, ("a",), "no_target"),
    "others have another layout": ({"others": {"layout": "tp4"}}, ("a",), "no_target"),
}


@pytest.mark.parametrize(("fields", "holders", "code"), NO_HOME.values(), ids=NO_HOME.keys())
def test_a_hot_prefix_stays_where_it_is_when(fields: dict[str, Any], holders: Sequence[str], code: str) -> None:
    others, records = fields.pop("others", None), fields.pop("records", ())
    world = prefix_world(holders=holders, **fields)
    if records is None:
        world.records = {}
    if code == "no_target" and len(holders) == 2:
        world.names = ["a", "b"]
    for name in "bcde" if others else "":
        world.fields[name] = others
    decisions = [world.tick(0.25 * number) for number in range(8)]
    assert not any(decision.moves for decision in decisions)
    assert decisions[-1].hotspots and [(r.rung, r.code) for r in decisions[-1].refusals] == [("replicate", code)]


@pytest.mark.parametrize(("mode", "action"), [("Requeue", "requeue"), ("Route", "steer"), ("Off", "none")])
def test_no_replication_in_a_forbidding_mode(mode: Mode, action: HotspotAction) -> None:
    decision = first_moves(prefix_world(BalancePolicy(mode=mode, budgets=FREE)))
    assert not decision.moves and decision.hotspots[0].action == action
