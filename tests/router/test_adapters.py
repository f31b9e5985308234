"""Requests with adapters behind a router: only groups that report the adapter get them."""

import asyncio

import msgspec
import pytest

from phalanx_api import wire
from phalanx_frontend.backend import BackendError
from tests.polling import until
from tests.router.fakes import ASSETS, FakeLeader, Script, expected, make_request, make_settings, read_stream, running_world

ADAPTER = wire.Adapter("first", "hash")
OTHER = wire.Adapter("first", "other content")


def with_adapter(number: int = 1, max_tokens: int = 16) -> wire.Request:
    return msgspec.structs.replace(make_request([number, 2, 3], max_tokens), adapter=ADAPTER)


def holder(group: str, adapter: wire.Adapter = ADAPTER, script: Script | None = None) -> FakeLeader:
    script = script or Script()
    script.assets = wire.with_adapters(ASSETS, [adapter])
    return FakeLeader(group, script)


def unknown(submit: wire.Submit) -> wire.Refused:
    message = "the adapter first is not loaded in this group"
    return wire.Refused(handle=submit.handle, epoch=submit.request.epoch, status=404, code="model_not_found", message=message)


async def test_only_groups_with_the_adapter_are_chosen() -> None:
    """Others have none, as all groups of an older version, or one of the same name."""
    leaders = [FakeLeader("a"), holder("b"), holder("c", OTHER)]
    async with running_world(*leaders) as world:
        for number in range(6):
            assert (await read_stream(world.fleet, with_adapter(number))).tokens == expected([number, 2, 3], 16)
        assert [len(leader.submitted) for leader in leaders] == [0, 6, 0]
        await asyncio.gather(*(read_stream(world.fleet, make_request([number])) for number in range(9)))
        assert all(len(leader.submitted) > number for leader, number in zip(leaders, (0, 6, 0), strict=True))


async def test_streams_are_replayed_by_another_holder() -> None:
    leaders = [holder("a", script=Script(hold_at=3)), FakeLeader("b"), holder("c", script=Script(hold_at=3))]
    async with running_world(*leaders) as world:
        reading = asyncio.create_task(read_stream(world.fleet, with_adapter()))
        await until(lambda: any(leader.steps == 3 for leader in leaders))
        [first] = [leader for leader in leaders if leader.submitted]
        for leader in leaders:
            if leader is not first:
                leader.release()
        first.cut()
        assert (await reading).tokens == expected([1, 2, 3], 16)
        assert not leaders[1].submitted


async def test_streams_without_another_holder_end_clearly() -> None:
    leaders = [holder("a", script=Script(hold_at=3)), FakeLeader("b")]
    async with running_world(*leaders, settings=make_settings(patience_s=0.2)) as world:
        reading = asyncio.create_task(read_stream(world.fleet, with_adapter()))
        await until(lambda: leaders[0].steps == 3)
        await leaders[0].stop()
        with pytest.raises(BackendError, match="no ready group has the adapter first") as ended:
            await reading
        assert (ended.value.status, ended.value.code, ended.value.retry_after_s) == (503, "adapter_unavailable", 2.0)
        with pytest.raises(BackendError, match="no ready group has the adapter first"):
            await read_stream(world.fleet, with_adapter())
        assert not leaders[1].submitted


async def test_groups_that_lost_the_adapter_are_left() -> None:
    """A request may overtake the report of an unload."""
    leaders = [holder("a", script=Script(refuse=unknown)), holder("b")]
    async with running_world(*leaders) as world:
        for number in range(6):
            assert (await read_stream(world.fleet, with_adapter(number))).tokens
        assert len(leaders[1].submitted) == 6 and leaders[0].submitted
        leaders[1].script.refuse = unknown
        with pytest.raises(BackendError) as refused:
            await read_stream(world.fleet, with_adapter())
        assert (refused.value.status, refused.value.code) == (404, "model_not_found")


async def test_streams_move_only_to_groups_with_the_adapter() -> None:
    leaders = [holder("a", script=Script(hold_at=3)), FakeLeader("b"), holder("c", OTHER)]
    async with running_world(*leaders) as world:
        reading = asyncio.create_task(read_stream(world.fleet, with_adapter()))
        await until(lambda: leaders[0].steps == 3)
        [session] = world.fleet.sessions
        for link in world.fleet.links.open_links():
            if link.endpoint.group != "a":
                refused = world.fleet.mover.move(session, link.key, "recompute", "manual")
                assert refused is not None and "lacks the adapter" in refused
        leaders[0].release()
        assert (await reading).tokens == expected([1, 2, 3], 16)
