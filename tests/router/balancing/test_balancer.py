"""Moves of one router: budgets, guards, rescue, evacuation."""

from dataclasses import replace

import pytest

from phalanx_api.summary import BalancePolicy, Budgets, Mode
from phalanx_router.balancing.balancer import Balancer, Shed, SheddingTimer
from phalanx_router.balancing.budget import MoveBudget
from phalanx_router.balancing.guards import AttractionGuard
from phalanx_router.balancing.records import HotspotAction, NoMove, PlannedMove, Rung
from phalanx_router.balancing.targets import select_transfer
from tests.router.balancing.groups import FREE, World, first_moves, group, hot_world, stream


def test_hotspot_sends_just_enough_to_end() -> None:
    world = hot_world()
    decision = first_moves(world)
    assert decision.hotspots[0].cause == "kv" and decision.hotspots[0].action == "migrate"
    assert {p.source for p in decision.moves} == {"a/1/1"} and len({p.target for p in decision.moves}) == 1
    for planned in decision.moves:
        world.obey(planned, 0.25)
    assert 0.6 < world.pressure("a") < 0.75
    assert all("a is kv-bound" in p.why and p.transfer == "precopy" for p in decision.moves)
    later = [world.tick(1.0 + 0.25 * i) for i in range(100)]
    assert not any(d.moves for d in later)


@pytest.mark.parametrize(
    ("policy", "code"),
    [
        (BalancePolicy(mode="Off"), "mode"),
        (BalancePolicy(mode="Requeue"), "mode"),
        (BalancePolicy(budgets=Budgets(moves_per_group=0)), "slots"),
        (BalancePolicy(budgets=Budgets(tokens_share_per_s=0.0)), "tokens"),
        (BalancePolicy(budgets=Budgets(bytes_per_s=0.0)), "no_victim"),
    ],
)
def test_nothing_moves_without_leave(policy: BalancePolicy, code: str) -> None:
    decision = first_moves(hot_world(policy))
    assert not decision.moves
    assert [r.code for r in decision.refusals] == [code]


ACTIONS: list[tuple[Mode, bool, HotspotAction]] = [
    ("Off", False, "none"),
    ("Off", True, "none"),
    ("Route", False, "steer"),
    ("Requeue", False, "requeue"),
    ("Migrate", False, "migrate"),
    ("Migrate", True, "scale"),
]


@pytest.mark.parametrize(("mode", "is_saturated", "action"), ACTIONS)
def test_reported_hotspot_equals_the_applied_one(mode: Mode, is_saturated: bool, action: HotspotAction) -> None:
    world = hot_world(BalancePolicy(mode=mode))
    if is_saturated:
        demands = {"a": 400, "b": 860, "c": 860, "d": 800, "e": 800}
        world.fields = {name: {"demand_pages": pages} for name, pages in demands.items()}
    decision = [world.tick(0.25 * number) for number in range(4)][-1]
    assert decision.is_saturated == is_saturated
    assert ("a", action) in [(spot.group, spot.action) for spot in decision.hotspots]


def test_nothing_moves_for_balance_when_all_are_full() -> None:
    world = hot_world()
    world.fields = {name: {"demand_pages": 900} for name in "bcd"}
    world.fields["a"] = {"demand_pages": 200}
    decision = first_moves(world)
    assert decision.is_saturated and not decision.moves


UNFIT = {
    "has not started": {"generated": 0},
    "was moved three times": {"num_moves": 3, "moved_at": -100.0},
    "was moved just now": {"num_moves": 1, "moved_at": -2.0},
    "is pinned": {"is_pinned": True},
}


@pytest.mark.parametrize("fields", UNFIT.values(), ids=UNFIT.keys())
def test_a_stream_stays_that(fields: dict[str, object]) -> None:
    world = hot_world()
    world.records = {name: stream(name, "a", **fields) for name in world.where}
    decision = first_moves(world)
    assert decision.hotspots and not decision.moves
    assert decision.refusals[0].code == "no_victim"


def test_stream_moves_only_to_the_same_model() -> None:
    world = hot_world()
    world.fields = {name: {"model_hash": "other"} for name in "bcde"}
    assert first_moves(world).refusals[0].code == "no_target"


def test_a_stream_about_to_end_is_no_victim() -> None:
    world = hot_world()
    world.fields = {"a": {"copy_bytes_per_s": 1e4, "mean_output_tokens": 2.0}}
    world.records = {name: stream(name, "a", generated=1) for name in world.where}
    assert not first_moves(world).moves


def test_moves_at_once_are_bounded_until_they_end() -> None:
    world = hot_world(BalancePolicy(budgets=Budgets(moves_per_group=2, tokens_share_per_s=100.0)), count=15)
    first = first_moves(world)
    assert len(first.moves) == 2
    again = world.tick(1.0)
    assert not again.moves
    for planned in first.moves:
        world.obey(planned, 1.0)
    assert len(world.tick(1.25).moves) == 2


def test_bytes_of_one_group_hold_up_this_group_alone() -> None:
    budget = MoveBudget()
    budget.refill(Budgets(bytes_per_s=1000.0), 10_000, ["a", "b", "c"], 0.0)
    rungs: list[tuple[Rung, float]] = [("migrate", 1000.0), ("evacuate", 2500.0)]
    for rung, most in rungs:
        assert budget.exceeded_limit("a", "b", rung) is None
        budget.record_start(
            PlannedMove(stream="s", source="a", target="b", transfer="precopy", rung=rung, context=100, bytes_per_s=None, why=""),
            most + 500,
        )
        assert [budget.exceeded_limit(*pair, rung) for pair in (("a", "c"), ("c", "b"), ("c", "d"))] == ["bytes"] * 3
    budget.refill(Budgets(bytes_per_s=1000.0), 10_000, ["a", "b", "c"], 0.25)
    assert [budget.exceeded_limit("a", "c", rung) for rung, _ in rungs] == ["bytes", None]
    budget.refill(Budgets(bytes_per_s=1000.0), 10_000, ["a", "b", "c"], 0.75)
    assert budget.exceeded_limit("a", "c", "migrate") is None


def test_failed_move_frees_its_slot_and_counts_nothing() -> None:
    world = hot_world(BalancePolicy(budgets=Budgets(moves_per_group=2, tokens_share_per_s=100.0)))
    failed = first_moves(world).moves
    for planned in failed:
        assert not world.balancer.record_end(planned, False, 1.0)
        assert not world.balancer.record_end(planned, True, 1.0), "an end counts once"
    tired = {planned.stream for planned in failed}
    again = world.tick(1.25).moves
    assert len(again) == 2 and not {p.stream for p in again} & tired, "they rest for a second"
    assert world.balancer.attraction.with_departed_load(group("a"), 1.0) == group("a")


@pytest.mark.parametrize(("queued", "moves"), [(0, False), (60_000, True)])
def test_long_prefill_steps_move_streams_only_if_lasting(queued: int, moves: bool) -> None:
    """Steps take 0.12 s with prompts and 0.02 s without; 60,000 queued tokens last about 7 s."""
    world = hot_world(BalancePolicy(budgets=FREE, itl_target_s=0.1), count=8)
    world.fields = {name: {"total_pages": 10_000} for name in world.names}
    world.fields["a"] |= {"prompt_tokens_per_step": 1000.0, "queued_prompt_tokens": queued, "max_num_batched_tokens": 1000}
    decision = first_moves(world)
    assert [hotspot.cause for hotspot in decision.hotspots] == ["decode"]
    assert bool(decision.moves) == moves


def test_very_slow_group_sends_streams_despite_free_pages() -> None:
    world = hot_world(count=6)
    world.fields = {"a": {"speed": 2.5}}
    found = [p for i in range(60) for p in world.tick(0.25 * i).moves]
    assert found and {p.source for p in found} == {"a/1/1"}
    assert "straggler" in found[0].why


def test_a_slow_group_is_only_weighed() -> None:
    world = hot_world(count=6)
    world.fields = {"a": {"speed": 1.5}}
    decisions = [world.tick(0.25 * i) for i in range(60)]
    assert not any(d.moves for d in decisions)
    assert decisions[-1].hotspots[0].action == "weigh"


def test_draining_group_sends_all_streams_in_any_mode() -> None:
    world = hot_world(BalancePolicy(mode="Off", evacuate=["a"], budgets=Budgets(moves_per_group=4)), count=10)
    world.records["s03"] = stream("s03", "a", generated=0, context=0)
    now, transfers = 0.0, set()
    while "a" in world.where.values():
        now += 0.25
        assert now < 5
        planned_moves = world.tick(now).moves
        assert 0 < len(planned_moves) <= 4 and all(p.rung == "evacuate" for p in planned_moves)
        for planned in planned_moves:
            transfers.add((planned.stream == "s03", planned.transfer))
            world.obey(planned, now)
    assert transfers == {(True, "recompute"), (False, "precopy")}
    assert max(world.pressure(name) for name in "bcde") < 0.3, "they are spread"


def test_most_urgent_group_drains_first_to_healthy_groups() -> None:
    world = hot_world(BalancePolicy(evacuate=["b", "a"]), count=4)
    world.where |= {"t0": "b", "t1": "b"}
    world.contexts |= {"t0": 900, "t1": 900}
    planned_moves = world.tick(0.0).moves
    assert [p.source for p in planned_moves] == ["b/1/1"] * 2 + ["a/1/1"] * 4
    assert not {p.target for p in planned_moves} & {"a/1/1", "b/1/1"}


def test_leaving_group_drains_after_the_named_ones() -> None:
    world = hot_world(BalancePolicy(mode="Off", evacuate=["b"]), count=2)
    world.where |= {"t0": "b"}
    world.contexts |= {"t0": 900}
    world.fields = {"a": {"is_draining": True}}
    planned_moves = world.tick(0.0).moves
    assert [(p.source, p.rung) for p in planned_moves] == [("b/1/1", "evacuate")] + [("a/1/1", "evacuate")] * 2
    assert not {p.target for p in planned_moves} & {"a/1/1", "b/1/1"}


def test_stream_of_a_failed_move_waits_a_second() -> None:
    world = hot_world(BalancePolicy(evacuate=["a"]), count=1)
    (first,) = world.tick(0.0).moves
    world.balancer.record_end(first, False, 0.5)
    proposed = [bool(world.tick(now).moves) for now in (0.75, 1.25, 1.5)]
    assert proposed == [False, False, True]


def test_group_keeps_streams_without_a_free_target() -> None:
    world = hot_world(BalancePolicy(evacuate=["a"]), count=4)
    world.fields = {name: {"used_pages": 950} for name in "bcde"}
    decision = world.tick(0.0)
    assert not decision.moves and decision.refusals[0].code == "no_target"


def rescue(world: World, *, policy: BalancePolicy | None = None) -> PlannedMove | NoMove:
    world.balancer.policy = policy or BalancePolicy()
    return world.balancer.rescue("a/1/1", stream("s00", "a", 2000), world.views(), 0.0)


def test_rescued_stream_goes_to_the_freest_group() -> None:
    world = hot_world()
    world.fields = {name: {"used_pages": used} for name, used in zip("bcde", (700, 300, 500, 600), strict=True)}
    found = rescue(world)
    assert isinstance(found, PlannedMove)
    assert (found.target, found.transfer, found.rung) == ("c/1/1", "stop", "rescue")


RESCUE_REFUSED = {
    "no group has room": ({name: {"used_pages": 900} for name in "bcde"}, BalancePolicy(), "no_target"),
    "all would be full soon": (
        {name: {"total_pages": 200, "used_pages": 40, "running": 20} for name in "bcde"},
        BalancePolicy(),
        "no_target",
    ),
    "no group keeps a reserve": ({name: {"total_pages": 127} for name in "bcde"}, BalancePolicy(), "no_target"),
    "the mode": ({}, BalancePolicy(mode="Requeue"), "mode"),
    "reports are old": ({name: {"state": "degraded"} for name in "bcde"}, BalancePolicy(), "no_target"),
    "they are evacuated": ({}, BalancePolicy(evacuate=list("bcde")), "no_target"),
    "no slot": ({}, BalancePolicy(budgets=Budgets(moves_per_group=0)), "no_target"),
}


@pytest.mark.parametrize(("fields", "policy", "code"), RESCUE_REFUSED.values(), ids=RESCUE_REFUSED.keys())
def test_no_rescue_table(fields: dict[str, dict[str, object]], policy: BalancePolicy, code: str) -> None:
    world = hot_world()
    world.fields = fields
    found = rescue(world, policy=policy)
    assert isinstance(found, NoMove) and found.code == code


def test_running_request_precedes_waiting_ones_at_its_target() -> None:
    world = hot_world()
    world.fields = {name: {"used_pages": 700, "demand_pages": 400} for name in "bcde"}
    assert isinstance(rescue(world), PlannedMove)


def test_returning_stream_closes_no_cycle() -> None:
    world = hot_world()
    world.names = ["a", "b", "c"]
    for source, target, now in (("a/1/1", "b/1/1", 0.0), ("b/1/1", "c/1/1", 4.0)):
        world.balancer.pingpong.record_move("s00", source, target, now)
    world.where["s00"] = "c"
    here = stream("s00", "c", 2000, num_moves=2, moved_at=4.0, last_source="b/1/1")
    assert isinstance(world.balancer.rescue("c/1/1", here, world.views(), 8.0), NoMove)
    found = world.balancer.rescue("c/1/1", here, world.views(), 12.0)
    assert isinstance(found, PlannedMove) and found.target == "a/1/1"


def test_a_rescue_counts_against_the_next_one() -> None:
    world = hot_world()
    world.names = ["a", "b"]
    world.fields = {"b": {"used_pages": 740}}
    assert isinstance(rescue(world), PlannedMove)
    again = world.balancer.rescue("a/1/1", stream("s01", "a", 2000), world.views(), 0.0)
    assert isinstance(again, NoMove) and again.code == "no_target", "125 pages of the first are promised"


def test_stream_is_not_rescued_to_its_previous_group() -> None:
    world = hot_world()
    world.names = ["a", "b"]
    back = stream("s00", "a", 2000, num_moves=1, moved_at=0.0, last_source="b/1/1")
    assert isinstance(world.balancer.rescue("a/1/1", back, world.views(), 5.0), NoMove)
    assert isinstance(world.balancer.rescue("a/1/1", back, world.views(), 11.0), PlannedMove)


TRANSFERS = {
    "pages are expensive to compute": ({}, {}, 4000, "precopy"),
    "a short one is computed": ({}, {}, 200, "recompute"),
    "another layout": ({}, {"layout": "tp4"}, 4000, "recompute"),
    "a thin wire": ({"copy_bytes_per_s": 1e5}, {}, 4000, "recompute"),
    "a thin wire, but a busy target": ({"copy_bytes_per_s": 1.5e7}, {"running": 60}, 4000, "precopy"),
}


@pytest.mark.parametrize(("here", "there", "context", "transfer"), TRANSFERS.values(), ids=TRANSFERS.keys())
def test_stream_copies_its_pages_where_that_is_cheaper(
    here: dict[str, object], there: dict[str, object], context: int, transfer: str
) -> None:
    assert select_transfer(context, group("a", 0.5, **here), group("b", **there), None, "precopy") == transfer


def test_source_group_does_not_look_free_at_once() -> None:
    world, before = hot_world(), group("a", 0.5)
    for planned in first_moves(world).moves:
        world.obey(planned, 10.0)
    guard = world.balancer.attraction
    assert guard.with_departed_load(before, 10.0).load.running > before.load.running
    departed_pages = [
        guard.with_departed_load(before, now).load.used_pages - before.load.used_pages for now in (10.0, 11.0, 12.0)
    ]
    assert departed_pages[0] > 100 and departed_pages[1] == pytest.approx(departed_pages[0] / 2, abs=1) and departed_pages[2] == 0
    assert guard.with_departed_load(group("b"), 10.0) == group("b")


def test_oscillating_moves_are_disabled_for_a_minute() -> None:
    world = hot_world()
    pingpong = world.balancer.pingpong
    assert not pingpong.record_move("x", "a", "b", 0.0) and pingpong.record_move("x", "b", "a", 9.0)
    assert not pingpong.is_paused(9.0), "one is chance"
    assert pingpong.record_move("x", "a", "b", 10.0)
    assert pingpong.num_returns == 2
    assert first_moves(world).refusals[0].code == "pingpong"
    assert pingpong.is_paused(69.0) and not pingpong.is_paused(70.0)


def test_few_returns_of_many_moves_do_not() -> None:
    pingpong = Balancer().pingpong
    for number in range(400):
        pingpong.record_move(f"s{number}", "a", "b", number * 0.1)
    for number in (397, 398, 399):
        assert pingpong.record_move(f"s{number}", "b", "a", 40.5)
    assert not pingpong.is_paused(41.0)
    assert not pingpong.record_move("s399", "a", "b", 60.0), "after ten seconds it is no return"


def test_saturation_sheds_waiting_requests_by_priority_band() -> None:
    shedding = SheddingTimer()
    late = [shedding.decide(True, 5.0, 2.0, now) for now in (0.0, 0.9, 1.0, 2.0)]
    assert [shed.bands if shed else 0 for shed in late] == [0, 0, 1, 2]
    assert isinstance(late[2], Shed) and late[2].retry_after_s == 3.0
    assert shedding.decide(True, 1.0, 2.0, 3.0) is None
    assert shedding.decide(True, 5.0, 2.0, 3.5) is None, "the second starts again"
    never: list[tuple[bool, float | None, float | None]] = [(False, 5.0, 2.0), (True, None, 2.0), (True, 5.0, None)]
    for is_saturated, best_ttft_s, target_s in never:
        shedding = SheddingTimer()
        assert [shedding.decide(is_saturated, best_ttft_s, target_s, now) for now in (0.0, 5.0)] == [None, None]


def test_a_saturated_fleet_sheds_through_the_tick() -> None:
    balancer = Balancer(BalancePolicy(ttft_target_s=1.0))
    views = [group(name, 0.5, queued_prompt_tokens=10**6) for name in "ab"]
    sheds = [balancer.tick(views, lambda key: [], 0.25 * i).shed for i in range(12)]
    assert sheds[0] is None and sheds[-1] is not None


def test_a_policy_may_change_between_ticks() -> None:
    world = hot_world(BalancePolicy(mode="Off"))
    assert not first_moves(world).moves
    world.balancer.policy = replace_mode(world.balancer.policy)
    assert world.tick(9.0).moves


def replace_mode(policy: BalancePolicy) -> BalancePolicy:
    return BalancePolicy(number=policy.number + 1, budgets=FREE)


def test_views_are_left_as_they_are() -> None:
    world = hot_world()
    views = world.views()
    copies = [replace(view) for view in views]
    for number in range(4):
        world.balancer.tick(views, world.streams_of, 0.25 * number)
    assert views == copies


def test_departures_of_deleted_groups_are_forgotten() -> None:
    """No one asks for their views, which forget the others'."""
    guard = AttractionGuard()
    for number in range(100):
        guard.record_departure(f"group-{number}", 1000, now=float(number))
    assert len(guard) <= 4
