"""Embeddings behind a router: the choice of a group, replays, and what never happens to them."""

import asyncio

import msgspec
import pytest

from phalanx_api import wire
from phalanx_frontend.backend import BackendError
from phalanx_router.routing.equality import computation_key
from tests.frontend.fakes import vector_of
from tests.polling import until
from tests.router.fakes import FakeLeader, Script, StreamResult, World, make_request, make_settings, read_stream, running_world

OLDER = wire.State(serving=True, incarnation=1)
"""Of a leader whose version has no embeddings."""


def pooled(prompt: list[int]) -> wire.Request:
    request = make_request(prompt, max_tokens=0, id=f"pooled {prompt}")
    return msgspec.structs.replace(request, pooling="mean")


def older(group: str) -> FakeLeader:
    leader = FakeLeader(group)
    leader.state = OLDER
    return leader


async def started_at(world: World, request: wire.Request) -> tuple[asyncio.Task[StreamResult], FakeLeader]:
    """Starts a request; returns its reader and the leader that has it."""
    reading = asyncio.create_task(read_stream(world.fleet, request))
    await until(lambda: any(leader.submitted for leader in world.leaders))
    return reading, next(leader for leader in world.leaders if leader.submitted)


@pytest.mark.parametrize("ends", ["dies", "drains"])
async def test_lost_embedding_is_computed_by_another_group(ends: str) -> None:
    leaders = [FakeLeader(name, Script(hold_at=0)) for name in ("a", "b")]
    async with running_world(*leaders) as world:
        request = pooled([5, 6, 7])
        reading, first = await started_at(world, request)
        [other] = [leader for leader in leaders if leader is not first]
        other.release()
        if ends == "dies":
            first.cut()
        else:
            await first.send(wire.State(serving=False, incarnation=1, reason="drained", draining=True))
            await first.close()
        result = await reading
    assert (result.tokens, result.finish, result.vector) == ([], "stop", vector_of(request))
    [replayed] = other.submitted
    assert (replayed.request.epoch, replayed.request.delivered, replayed.request.pooling) == (1, [], "mean")


async def test_group_of_an_older_version_gets_no_embedding() -> None:
    leaders = [older("a"), FakeLeader("b"), older("c")]
    async with running_world(*leaders) as world:
        for number in range(6):
            result = await read_stream(world.fleet, pooled([number + 1]))
            assert result.vector
        assert [len(leader.submitted) for leader in leaders] == [0, 6, 0]
        assert (await read_stream(world.fleet, make_request())).finish == "length"


async def test_older_groups_alone_are_a_clear_error() -> None:
    async with running_world(older("a")) as world:
        with pytest.raises(BackendError) as refused:
            await read_stream(world.fleet, pooled([1]))
        assert (refused.value.status, refused.value.code) == (503, "embeddings_unavailable")
        assert not world.leaders[0].submitted


async def test_lost_embedding_waits_for_no_older_group() -> None:
    leaders = [FakeLeader("a", Script(hold_at=0)), older("b")]
    async with running_world(*leaders, settings=make_settings(patience_s=0.2)) as world:
        reading, first = await started_at(world, pooled([1, 2]))
        await first.stop()
        with pytest.raises(BackendError) as refused:
            await reading
        assert refused.value.code == "embeddings_unavailable" and not leaders[1].submitted


async def test_embedding_is_never_moved() -> None:
    leaders = [FakeLeader(name, Script(hold_at=0)) for name in ("a", "b")]
    async with running_world(*leaders) as world:
        reading, first = await started_at(world, pooled([1, 2]))
        [session] = world.fleet.sessions
        [target] = [key for key in world.fleet.links.eligible(session.tokenizer) if key != session.last_key]
        assert world.fleet.mover.move(session, target, "precopy", "drain") == "an embedding is not moved"
        first.release()
        assert (await reading).vector


def test_equal_embeddings_are_computed_apart() -> None:
    assert computation_key(pooled([1, 2])) is None
