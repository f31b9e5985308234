"""The router's side of the link: errors of a leader, and transfer of assets."""

import asyncio
import logging
import pathlib
import subprocess
import sys

import msgspec
import pytest

from phalanx_api import wire
from phalanx_frontend.backend import BackendError
from phalanx_router.streams.stream import AdoptedStream
from tests.polling import until
from tests.router.fakes import ASSETS, FakeLeader, Script, expected, make_request, make_settings, read_stream, running_world

WELCOME = wire.encode(wire.Welcome(protocol_version=1, group="a", revision="r1", page_size=16, assets_hash=""))


@pytest.mark.parametrize(
    ("leader", "why"),
    [
        (FakeLeader(token="another"), "the leader refused the service token (HTTP 401)"),
        (FakeLeader(script=Script(protocol_version=9)), "(4426 this leader speaks link version 9)"),
        (
            FakeLeader(
                script=Script(
                    first=wire.encode(wire.Welcome(protocol_version=9, group="a", revision="r", page_size=16, assets_hash=""))
                )
            ),
            "the leader supports link version 9",
        ),
        (
            FakeLeader(script=Script(first=wire.encode(wire.State(serving=True, incarnation=1)))),
            "the leader sent State before Welcome",
        ),
        (FakeLeader(script=Script(first=WELCOME)), "the leader sent Welcome twice"),
        (FakeLeader(script=Script(first=b"\xc1")), "the leader sent an invalid frame"),
    ],
    ids=["token", "version", "its version", "no Welcome", "two Welcomes", "garbage"],
)
async def test_unusable_leader_is_named_with_the_reason(leader: FakeLeader, why: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.WARNING)
    async with running_world(leader, ready=0) as world:
        await until(lambda: any(why in getattr(record, "why", "") for record in caplog.records))
        with pytest.raises(BackendError, match="no group is ready"):
            await read_stream(world.fleet, make_request())


async def test_frame_with_unequal_lists_closes_the_link() -> None:
    leader, other = FakeLeader("a", Script(hold_at=1)), FakeLeader("b")
    async with running_world(leader, other) as world:
        stream = world.fleet.generate(make_request())
        await anext(stream)
        await leader.send(wire.Tokens(handles=[1], epochs=[0], indices=[], tokens=[], finished=[]))
        tokens = [item async for item in stream]
        assert tokens
        assert len(other.submitted) == 1


async def test_unreachable_address_is_retried() -> None:
    leader = FakeLeader()
    async with running_world(leader) as world:
        await leader.stop()
        await world.until_ready(0)
        await leader.start()
        await world.until_ready(1)
        assert (await read_stream(world.fleet, make_request())).tokens == expected([1, 2, 3], 16)


async def test_assets_are_fetched_once_and_outlive_their_group() -> None:
    leaders = [FakeLeader("a"), FakeLeader("b")]
    async with running_world(*leaders) as world:
        assert sum(leader.fetched for leader in leaders) == 1
        for leader in leaders:
            await leader.stop()
        await world.until_ready(0)
        assert world.fleet.assets() == ASSETS


async def test_before_any_group_spoke_there_are_no_assets() -> None:
    async with running_world() as world:
        with pytest.raises(BackendError) as caught:
            world.fleet.assets()
        assert (caught.value.status, caught.value.retry_after_s) == (503, 2.0)


async def test_configured_model_names_replace_the_leaders() -> None:
    async with running_world(FakeLeader(), settings=make_settings(served_names=("mine", "too"))) as world:
        assert world.fleet.assets().served_names == ["mine", "too"]


async def test_group_with_wrong_asset_hash_gets_no_requests() -> None:
    lying = FakeLeader("a", Script(assets=msgspec.structs.replace(ASSETS, max_model_len=9)))
    async with running_world(lying, FakeLeader("b"), ready=1) as world:
        assert (await read_stream(world.fleet, make_request())).tokens
        assert lying.submitted == []


async def test_assets_that_a_leader_sends_unasked_are_used() -> None:
    leader = FakeLeader(script=Script(sends_assets=False))
    async with running_world(leader, ready=0) as world:
        await until(lambda: world.metric("phalanx_router_groups_known") == 1)
        await leader.until_linked()
        await leader.send(ASSETS)
        await world.until_ready(1)
        assert leader.fetched == 0


async def test_newest_ready_group_provides_the_assets() -> None:
    changed = wire.make_assets({"tokenizer.json": b"[]"}, ["tiny"], 4096, [0])
    old, new = FakeLeader("old"), FakeLeader("new", Script(assets=changed))
    async with running_world(old, new) as world:
        world.source.change(old.endpoint("2026-01-02T00:00:00Z"), new.endpoint("2026-01-03T00:00:00Z"))
        assert world.fleet.assets() == changed
        await read_stream(world.fleet, make_request())
        assert (len(old.submitted), len(new.submitted)) == (0, 1)
        world.source.change(old.endpoint("2026-01-02T00:00:00Z"))
        assert world.fleet.assets() == ASSETS
        await read_stream(world.fleet, make_request())
        assert len(old.submitted) == 1


def test_a_router_never_imports_torch() -> None:
    modules = "phalanx_router.program, phalanx_router.links.leader_watch"
    code = f"import sys, {modules}; print([m for m in ('torch', 'numpy') if m in sys.modules])"
    root = pathlib.Path(__file__).parents[3]
    path = ":".join(str(root / part) for part in ("crds", "operator", "runtime"))
    done = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


async def test_a_disowned_request_is_not_aborted() -> None:
    leader = FakeLeader()
    async with running_world(leader) as world:
        [link] = world.fleet.links.open_links()
        handle = link.adopt("a", "", AdoptedStream())
        link.disown(handle)
        assert link.num_requests == 0
        await asyncio.sleep(0.2)
        assert leader.aborted == []
