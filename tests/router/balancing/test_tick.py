"""The balancing tick of a running router over real links: hotspots, evacuation, rescue."""

import asyncio
import dataclasses
import logging

import msgspec
import pytest

from phalanx_api import moves, wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_api.summary import BalancePolicy, Budgets
from phalanx_router.session import StreamSession
from tests.polling import until
from tests.router.fakes import Script, World, expected, group_of, make_request, make_settings, read_stream, running_world
from tests.router.loads import report_load
from tests.router.moves.moving_leaders import SERVED, MoveScript, MovingLeader

PROMPT = list(range(1, 321))
FULL = wire.Load(
    waiting=0, running=4, outstanding_tokens=4000, free_pages=5, total_pages=100, context_tokens=1500, mean_output_tokens=200.0
)
TICKING = make_settings(tick_s=0.05)
EMPTY = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=100, total_pages=100)
THIRD_FREE = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=30, total_pages=100)
LONG_PROMPTS = wire.Load(
    waiting=0,
    running=4,
    outstanding_tokens=0,
    free_pages=700,
    total_pages=1000,
    context_tokens=3000,
    mean_output_tokens=200.0,
    running_prompt_tokens=9000,
)


def pair(target: MoveScript | None = None, sends_prefixes: bool = False) -> tuple[MovingLeader, MovingLeader]:
    """Two leaders with room; the first one holds its streams after 5 steps."""
    peers: list[MovingLeader] = []
    leaders = MovingLeader("a", peers, Script(hold_at=5, sends_prefixes=sends_prefixes)), MovingLeader("b", peers, None, target)
    for leader in leaders:
        leader.load = EMPTY
    return leaders


async def start_stream(world: World) -> tuple[StreamSession, asyncio.Task[list[int]]]:
    """A stream with 5 tokens in the first group, and the task of its client."""

    async def tokens() -> list[int]:
        return (await read_stream(world.fleet, make_request(PROMPT, max_tokens=20))).tokens

    client = asyncio.create_task(tokens())
    await until(lambda: any(len(session.stream.journal.delivered) >= 5 for session in world.fleet.sessions))
    (session,) = world.fleet.sessions
    assert group_of(session) == "a"
    return session, client


def handle_of(session: StreamSession) -> int:
    assert session.assignment is not None
    return session.assignment.handle


def moved(world: World, why: str) -> float:
    return world.metric("phalanx_router_moves_total", outcome="moved", why=why)


async def test_hotspot_is_reported_once_and_sends_a_stream(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "phalanx_router.migration.balance_loop")
    source, target = pair()
    async with running_world(source, target, settings=TICKING) as world:
        session, client = await start_stream(world)
        source.load = FULL
        assert await client == expected(PROMPT, 20)
        assert moved(world, "hotspot") == 1
        assert world.metric("phalanx_router_moves_proposed_total", rung="migrate") == 1
        assert world.metric("phalanx_router_hotspot", group="a", cause="kv") == 1
        assert (session.moves.num_balanced, world.fleet.balancing.counts.moved) == (1, 1)
        source.load = EMPTY
        await until(lambda: not world.fleet.balancing.decision.hotspots)
        assert world.registry.get_sample_value("phalanx_router_hotspot", {"group": "a", "cause": "kv"}) is None
    messages = [(r.getMessage(), r.__dict__["group"], r.__dict__["cause"]) for r in caplog.records if "hotspot" in r.getMessage()]
    assert messages == [("hotspot", "a", "kv"), ("hotspot over", "a", None)]


async def test_hot_prefix_is_replicated_with_one_of_its_streams() -> None:
    source, target = pair()
    keys = PrefixKeys(root_key(SERVED.model_hash), 16).extend(PROMPT)
    async with running_world(
        source, target, settings=dataclasses.replace(TICKING, policy=BalancePolicy(ttft_target_s=0.5))
    ) as world:
        session, client = await start_stream(world)
        await source.send(wire.PageChanges(0, [(True, key) for key in keys], is_snapshot=True))
        await until(lambda: world.fleet.links.fleet_view.prefixes.holders(keys[-1]) != [])
        source.load = msgspec.structs.replace(LONG_PROMPTS, prefixes=[wire.HotPrefix(keys[-1], len(keys), 0.6)])
        assert await client == expected(PROMPT, 20)
        assert world.metric("phalanx_router_moves_proposed_total", rung="replicate") == 1
        assert (moved(world, "hotspot"), session.moves.num_balanced) == (1, 1)


async def test_hot_prefix_is_pulled_without_moving_a_stream() -> None:
    source, target = pair(sends_prefixes=True)
    keys = PrefixKeys(root_key(SERVED.model_hash), 16).extend(PROMPT)
    async with running_world(
        source, target, settings=dataclasses.replace(TICKING, policy=BalancePolicy(ttft_target_s=0.5))
    ) as world:
        session, client = await start_stream(world)
        await source.send(wire.PageChanges(0, [(True, key) for key in keys], is_snapshot=True))
        await until(lambda: world.fleet.links.fleet_view.prefixes.holders(keys[-1]) != [])
        source.load = msgspec.structs.replace(LONG_PROMPTS, prefixes=[wire.HotPrefix(keys[-1], len(keys), 0.6)])
        await until(lambda: target.submitted)
        (copy,) = target.submitted
        assert copy.move and (copy.request.prompt, copy.request.sampling.max_tokens) == (PROMPT, 1)
        assert world.metric("phalanx_router_pulls_total", outcome="pulled") == 1
        source.release()
        assert await client == expected(PROMPT, 20)
        assert (moved(world, "hotspot"), session.moves.num_completed) == (0, 0)


async def test_groups_that_copy_no_pages_pull_no_prefix() -> None:
    source, target = pair(sends_prefixes=True)
    for leader in (source, target):
        leader.state = msgspec.structs.replace(leader.state, served=msgspec.structs.replace(SERVED, layout=""))
    keys = PrefixKeys(root_key(SERVED.model_hash), 16).extend(PROMPT)
    async with running_world(
        source, target, settings=dataclasses.replace(TICKING, policy=BalancePolicy(ttft_target_s=0.5))
    ) as world:
        _, client = await start_stream(world)
        await source.send(wire.PageChanges(0, [(True, key) for key in keys], is_snapshot=True))
        await until(lambda: world.fleet.links.fleet_view.prefixes.holders(keys[-1]) != [])
        source.load = msgspec.structs.replace(LONG_PROMPTS, prefixes=[wire.HotPrefix(keys[-1], len(keys), 0.6)])
        assert await client == expected(PROMPT, 20)
        assert moved(world, "hotspot") == 1, "a stream moves with it, computed again"
        assert not any(isinstance(frame, moves.SendPrefix) for frame in source.frames)


async def test_draining_group_sends_streams_and_gets_no_new_ones() -> None:
    source, target = pair()
    async with running_world(source, target, settings=TICKING) as world:
        session, client = await start_stream(world)
        world.fleet.balancing.set_policy(BalancePolicy(number=1, mode="Off", evacuate=["a"]))
        assert await client == expected(PROMPT, 20)
        assert moved(world, "drain") == 1 and session.moves.num_balanced == 0
        await read_stream(world.fleet, make_request([7, 8], max_tokens=4))
        assert [submit.request.prompt for submit in source.submitted] == [PROMPT]


async def test_draining_group_is_evacuated_without_an_operator() -> None:
    source, target = pair()
    async with running_world(source, target, settings=TICKING) as world:
        _, client = await start_stream(world)
        await source.send(wire.State(serving=False, incarnation=1, reason="draining", draining=True, served=source.move.served))
        assert await client == expected(PROMPT, 20)
        assert moved(world, "drain") == 1


async def test_a_policy_of_a_lower_number_changes_nothing() -> None:
    async with running_world(*pair(), settings=TICKING) as world:
        for policy in (
            BalancePolicy(number=4, mode="Route"),
            BalancePolicy(number=3, mode="Off", evacuate=["a"]),
            BalancePolicy(number=2),
        ):
            world.fleet.balancing.set_policy(policy)
        assert world.fleet.balancing.policy == BalancePolicy(number=4, mode="Route")
        assert world.fleet.links.fleet_view.evacuating == frozenset()


async def test_request_about_to_be_preempted_moves() -> None:
    source, target = pair()
    async with running_world(source, target, settings=TICKING) as world:
        session, client = await start_stream(world)
        await source.send(moves.RescueRequest([handle_of(session)], 0.5))
        assert await client == expected(PROMPT, 20)
        assert moved(world, "rescue") == 1
        assert [frame.mode for frame in source.frames if isinstance(frame, moves.MoveOut)] == ["stop"]


async def test_source_group_gets_no_new_request_at_once() -> None:
    """Both groups report equal loads and the draw selects the first: only the attraction guard differs."""
    source, target = pair()
    async with running_world(source, target, settings=TICKING) as world:
        await asyncio.gather(*(report_load(world, leader, THIRD_FREE) for leader in (source, target)))
        session, client = await start_stream(world)
        await source.send(moves.RescueRequest([handle_of(session)], 0.5))
        assert await client == expected(PROMPT, 20)
        assert moved(world, "rescue") == 1
        source.release()
        await read_stream(world.fleet, make_request(PROMPT, max_tokens=4, id="new"))
        assert [submit.request.id for submit in source.submitted] == ["request"]
        assert [submit.request.id for submit in target.submitted] == ["request", "new"]


async def test_request_stays_without_a_free_group() -> None:
    source, target = pair()
    target.load = FULL
    async with running_world(source, target, settings=TICKING) as world:
        session, client = await start_stream(world)
        await source.send(moves.RescueRequest([handle_of(session)], 0.5))
        await until(lambda: world.metric("phalanx_router_moves_refused_total", rung="rescue", why="no_target") == 1)
        source.release()
        assert await client == expected(PROMPT, 20)
        assert session.moves.num_completed == 0


async def test_a_move_that_the_target_refuses_is_tried_again() -> None:
    source, target = pair(MoveScript(refuse="no_room"))
    async with running_world(source, target, settings=TICKING) as world:
        _, client = await start_stream(world)
        world.fleet.balancing.set_policy(BalancePolicy(budgets=Budgets(tokens_share_per_s=10.0)))
        source.load = FULL
        await until(lambda: world.metric("phalanx_router_moves_total", outcome="refused", why="hotspot") >= 2)
        target.move.refuse = None
        assert await client == expected(PROMPT, 20)
        assert moved(world, "hotspot") == 1
        assert world.fleet.balancing.counts.failed >= 2


async def test_a_bug_costs_one_tick(caplog: pytest.LogCaptureFixture) -> None:
    async with running_world(*pair(), settings=TICKING) as world:
        calls = []

        def fail() -> None:
            calls.append(1)
            raise ValueError("a bug")

        world.fleet.balancing.tick_listeners.append(fail)
        await until(lambda: len(calls) >= 2)
        _, client = await start_stream(world)
        world.leaders[0].release()
        assert await client == expected(PROMPT, 20)
    assert "balancing failed" in caplog.text and "a bug" in caplog.text
