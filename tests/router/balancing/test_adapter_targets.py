"""Streams with adapters move only to groups that have the adapter, or that load it for them."""

import asyncio
from dataclasses import replace

import msgspec
import pytest
from websockets.asyncio.server import ServerConnection

from phalanx_api import moves, wire
from phalanx_api.summary import BalancePolicy
from phalanx_router.balancing.balancer import Balancer
from phalanx_router.session import StreamSession
from tests.polling import until
from tests.router.balancing.groups import World as BalanceWorld
from tests.router.balancing.groups import first_moves, hot_world, prefix_world, stream
from tests.router.fakes import ASSETS, Script, World, expected, group_of, make_request, make_settings, read_stream, running_world
from tests.router.moves.moving_leaders import MovingLeader

LEGAL = wire.Adapter("legal", "hash of legal")
PROMPT = list(range(1, 321))
EMPTY = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=100, total_pages=100)
BUSY = wire.Load(waiting=0, running=4, outstanding_tokens=400, free_pages=60, total_pages=100, context_tokens=600)
HOLDERS = frozenset({"c/1/1"})


class AdapterLeader(MovingLeader):
    """A leader with adapters, that loads each one that a router orders."""

    def __init__(self, group: str, peers: list[MovingLeader], script: Script, *adapters: wire.Adapter) -> None:
        script.assets = wire.with_adapters(ASSETS, list(adapters))
        super().__init__(group, peers, script)
        self.load = EMPTY
        self.state = msgspec.structs.replace(self.state, adapters=wire.AdapterSlots(2))
        self.required: list[str] = []

    async def obey(self, connection: ServerConnection, frame: wire.ToLeader) -> None:
        if isinstance(frame, wire.RequireAdapter):
            self.required.append(frame.name)
            self.script.assets = wire.with_adapters(ASSETS, [LEGAL])
            await self.send(self.script.assets)
        else:
            await super().obey(connection, frame)


def leaders(*, has_holder: bool) -> list[AdapterLeader]:
    """Group a holds the adapter and its streams, b does not, and c may; c is the busiest."""
    peers: list[MovingLeader] = []
    found = [
        AdapterLeader("a", peers, Script(hold_at=5), LEGAL),
        AdapterLeader("b", peers, Script()),
        AdapterLeader("c", peers, Script(), *[LEGAL] * has_holder),
    ]
    found[2].load = BUSY
    return found


SETTINGS = replace(
    make_settings(tick_s=0.05),
    policy=BalancePolicy(adapters=[wire.DeclaredAdapter("legal", "file:///legal")]),
    adapter_wait_s=10.0,
)
EVACUATE = msgspec.structs.replace(SETTINGS.policy, number=1, evacuate=["a"])


async def start_stream(world: World) -> tuple[StreamSession, asyncio.Task[list[int]]]:
    """A stream with the adapter, held in group a, and the task of its client."""

    async def tokens() -> list[int]:
        request = msgspec.structs.replace(make_request(PROMPT, max_tokens=20), adapter=LEGAL)
        return (await read_stream(world.fleet, request)).tokens

    client = asyncio.create_task(tokens())
    await until(lambda: any(len(session.stream.journal.delivered) >= 5 for session in world.fleet.sessions))
    (session,) = world.fleet.sessions
    assert group_of(session) == "a"
    return session, client


async def test_evacuated_stream_goes_to_the_adapters_holder() -> None:
    groups = leaders(has_holder=True)
    groups[2].state = msgspec.structs.replace(groups[2].state, serving=False)
    async with running_world(*groups, settings=SETTINGS, ready=2) as world:
        _, client = await start_stream(world)
        await groups[2].send(msgspec.structs.replace(groups[2].state, serving=True))
        await world.until_ready(3)
        world.fleet.balancing.set_policy(EVACUATE)
        assert await client == expected(PROMPT, 20)
        assert world.metric("phalanx_router_moves_total", outcome="moved", why="drain") == 1
        assert world.metric("phalanx_router_moves_refused_total", rung="evacuate", why="router") == 0
        assert [len(group.submitted) for group in groups] == [1, 0, 1]
        assert not any(group.required for group in groups)


async def test_evacuated_stream_gets_its_adapter_loaded() -> None:
    groups = leaders(has_holder=False)
    async with running_world(*groups, settings=SETTINGS) as world:
        _, client = await start_stream(world)
        world.fleet.balancing.set_policy(EVACUATE)
        assert await client == expected(PROMPT, 20)
        assert world.metric("phalanx_router_moves_total", outcome="moved", why="drain") == 1
        assert [name for group in groups for name in group.required] == ["legal"]
        assert [len(group.submitted) for group in groups] == [1, *(len(group.required) for group in groups[1:])]


async def test_rescued_stream_goes_to_the_adapters_holder() -> None:
    groups = leaders(has_holder=True)
    groups[2].state = msgspec.structs.replace(groups[2].state, serving=False)
    async with running_world(*groups, settings=SETTINGS, ready=2) as world:
        session, client = await start_stream(world)
        await groups[2].send(msgspec.structs.replace(groups[2].state, serving=True))
        await world.until_ready(3)
        await until(lambda: [view.state for view in world.fleet.balancing.views()] == ["fresh"] * 3)
        assert session.assignment is not None
        await groups[0].send(moves.RescueRequest([session.assignment.handle], 0.5))
        assert await client == expected(PROMPT, 20)
        assert world.metric("phalanx_router_moves_total", outcome="moved", why="rescue") == 1
        assert [len(group.submitted) for group in groups] == [1, 0, 1]


def bar(world: BalanceWorld, *names: str, **fields: object) -> None:
    """Lets these streams move to group c only."""
    barred = frozenset(f"{name}/1/1" for name in world.names) - HOLDERS
    for name in names:
        known = {"barred_targets": barred} | fields
        world.records[name] = stream(name, world.where[name], world.contexts[name], **known)


def test_streams_without_a_target_delay_no_others() -> None:
    world = hot_world(BalancePolicy(evacuate=["a"]), count=4)
    bar(world, "s00", "s01", barred_targets=frozenset(f"{name}/1/1" for name in world.names))
    decision = world.tick(0.0)
    assert sorted(planned.stream for planned in decision.moves) == ["s02", "s03"]
    assert [(refusal.rung, refusal.code) for refusal in decision.refusals] == [("evacuate", "no_target")]


def test_recent_sources_are_barred_beside_other_groups() -> None:
    """The stream has left c a moment ago, and the other groups lack its adapter."""
    world = hot_world(BalancePolicy(evacuate=["c"]), count=1)
    world.where["s00"] = "c"
    (planned,) = world.tick(0.0).moves
    world.obey(planned, 0.0)
    world.balancer.policy = BalancePolicy(number=1, evacuate=[planned.target.split("/")[0]])
    bar(world, "s00", moved_at=0.0, last_source="c/1/1")
    assert not world.tick(0.25).moves


def test_hotspot_sends_streams_to_a_holder() -> None:
    world = hot_world()
    bar(world, *world.where)
    world.fields["c"] = {"used_pages": 150, "context_tokens": 2400}
    decision = first_moves(world)
    assert decision.moves and {planned.target for planned in decision.moves} == HOLDERS


@pytest.mark.parametrize("can_send", [True, False])
def test_hot_prefix_goes_to_a_holder(can_send: bool) -> None:
    world = prefix_world()
    bar(world, *(name for name, view in world.records.items() if view.has_hot_prefix), has_hot_prefix=True)
    world.fields["c"] = {"used_pages": 100}
    if can_send:
        world.balancer = Balancer(world.balancer.policy, lambda key: ["a/1/1"], can_send=lambda key: True)
    decisions = [world.tick(0.25 * number) for number in range(8)]
    moved = [planned.target for decision in decisions for planned in decision.moves]
    copied = [planned.target for decision in decisions for planned in decision.copies]
    assert (moved, copied) == (([], ["c/1/1"]) if can_send else (["c/1/1"], []))
