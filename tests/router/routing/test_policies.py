"""Routing policies other than the default, and groups without load reports."""

import asyncio
from collections import Counter

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.backend import BackendError
from phalanx_router.dispatch.candidates import CandidateGroups
from phalanx_router.routing.choose import Choice, NoChoice, choose_round_robin
from phalanx_router.routing.cost import RequestDemand
from phalanx_router.routing.late_binding import DispatchInputs, next_dispatch
from phalanx_router.routing.queue import QueuedRequest, RequestQueue
from phalanx_router.routing.view import GroupView
from phalanx_router.session import FleetSettings
from tests.polling import until
from tests.router.fakes import FakeLeader, Script, World, expected, make_request, make_settings, read_stream, running_world
from tests.router.loads import FULL, ROOM, report_load, start_stream, submitted_ids
from tests.router.views import make_group_view

NEWCOMER = RequestDemand(prompt_tokens=100, output_tokens=10)
KEYS = ("a", "b", "c", "d")


def group(key: str, **more: object) -> GroupView:
    return make_group_view(key, total_pages=1000, **more)


@pytest.mark.parametrize(
    ("views", "last", "more", "key"),
    [
        ([group("a"), group("b")], {}, {}, "a"),
        ([group("a"), group("b")], {"a": 1}, {}, "b"),
        ([group("a"), group("b")], {"a": 2, "b": 1}, {}, "b"),
        ([group("a", queued_prompt_tokens=90_000), group("b")], {"b": 1}, {}, "a"),
        ([group("a"), group("b")], {"b": 1}, {"excluded": {"a"}}, "b"),
        ([group("a"), group("b")], {"b": 1}, {"closed": {"a"}}, "b"),
        ([group("a", is_draining=True), group("b")], {"b": 1}, {}, "b"),
        ([group("a", state="suspect"), group("b"), group("c")], {"b": 1, "c": 2}, {}, "b"),
        ([group("a", state="suspect"), group("b", state="dead")], {"a": 1}, {}, "b"),
    ],
    ids=[
        *(
            "at first",
            "the other one",
            "the one that waits longest",
            "whatever it costs",
            "not one that failed",
            "not a full one",
        ),
        *("not one that leaves", "not one without reports", "unless most have no reports"),
    ],
)
def test_round_robin_table(views: list[GroupView], last: dict[str, int], more: dict[str, set[str]], key: str) -> None:
    choice = choose_round_robin(views, NEWCOMER, last, hits={"a": 32}, **more)
    assert isinstance(choice, Choice)
    assert (choice.key, choice.reason, choice.hit_tokens) == (key, "turn", 32 if key == "a" else 0)


def test_no_group_is_chosen_when_all_are_full() -> None:
    assert isinstance(choose_round_robin([group("a"), group("b")], NEWCOMER, {}, closed={"a"}, excluded={"b"}), NoChoice)
    assert isinstance(choose_round_robin([], NEWCOMER, {}), NoChoice)


@given(st.lists(st.sets(st.sampled_from(KEYS)), min_size=1, max_size=60))
def test_groups_that_are_always_able_get_equally_many(fulls: list[set[str]]) -> None:
    """Full groups do not keep the others from taking turns."""
    never_full = set(KEYS).difference(*fulls)
    views, taken, given_to = [group(key) for key in KEYS], dict[str, int](), Counter[str]()
    for turn, full in enumerate(fulls, 1):
        choice = choose_round_robin(views, NEWCOMER, taken, closed=full)
        if isinstance(choice, Choice):
            assert choice.key not in full
            taken[choice.key] = turn
            given_to[choice.key] += 1
    counts = [given_to[key] for key in never_full]
    assert not counts or max(counts) - min(counts) <= 1


async def test_turns_of_former_incarnations_are_forgotten() -> None:
    leader, policy = FakeLeader("a"), BalancePolicy(routing="RoundRobin")
    async with running_world(leader) as world:
        candidates = CandidateGroups(world.fleet.links, (), lambda: policy, lambda view: view, lambda: 0.0)
        [link] = world.fleet.links.all()
        for incarnation in range(2, 6):
            candidates.record_turn(link)
            assert candidates.last_turns() == {link.key: incarnation - 1}
            await leader.send(msgspec.structs.replace(leader.state, incarnation=incarnation))
            await until(lambda incarnation=incarnation: link.state.incarnation == incarnation)  # type: ignore[misc]
        assert candidates.last_turns() == {link.key: 0}


def test_new_request_waits_for_space_started_stream_does_not() -> None:
    full = [group(key, waiting=5, running=8, max_num_seqs=8) for key in "ab"]
    known = DispatchInputs(lambda _: full, lambda _: {}, lambda _: frozenset(), lambda: {"a": 1})
    queue = RequestQueue()
    queue.add(QueuedRequest(ticket=1, demand=NEWCOMER, arrived_at=0.0, tenant="", priority=0, has_started=False, kind=""))
    assert next_dispatch(queue, known, 0.0, 0.0) is None
    queue.add(QueuedRequest(ticket=2, demand=NEWCOMER, arrived_at=0.0, tenant="", priority=0, has_started=True, kind=""))
    found = next_dispatch(queue, known, 0.0, 0.0)
    assert found and (found.queued.ticket, found.choice.key, found.choice.reason) == (2, "b", "turn")


async def test_round_robin_ignores_cost_and_can_be_changed() -> None:
    leaders = [FakeLeader(name) for name in "abc"]
    async with running_world(*leaders) as world:
        await report_load(world, leaders[0], msgspec.structs.replace(ROOM, running_prompt_tokens=2_000))
        world.fleet.balancing.set_policy(BalancePolicy(number=1, routing="RoundRobin"))
        for number in range(9):
            assert (await read_stream(world.fleet, make_request(id=f"r{number}"))).tokens == expected([1, 2, 3], 16)
        assert [len(leader.submitted) for leader in leaders] == [3, 3, 3]
        assert world.metric("phalanx_router_choices_total", why="turn") == 9
        world.fleet.balancing.set_policy(BalancePolicy(number=2))
        for number in range(4):
            await read_stream(world.fleet, make_request(id=f"later{number}"))
        assert len(leaders[0].submitted) == 3, "it is the dearest one"


async def test_a_group_that_is_full_is_passed_over() -> None:
    leaders = [FakeLeader(name) for name in "ab"]
    async with running_world(*leaders) as world:
        await report_load(world, leaders[0], FULL)
        world.fleet.balancing.set_policy(BalancePolicy(number=1, routing="RoundRobin"))
        for number in range(3):
            await read_stream(world.fleet, make_request(id=f"r{number}"))
        assert [len(leader.submitted) for leader in leaders] == [0, 3]


@pytest.mark.parametrize(("routing", "homes"), [("PrefixAware", 3), ("LeastLoad", 0)])
async def test_only_cache_policies_query_the_prefix_index(routing: str, homes: int) -> None:
    """With any policy the ledger counts the chosen group's cached tokens."""
    leaders = [FakeLeader("a", Script(hold_at=0)), FakeLeader("b", Script(hold_at=0))]
    for leader in leaders:
        leader.load = ROOM
    prompt = list(range(1, 66))
    keys = PrefixKeys(root_key("hash"), 16).extend(prompt)
    async with running_world(*leaders) as world:
        for leader in leaders:
            await leader.send(wire.State(serving=True, incarnation=1, served=wire.Served("hash", "layout", 1000)))
            await leader.send(wire.PageChanges(0, [(True, key) for key in keys[:1]], is_snapshot=True))
        await leaders[1].send(wire.PageChanges(0, [(True, key) for key in keys], is_snapshot=True))
        await until(lambda: world.fleet.links.fleet_view.prefixes.num_keys == 5)
        policy = msgspec.convert({"number": 1, "routing": routing}, BalancePolicy)
        world.fleet.balancing.set_policy(policy)
        streams = [asyncio.create_task(read_stream(world.fleet, make_request(prompt, id=f"r{number}"))) for number in range(3)]
        await until(lambda: sum(len(leader.submitted) for leader in leaders) == 3)
        assert world.metric("phalanx_router_choices_total", why="home") == homes
        sent = {link.endpoint.group: link.group_report.ledger.live for link in world.fleet.links.all()}
        assert bool(sent["a"].requests) == (homes == 0), "without caches the load alone decides"
        missing = {"a": 65 - 16, "b": 65 - 64}
        assert all(sums.prompt_tokens == sums.requests * missing[name] for name, sums in sent.items())
        for leader in leaders:
            leader.release()
        assert all(received.tokens == expected(prompt, 16) for received in await asyncio.gather(*streams))


def quick() -> FleetSettings:
    return make_settings(tick_s=0.02, heartbeat_timeout_s=30)


def silent(name: str) -> FakeLeader:
    """A group without load reports that holds requests until it is released."""
    return FakeLeader(name, Script(silent=True, hold_at=0))


async def until_suspect(world: World, count: int) -> None:
    await until(lambda: world.metric("phalanx_router_groups", state="suspect") == count)


async def test_fail_closed_service_avoids_silent_groups() -> None:
    leaders = [silent("a"), silent("b")]
    async with running_world(*leaders, settings=quick()) as world:
        streams = [start_stream(world, name) for name in ("first", "second")]
        await until_suspect(world, 2)
        world.fleet.balancing.set_policy(BalancePolicy(number=1, fails_open=False))
        with pytest.raises(BackendError, match="no group reports its load") as caught:
            await read_stream(world.fleet, make_request(id="closed"))
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "no_group_ready", 2.0)
        assert sorted(submitted_ids(leaders[0]) + submitted_ids(leaders[1])) == ["first", "second"]
        world.fleet.balancing.set_policy(BalancePolicy(number=2))
        streams.append(start_stream(world, "open"))
        await until(lambda: "open" in submitted_ids(leaders[0]) + submitted_ids(leaders[1]))
        for leader in leaders:
            leader.release()
        assert all(received.tokens == expected([1, 2, 3], 16) for received in await asyncio.gather(*streams))


async def test_fail_closed_service_uses_the_reporting_group() -> None:
    silent_group, reporting_group = silent("a"), FakeLeader("b")
    async with running_world(silent_group, reporting_group, settings=quick()) as world:
        await report_load(world, reporting_group, FULL)
        first = start_stream(world, "first")
        await until_suspect(world, 1)
        world.fleet.balancing.set_policy(BalancePolicy(number=1, fails_open=False))
        reporting_group.load = ROOM
        for number in range(3):
            assert (await start_stream(world, f"r{number}")).tokens == expected([1, 2, 3], 16)
        assert (submitted_ids(silent_group), len(submitted_ids(reporting_group))) == (["first"], 3)
        silent_group.release()
        assert (await first).tokens == expected([1, 2, 3], 16)


async def test_started_stream_continues_in_a_silent_group() -> None:
    dying, silent_group = FakeLeader("a", Script(hold_at=2)), silent("b")
    async with running_world(dying, silent_group, settings=quick()) as world:
        await report_load(world, dying, FULL)
        other = start_stream(world, "other")
        await until_suspect(world, 1)
        world.fleet.balancing.set_policy(BalancePolicy(number=1, fails_open=False))
        await report_load(world, dying, ROOM)
        started = start_stream(world, "started")
        await until(lambda: dying.steps == 2)
        await dying.stop()
        await until(lambda: submitted_ids(silent_group) == ["other", "started"])
        silent_group.release()
        assert (await started).tokens == expected([1, 2, 3], 16) == (await other).tokens
