"""A request under which groups die runs alone, and is then ended; other streams continue."""

import asyncio
from functools import partial

import msgspec
import pytest

from phalanx_api import moves, wire
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.backend import BackendError
from tests.polling import until
from tests.router.api_servers import FakeEngine, running_leader
from tests.router.fakes import FakeLeader, Script, StreamResult, expected, make_request, make_settings, read_stream, running_world
from tests.router.http_routers import running_router
from tests.router.link_clients import orphan_request, resumable
from tests.router.poison import POISON, is_poison, poisoned_leaders


def was_reached(group: FakeLeader, stream: asyncio.Task[StreamResult]) -> bool:
    return bool(group.submitted) or stream.done()


def has(group: FakeLeader, count: int) -> bool:
    return len(group.submitted) >= count


async def test_request_that_kills_groups_ends_after_the_third() -> None:
    groups = poisoned_leaders("abcd")
    async with running_world(*groups) as world:
        streams = [make_request([i, 1], max_tokens=60, id=f"r{i}") for i in range(6)]
        others = [asyncio.create_task(read_stream(world.fleet, request)) for request in streams]
        with pytest.raises(BackendError) as caught:
            await read_stream(world.fleet, make_request(POISON, max_tokens=60, id="poison"))
        received = await asyncio.gather(*others)
        assert (caught.value.status, caught.value.code) == (500, "groups_died")
        assert "3 groups died while they computed this request" in caught.value.message
        assert [h.tokens for h in received] == [expected(r.prompt, 60) for r in streams]
        assert sum(group.deaths for group in groups) == 3
        excused = {group.group: world.fleet.excused[group.endpoint().key] for group in groups if group.deaths}
        assert excused == {group.group: group.deaths for group in groups if group.deaths}, "none of them is to blame"
    sent = [submit.request for group in groups for submit in group.submitted if is_poison(submit.request)]
    assert sorted((request.epoch, request.alone) for request in sent) == [(0, False), (1, False), (2, True)]
    last = next(group for group in groups for submit in group.submitted if is_poison(submit.request) and submit.request.alone)
    others_alone = [s.request for s in last.submitted if s.request.alone and not is_poison(s.request)]
    assert all(request.epoch >= 2 for request in others_alone)


@pytest.mark.parametrize(
    ("cause", "is_counted"), [("", True), ("outside", False), ("alone", False)], ids=["unknown", "outside", "another's"]
)
async def test_only_deaths_that_may_be_its_fault_count(cause: wire.EndCause, is_counted: bool) -> None:
    groups = [FakeLeader(name, Script(hold_at=1)) for name in "abc"] + [FakeLeader("d")]
    async with running_world(*groups, settings=make_settings(max_replays=5)) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        for group in groups[:3]:
            await until(partial(was_reached, group, stream))
            await group.send(wire.State(serving=False, incarnation=2, reason="rank 1 died", cause=cause))
        if is_counted:
            with pytest.raises(BackendError, match="3 groups died"):
                await stream
        else:
            assert (await stream).tokens == expected([1, 2, 3], 16)
        sent = [submit.request.alone for group in groups for submit in group.submitted]
        assert sent == ([False, False, True] if is_counted else [False] * 4)
        assert sum(world.fleet.excused.values()) == (2 if is_counted else 0), "the leader of the last one knows it by itself"


async def test_deaths_of_one_group_alone_stay_charged() -> None:
    """Its hardware may be broken: every request may run under one of its deaths."""
    group = FakeLeader("a", Script(hold_at=1))
    async with running_world(group) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        for count in range(3):
            await until(partial(has, group, count + 1))
            await group.send(wire.State(serving=False, incarnation=2 + count, reason="rank 1 died"))
            await group.send(wire.State(serving=True, incarnation=2 + count))
        with pytest.raises(BackendError, match="3 groups died"):
            await stream
        assert not +world.fleet.excused


async def test_group_failure_is_excused_once() -> None:
    first, second, *last = [FakeLeader(name, Script(hold_at=1)) for name in "abcd"]
    async with running_world(first, second, *last) as world:
        world.source.change(first.endpoint())
        streams = [asyncio.create_task(read_stream(world.fleet, make_request([i, 1], id=f"r{i}"))) for i in range(2)]
        for group, *others in ([first, second], [second, *last]):
            await until(partial(has, group, 2))
            world.source.change(*(one.endpoint() for one in (first, second, *others)))
            await world.until_ready(len({first, second, *others}) - (group is second))
            await group.send(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        for group in last:
            await until(partial(has, group, 1))
            await group.send(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        found = await asyncio.gather(*streams, return_exceptions=True)
        assert [getattr(one, "code", one) for one in found] == ["groups_died"] * 2
        assert world.fleet.excused == {first.endpoint().key: 1, second.endpoint().key: 1}, "the last ones know it by themselves"


async def test_a_leader_that_leaves_the_list_did_not_die() -> None:
    groups = [FakeLeader(name, Script(hold_at=1)) for name in "abc"] + [FakeLeader("d")]
    async with running_world(*groups) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        for count, group in enumerate(groups[:3], 1):
            await until(partial(was_reached, group, stream))
            world.source.change(*(other.endpoint() for other in groups[count:]))
        assert (await stream).tokens == expected([1, 2, 3], 16)
        assert not any(submit.request.alone for group in groups for submit in group.submitted)


async def test_two_isolated_requests_use_two_groups() -> None:
    groups = [FakeLeader(name, Script(hold_at=2)) for name in "ab"]
    for group in groups:
        group.release()
    async with running_world(*groups) as world:
        requests = [make_request([i, 1], max_tokens=30, id=f"r{i}") for i in range(2)]
        alone = [wire.Request(id=r.id, epoch=1, prompt=r.prompt, delivered=[], sampling=r.sampling, alone=True) for r in requests]
        received = await asyncio.gather(*(read_stream(world.fleet, request) for request in alone))
        assert [h.tokens for h in received] == [expected(r.prompt, 30) for r in alone]
    assert [[s.request.alone for s in group.submitted] for group in groups] == [[True], [True]]


@pytest.mark.parametrize("order", ["evacuate", "rescue", "manual"])
async def test_isolated_request_leaves_its_group_by_replay_only(order: str) -> None:
    """A target would compute a moved request before the commit, beside its own."""
    source, target = FakeLeader("c", Script(hold_at=2)), FakeLeader("d")
    alone = msgspec.structs.replace(make_request(max_tokens=30), epoch=2, alone=True)
    async with running_world(source, target, settings=make_settings(tick_s=0.01)) as world:
        world.source.change(source.endpoint())
        await world.until_ready(1)
        stream = asyncio.create_task(read_stream(world.fleet, alone))
        await until(lambda: any(len(session.stream.journal.delivered) >= 2 for session in world.fleet.sessions))
        [session] = world.fleet.sessions
        world.source.change(source.endpoint(), target.endpoint())
        await world.until_ready(2)
        match order:
            case "evacuate":
                world.fleet.balancing.set_policy(BalancePolicy(number=1, evacuate=["c"]))
            case "rescue":
                world.fleet.balancing.set_policy(BalancePolicy(number=1, mode="Migrate"))
                assert session.assignment is not None
                await source.send(moves.RescueRequest([session.assignment.handle], 0.5))
            case "manual":
                [link] = [link for link in world.fleet.links.all() if link.endpoint.group == "d"]
                refusal = world.fleet.mover.move(session, link.key, "stop", "manual")
                assert refusal is not None and "runs alone" in refusal
        ticks: list[None] = []
        world.fleet.balancing.tick_listeners.append(partial(ticks.append, None))
        await until(lambda: len(ticks) > 20)
        assert not target.submitted and not session.moves.open_move
        await source.send(wire.State(serving=False, incarnation=2, reason="its pod left", cause="outside"))
        assert (await stream).tokens == expected([1, 2, 3], 30)
    assert [(submit.request.epoch, submit.request.alone) for submit in target.submitted] == [(3, True)]


async def test_adopted_isolated_request_is_blamed_alone() -> None:
    engine = FakeEngine()
    engine.hold = 2
    alone = msgspec.structs.replace(resumable(), alone=True)
    async with running_leader(engine) as (address, _), running_router(address) as router:
        await orphan_request(engine, address, alone)
        found = await router.fleet.find(["a"], "")
        streams = [asyncio.create_task(read_stream(router.fleet, r)) for r in (found["a"].request, make_request(id="other"))]
        await until(lambda: len(engine.submitted) == 2)
        engine.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        with pytest.raises(BackendError, match="3 groups died"):
            await streams[0]
        [other] = router.fleet.sessions
        assert (other.failures.num_losses, other.failures.num_deaths) == (1, 0)
        streams[1].cancel()
        await asyncio.gather(*streams, return_exceptions=True)


async def test_adopted_isolated_request_excludes_another() -> None:
    first, second = FakeEngine(), FakeEngine()
    first.hold = second.hold = 2
    second.reported = wire.Load(
        waiting=2, running=8, outstanding_tokens=0, free_pages=0, total_pages=1000, max_num_seqs=8, waiting_prompt_tokens=50_000
    )
    alone = msgspec.structs.replace(resumable(), alone=True)
    async with (
        running_leader(first) as (one, _),
        running_leader(second) as (other, _),
        running_router(one, other) as router,
    ):
        await router.until_linked(2)
        await orphan_request(first, one, alone)
        found = await router.fleet.find(["a"], "")
        streams = [asyncio.create_task(read_stream(router.fleet, found["a"].request))]
        await until(lambda: len(router.fleet.sessions) == 1)
        streams.append(asyncio.create_task(read_stream(router.fleet, msgspec.structs.replace(alone, id="b", epoch=1))))
        await until(lambda: len(first.submitted) + len(second.submitted) == 2)
        assert len(second.submitted) == 1
        for stream in streams:
            stream.cancel()
        await asyncio.gather(*streams, return_exceptions=True)
