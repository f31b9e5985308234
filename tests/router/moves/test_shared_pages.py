"""Pulls from groups of other services of the namespace, over real links to fake leaders."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from phalanx_api import moves, wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_api.summary import BalancePolicy, Budgets
from phalanx_api.wire.holders import holder_token
from phalanx_router.links.holders import HolderSettings, SharingService, read_services
from tests.polling import until
from tests.router.fakes import Script, World, expected, make_request, make_settings, read_stream, running_world
from tests.router.loads import ROOM, is_same, report_load
from tests.router.moves.moving_leaders import MoveScript, MovingLeader
from tests.router.moves.pulled_prompts import PAGES, PROMPT, SERVED, SLOW_STEPS, with_slow_steps

THEIR_TOKEN = holder_token("the token of another service")


class Field:
    """The group "own" of this service, and the group "foreign" of another one, which has the pages of `PROMPT`."""

    def __init__(self, world: World, own: MovingLeader, foreign: MovingLeader, folder: Path) -> None:
        self.world, self.own, self.foreign, self.folder = world, own, foreign, folder

    async def complete(self, id: str) -> None:
        assert (await read_stream(self.world.fleet, make_request(PROMPT, 12, id))).tokens == expected(PROMPT, 12)


@asynccontextmanager
async def running_field(folder: Path, served: wire.Served = SERVED) -> AsyncIterator[Field]:
    peers: list[MovingLeader] = []
    own = MovingLeader("own", peers, None, MoveScript(served=SERVED))
    foreign = MovingLeader("foreign", peers, Script(sends_prefixes=True), MoveScript(served=served))
    foreign.token = THEIR_TOKEN
    foreign.load = with_slow_steps(ROOM)
    await foreign.start()
    try:
        (folder / "their-service").write_text(f"{THEIR_TOKEN}\n{foreign.address}\n")
        (folder / "own-service").write_text(f"{THEIR_TOKEN}\n{foreign.address}\n")
        holders = HolderSettings(own="own-service", folder=folder, read_interval_s=0.02)
        async with running_world(own, settings=replace(make_settings(), holders=holders)) as world:
            await until(lambda: len(world.fleet.holders.open_links()) == 1)
            keys = PrefixKeys(root_key(SERVED.page_model, "", "", ""), 16).extend(PROMPT)
            await foreign.send(wire.PageChanges(0, [(True, key) for key in keys], is_snapshot=True))
            await until(lambda: world.fleet.links.fleet_view.prefixes.num_keys == len(keys))
            await report_load(world, own, with_slow_steps(ROOM))
            yield Field(world, own, foreign, folder)
    finally:
        await foreign.stop()


def prefixes_sent(leader: MovingLeader) -> int:
    return sum(isinstance(frame, moves.SendPrefix) for frame in leader.frames)


async def test_pages_come_from_a_group_of_another_service(tmp_path: Path) -> None:
    async with running_field(tmp_path) as field:
        field.world.fleet.balancing.set_policy(BalancePolicy(number=1, budgets=Budgets(bytes_per_s=1e9)))
        await field.complete("a")
        assert field.world.metric("phalanx_router_pulls_total", outcome="pulled") == 1
        assert field.world.metric("phalanx_router_pull_tokens_total") == PAGES * 16
        assert prefixes_sent(field.foreign) == 1 and not field.foreign.submitted
        assert [submit.move != "" for submit in field.own.submitted] == [True]
        assert len(field.world.fleet.links.all()) == 1, "no request can go to the other service"


async def test_own_groups_are_not_compared_with_holders(tmp_path: Path) -> None:
    faster = msgspec.structs.replace(ROOM, step_model=[part / 2 for part in SLOW_STEPS], mean_output_tokens=900.0)
    async with running_field(tmp_path) as field:
        [holder], fleet_view = field.world.fleet.holders.open_links(), field.world.fleet.links.fleet_view
        field.foreign.load = faster
        await until(lambda: is_same(holder.group_report.load, faster))
        field.world.fleet.balancing.set_policy(BalancePolicy(number=1, budgets=Budgets(bytes_per_s=1e9)))
        await field.complete("a")
        assert prefixes_sent(field.foreign) == 1
        [view] = fleet_view.views(field.world.fleet.links.serving())
        assert (view.speed, view.mean_output_tokens) == (1.0, 0.0), "half as fast as the holder, with shorter outputs"
        assert fleet_view.foreign_views([holder])[0].mean_output_tokens == 900.0


async def test_service_that_shares_no_more_is_left(tmp_path: Path) -> None:
    async with running_field(tmp_path) as field:
        (field.folder / "their-service").unlink()
        await until(lambda: not field.world.fleet.holders.open_links())
        assert field.world.fleet.links.fleet_view.prefixes.num_keys == 0
        await field.complete("a")
        assert not prefixes_sent(field.foreign) and field.own.submitted[0].move == ""


async def test_groups_with_other_weights_send_nothing(tmp_path: Path) -> None:
    other = wire.Served("model-2", SERVED.layout, page_bytes=65536)
    async with running_field(tmp_path, other) as field:
        await field.complete("a")
        assert not prefixes_sent(field.foreign) and field.own.submitted[0].move == ""


async def test_lost_holder_of_another_service_costs_no_token(tmp_path: Path) -> None:
    async with running_field(tmp_path) as field:
        field.foreign.move.ignored = (moves.SendPrefix,)
        stream = field.complete("a")
        field.foreign.cut()
        await stream
        await until(lambda: len(field.world.fleet.holders.open_links()) == 1)


@pytest.mark.parametrize(
    ("text", "expected_service"),
    [
        ("token", SharingService("token")),
        ("token\na:1 b:2\n", SharingService("token", ("a:1", "b:2"))),
        ("", None),
        (b"\xff", None),
    ],
)
def test_folder_names_services(tmp_path: Path, text: str | bytes, expected_service: SharingService | None) -> None:
    (tmp_path / "chat").write_bytes(text if isinstance(text, bytes) else text.encode())
    (tmp_path / "own").write_text("token")
    (tmp_path / "..data").mkdir()
    assert read_services(tmp_path, "own") == ({} if expected_service is None else {"chat": expected_service})
    assert read_services(tmp_path / "absent", "own") == {}
