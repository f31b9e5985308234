"""The number of groups in the simulated fleet follows the operator's decisions, without losing a request."""

import random
from itertools import pairwise

import pytest

from bench.router.replay import Arrival
from bench.simulate.engine import Shape
from bench.simulate.figures import figures
from bench.simulate.jobs import Job
from bench.simulate.policies.others import RoundRobin
from bench.simulate.policies.ours import Ours
from bench.simulate.scaling import Scaling
from bench.simulate.world import Setting, World
from phalanx_api.cost import StepModel
from phalanx_api.summary import BalancePolicy

SHAPE = Shape(StepModel(fixed_s=0.2, token_s=0.001, knee_tokens=0, context_s=1e-6, attention_s=0.0), total_pages=4000)
RULES = Scaling(min_groups=1, max_groups=6, start_s=20.0, ttft_s=4.0, itl_s=1.0)


def played(arrivals: list[Arrival], scaling: Scaling | None, groups: int) -> World:
    """Returns the world after all requests ended."""
    world = World(Setting(groups, SHAPE, scaling=scaling), Ours(SHAPE, groups, BalancePolicy(mode="Migrate")), arrivals)
    world.run()
    figures(world, SHAPE)  # raises where a request has not all its tokens
    for engine in world.engines:
        assert (engine.pages.used, engine.pages.reserved, engine.has_work) == (0, 0, False)
    return world


def arrivals(*parts: tuple[float, float], seed: int = 0) -> list[Arrival]:
    """Returns requests of several parts with rate (requests/s) and duration."""
    rng, at_s, until_s, requests = random.Random(seed), 0.0, 0.0, []
    for rate, seconds in parts:
        at_s, until_s = until_s, until_s + seconds
        while (at_s := at_s + rng.expovariate(rate)) < until_s:
            requests.append(Arrival(at_s, rng.randrange(200, 800), rng.randrange(20, 100)))
    return requests


@pytest.mark.slow
def test_groups_follow_load_and_scale_in_moves_streams() -> None:
    load = arrivals((0.5, 120), (5.0, 300), (0.5, 500))
    world, fixed = played(load, RULES, 1), played(load, None, 6)
    assert world.operator is not None
    counts = [count for _, count, _ in world.operator.changes]
    assert max(counts) >= 3 and counts[-1] < max(counts)
    assert len(world.operator.drains_s) >= 1 and world.counts.moves > 0 and world.counts.replays == 0
    result = figures(world, SHAPE)
    assert result.group_s < 0.8 * figures(fixed, SHAPE).group_s
    assert (result.changes, result.drain) == (len(counts), max(world.operator.drains_s))
    assert figures(fixed, SHAPE).changes == 0


class RecordingPolicy(Ours):
    """Our policy; records the time of each group's first token."""

    def __init__(self) -> None:
        super().__init__(SHAPE, 1, BalancePolicy())
        self.first_s: dict[int, float] = {}

    def first_token(self, job: Job, group: int, now: float) -> None:
        self.first_s.setdefault(group, now)
        super().first_token(job, group, now)


def test_burst_triggers_panic_and_new_groups_serve_later() -> None:
    policy = RecordingPolicy()
    world = World(Setting(1, SHAPE, scaling=RULES), policy, arrivals((0.5, 100), (8.0, 100)))
    world.run()
    assert world.operator is not None
    at_s = world.operator.changes[0][0]
    soon = [(count, why) for changed_s, count, why in world.operator.changes if changed_s < at_s + 6]
    count = soon[-1][0]
    assert 100 < at_s < 118 and count >= 3 and all("last 6 s" in why for _, why in soon)
    assert world.operator.group_seconds(0.0, at_s) == pytest.approx(at_s)
    new = [first_s for group, first_s in policy.first_s.items() if group]
    assert len(new) >= count - 1 and min(new) >= at_s + RULES.start_s


def test_a_steady_load_does_not_flap() -> None:
    world = played(arrivals((2.0, 900), seed=3), RULES, 2)
    assert world.operator is not None
    up = [later > former for (_, former, _), (_, later, _) in pairwise(world.operator.changes)]
    assert len(world.operator.changes) <= 3 and sum(a != b for a, b in pairwise(up)) <= 1, world.operator.changes


def test_unfinished_requests_restart_elsewhere_when_a_group_leaves() -> None:
    hurried = Scaling(min_groups=1, max_groups=6, start_s=20.0, ttft_s=4.0, itl_s=1.0, drain_s=0)
    world = played(arrivals((5.0, 200), (0.8, 600), seed=1), hurried, 4)
    assert world.counts.replays > 0


def test_a_policy_that_cannot_follow_is_refused() -> None:
    with pytest.raises(TypeError, match="RoundRobin does not support"):
        World(Setting(1, SHAPE, scaling=RULES), RoundRobin(), [])
