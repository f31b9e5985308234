"""Share of new requests for the newest revision while two revisions serve."""

import asyncio
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy
from phalanx_router.routing.choose import canary_groups
from tests.polling import until
from tests.router.fakes import FakeLeader, expected, make_request, make_settings, read_stream, running_world
from tests.router.loads import FULL

KEYS = ("a", "b", "c", "d")


@given(
    st.dictionaries(st.sampled_from(KEYS), st.sampled_from(("old", "older", "new"))),
    st.integers(0, 100),
    st.floats(0, 1, exclude_max=True),
    st.sets(st.sampled_from(KEYS)),
)
def test_request_uses_the_other_side_only_if_necessary(
    revisions: dict[str, str], percent: int, canary_draw: float, excluded: set[str]
) -> None:
    kept = canary_groups(revisions, "new", percent, canary_draw, excluded)
    able = {key for key in revisions if key not in excluded}
    assert bool(kept - excluded) == bool(able), "a request is served if any group can serve it"
    sides = {revisions[key] == "new" for key in kept if able}
    wanted = canary_draw * 100 < percent
    if any((revisions[key] == "new") == wanted for key in able):
        assert sides == {wanted}
    else:
        assert len(sides) <= 1


@pytest.mark.parametrize(
    ("excluded", "closed", "kept"),
    [
        ("", "", "cd"),
        ("", "c", "cd"),
        ("", "cd", "ab"),
        ("c", "d", "ab"),
        ("", "abcd", "cd"),
        ("cd", "abcd", "ab"),
        ("ab", "cd", "cd"),
    ],
    ids=["free", "one is busy", "all are busy", "one failed", "both sides are busy", "it failed", "the other failed"],
)
def test_busy_side_leaves_its_share_to_the_other(excluded: str, closed: str, kept: str) -> None:
    revisions = {"a": "old", "b": "old", "c": "new", "d": "new"}
    assert canary_groups(revisions, "new", 5, 0.01, set(excluded), set(closed)) == set(kept)


@pytest.mark.parametrize(("percent", "count"), [(0, 0), (1, 10), (25, 250), (100, 1000)])
def test_even_draws_give_the_newest_its_share(percent: int, count: int) -> None:
    kept = [canary_groups({"a": "old", "b": "new"}, "new", percent, number / 1000) for number in range(1000)]
    assert sum(one == {"b"} for one in kept) == count
    assert sum(one == {"a"} for one in kept) == 1000 - count


def policy(percent: int, number: int = 1) -> BalancePolicy:
    return BalancePolicy(number=number, canary="new", canary_percent=percent)


def leaders() -> tuple[FakeLeader, FakeLeader, FakeLeader]:
    made = FakeLeader("a"), FakeLeader("b"), FakeLeader("c")
    made[2].revision = "new"
    return made


async def test_newest_revision_gets_its_share_however_free() -> None:
    old, other, new = leaders()
    chance = random.Random(7)
    async with running_world(old, other, new, draw=chance.random) as world:
        world.fleet.balancing.set_policy(policy(25))
        for number in range(200):
            received = await read_stream(world.fleet, make_request(id=f"r{number}"))
            assert received.tokens == expected([1, 2, 3], 16)
        assert 25 <= len(new.submitted) <= 75, "50 are expected, give or take four standard deviations"
        assert len(old.submitted) + len(other.submitted) + len(new.submitted) == 200


@pytest.mark.parametrize(("percent", "canary_draw", "taken"), [(0, 0.0, "old"), (100, 0.99, "new")])
async def test_a_share_of_nothing_and_of_all(percent: int, canary_draw: float, taken: str) -> None:
    old, other, new = leaders()
    async with running_world(old, other, new, draw=lambda: canary_draw) as world:
        world.fleet.balancing.set_policy(policy(percent))
        for number in range(6):
            await read_stream(world.fleet, make_request(id=f"r{number}"))
        assert len(new.submitted) == (6 if taken == "new" else 0)


async def test_unready_revision_leaves_its_share_to_the_other() -> None:
    old, other, new = leaders()
    async with running_world(old, other, new, draw=lambda: 0.0) as world:
        world.fleet.balancing.set_policy(policy(100))
        await new.send(wire.State(serving=False, incarnation=1, reason="loading"))
        await world.until_ready(2)
        received = await read_stream(world.fleet, make_request())
        assert received.tokens == expected([1, 2, 3], 16)
        assert new.submitted == []


async def test_busy_canary_keeps_no_request_from_idle_groups() -> None:
    old, other, new = leaders()
    new.load = FULL
    async with running_world(old, other, new, draw=lambda: 0.0) as world:
        world.fleet.balancing.set_policy(policy(100))
        await until(
            lambda: any(
                link.group_report.load is not None and link.group_report.load.waiting for link in world.fleet.links.serving()
            )
        )
        received = await asyncio.gather(*(read_stream(world.fleet, make_request(id=f"r{number}")) for number in range(6)))
        assert all(each.tokens == expected([1, 2, 3], 16) for each in received)
        assert len(old.submitted) + len(other.submitted) == 6 and new.submitted == []


async def test_without_a_share_requests_go_where_they_cost_least() -> None:
    old, other, new = leaders()
    async with running_world(old, other, new, settings=make_settings()) as world:
        for number in range(6):
            await read_stream(world.fleet, make_request(id=f"r{number}"))
        assert len(old.submitted) + len(other.submitted) + len(new.submitted) == 6
