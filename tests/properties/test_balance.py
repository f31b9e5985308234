"""Balancing of any fleet: no overshoot, a falling potential, an end between arrivals, no returns under noise, budgets kept."""

import random
from dataclasses import replace
from functools import partial

from hypothesis import given, settings
from hypothesis import strategies as st

from phalanx_api.cost import StepModel
from phalanx_api.summary import BalancePolicy, Budgets
from phalanx_operator.decide.state.policy import PolicyInputs, router_policy
from phalanx_router.balancing.balancer import Balancer
from phalanx_router.balancing.budget import BYTES_BURST_S, TOKENS_BURST_S
from phalanx_router.balancing.projection import EPSILON
from phalanx_router.balancing.records import PlannedMove
from tests.control.builders import make_service
from tests.examples import examples
from tests.router.balancing.groups import FREE, PAGE, PAGES, World, group

BYTES = group("any").capacity.page_bytes // PAGE
"""KV bytes of a token."""
APART_S = 11.0
"""Time between ticks, beyond the dwell and return times of a stream: only the check of each move protects it."""
SLOW = StepModel(fixed_s=0.01, token_s=1e-3, knee_tokens=0, context_s=1e-6, attention_s=0.0)
"""Computes prompts so slowly that requests move with their pages."""


@st.composite
def worlds(draw: st.DrawFn) -> World:
    names = [f"g{i}" for i in range(draw(st.integers(2, 7)))]
    count = draw(st.integers(4, 60))
    spread = draw(st.sampled_from([1, 2, len(names)]))
    rng = draw(st.randoms(use_true_random=False))
    contexts = {f"s{i:02}": rng.randint(100, 4000) for i in range(count)}
    where = {name: names[rng.randrange(min(spread, len(names)))] for name in contexts}
    fields: dict[str, dict[str, object]] = {}
    if draw(st.booleans()):
        fields[names[0]] = {"speed": draw(st.sampled_from([0.8, 1.5, 2.5, 4.0]))}
    target = draw(st.sampled_from([None, 0.02, 0.2]))
    balancer = Balancer(BalancePolicy(budgets=FREE, ttft_target_s=2.0, itl_target_s=target))
    return World(where, contexts, names, balancer, fields=fields, remember=False)


def potential(world: World) -> float:
    return sum(world.pressure(name) ** 2 for name in world.names)


def keeps_order(world: World, move: PlannedMove) -> bool:
    """Whether the target is at most as strained as the source, by pages or by step time."""
    source, target = (key.split("/")[0] for key in (move.source, move.target))
    return world.pressure(target) <= world.pressure(source) or world.view(target).itl_s <= world.view(source).itl_s


@settings(max_examples=40, deadline=None)
@given(worlds())
def test_moves_end_between_arrivals_without_overshoot(world: World) -> None:
    """The moves of one tick between two groups leave the target at most as strained as the source; then there are no more.

    The strain is compared after the pair's own last move: a later pair of the tick may have the same target.
    """
    quiet = moves = 0
    for number in range(400):
        planned_moves = world.tick(number * APART_S).moves
        last = {(planned.source, planned.target): planned for planned in planned_moves}
        for planned in planned_moves:
            assert not world.obey(planned, number * APART_S)
            if planned is last[planned.source, planned.target]:
                assert keeps_order(world, planned), planned.why
        moves += len(planned_moves)
        quiet = 0 if planned_moves else quiet + 1
        if quiet > 12:
            break
    else:
        raise AssertionError(f"{moves} moves and no end")


@settings(max_examples=40, deadline=None)
@given(worlds())
def test_moves_of_pages_lower_the_sum_of_squares(world: World) -> None:
    world.fields = {}
    world.balancer.policy = BalancePolicy(budgets=FREE)
    for number in range(40):
        planned_moves = world.tick(number * APART_S).moves
        before = potential(world)
        for planned in planned_moves:
            world.obey(planned, number * APART_S)
        pairs = {(p.source, p.target) for p in planned_moves}
        assert potential(world) <= before - 0.999 * len(pairs) * EPSILON**2


@settings(max_examples=40, deadline=None)
@given(worlds(), st.integers(0, 2**32))
def test_noisy_reports_move_no_stream_back(world: World, seed: int) -> None:
    """Reports that are wrong by up to EPSILON / 2: a stream never returns to where it was, though nothing else forbids it."""
    world.fields = {}
    world.balancer.policy = BalancePolicy(budgets=FREE)
    rng, most = random.Random(seed), int(PAGES * EPSILON / 2) - 1
    world.noise = lambda: rng.randint(-most, most)
    been: dict[str, set[str]] = {}
    for number in range(120):
        for planned in world.tick(number * APART_S).moves:
            been.setdefault(planned.stream, set()).add(planned.source)
            assert planned.target not in been[planned.stream], planned.why
            world.obey(planned, number * APART_S)


@settings(max_examples=40, deadline=None)
@given(worlds(), st.integers(1, 4), st.floats(0.005, 0.2), st.floats(1e5, 1e8), st.integers(0, 2**32))
def test_budgets_are_kept_whatever_happens_to_moves(
    world: World, slots: int, share: float, bytes_per_s: float, seed: int
) -> None:
    """Moves at once per group; tokens and bytes of any stretch of time at most rate * (T + burst) and one move more."""
    world.balancer.policy = BalancePolicy(
        budgets=Budgets(moves_per_group=slots, tokens_share_per_s=share, bytes_per_s=bytes_per_s), ttft_target_s=2.0
    )
    rng = random.Random(seed)
    under_way = []
    taken: list[tuple[float, set[str], int]] = []
    spent: list[tuple[float, int]] = []
    live = sum(world.contexts.values())
    for number in range(80):
        now = number * 0.25
        for planned in world.tick(now).moves:
            under_way.append(planned)
            assert planned.bytes_per_s == bytes_per_s
            taken.append((now, {planned.source, planned.target}, 0 if planned.transfer == "recompute" else planned.context))
            spent.append((now, planned.context))
        for key in {p.source for p in under_way} | {p.target for p in under_way}:
            assert sum(p.source == key for p in under_way) <= slots
            assert sum(p.target == key for p in under_way) <= slots
        for planned in [p for p in under_way if rng.random() < 0.4]:
            under_way.remove(planned)
            if rng.random() < 0.5:
                world.obey(planned, now)
            else:
                world.balancer.record_end(planned, False, now)
    largest = max(world.contexts.values())
    check(spent, share * live, TOKENS_BURST_S, largest)
    for key in {key for _, keys, _ in taken for key in keys}:
        check([(at, context * BYTES) for at, keys, context in taken if key in keys], bytes_per_s, BYTES_BURST_S, largest * BYTES)


@settings(max_examples=examples(80), deadline=None)
@given(worlds(), st.integers(2, 12), st.integers(1, 50), st.integers(10**6, 3 * 10**7), st.integers(0, 2**32))
def test_two_routers_together_keep_the_budgets_of_their_service(
    world: World, slots: int, percent: int, bytes_per_s: int, seed: int
) -> None:
    """Each moves streams of its own by what the operator grants it, and knows of no move of the other."""
    world.fields = {name: {"step_model": SLOW} for name in world.names}
    budgets = {"movesPerGroup": slots, "bandwidth": str(bytes_per_s), "liveTokensPercentPerSecond": percent}
    granted = router_policy(make_service(rebalancing={"budgets": budgets}).spec, PolicyInputs(routers=2))
    routers = [replace(world, balancer=Balancer(granted), mine=partial(is_of_router, number)) for number in range(2)]
    rng = random.Random(seed)
    under_way: dict[PlannedMove, World] = {}
    spent: list[tuple[float, PlannedMove]] = []
    for number in range(80):
        now = number * 0.25
        for router in routers:
            started = router.tick(now).moves
            under_way |= dict.fromkeys(started, router)
            spent += [(now, planned) for planned in started]
        for key in (view.key for view in world.views()):
            assert sum(planned.source == key for planned in under_way) <= slots
            assert sum(planned.target == key for planned in under_way) <= slots
        for planned in [planned for planned in under_way if rng.random() < 0.4]:
            router = under_way.pop(planned)
            if rng.random() < 0.5:
                router.obey(planned, now)
            else:
                router.balancer.record_end(planned, False, now)
    one_each = 2 * max(world.contexts.values())
    check([(at, p.context) for at, p in spent], percent / 100 * sum(world.contexts.values()), TOKENS_BURST_S, one_each)
    for key in (view.key for view in world.views()):
        copied = [(at, p.context * BYTES) for at, p in spent if key in (p.source, p.target) and p.transfer != "recompute"]
        check(copied, bytes_per_s, BYTES_BURST_S, one_each * BYTES)


def is_of_router(number: int, stream: str) -> bool:
    return int(stream[1:]) % 2 == number


def check(taken: list[tuple[float, int]], rate: float, burst_s: float, one: int) -> None:
    """No stretch of time has more than its rate, a burst, and `one`: by a move of each router it may be exceeded."""
    for first, (start, _) in enumerate(taken):
        total = 0
        for end, amount in taken[first:]:
            total += amount
            assert total <= rate * (end - start + burst_s) + one + 1e-6
