"""Moves of streams between leaders over real links: the client receives each token once."""

import asyncio
from dataclasses import replace

import msgspec
import pytest

from phalanx_api import moves, wire
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.backend import BackendError
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.moves.board import MoveBoard
from phalanx_router.moves.records import DEFAULT_MOVE_SETTINGS, MoveEnded, MoveRequest, TransferMode
from phalanx_router.session import StreamSession
from tests.polling import until
from tests.router.fakes import Script, World, expected, group_of, make_request, make_settings, read_stream, running_world
from tests.router.moves.moving_leaders import MoveScript, MovingLeader


def pair(source: MoveScript | None = None, target: MoveScript | None = None) -> tuple[MovingLeader, MovingLeader]:
    """The source holds after 5 steps."""
    peers: list[MovingLeader] = []
    return MovingLeader("a", peers, Script(hold_at=5), source), MovingLeader("b", peers, None, target)


async def session_at(world: World, leader: MovingLeader, count: int) -> StreamSession:
    """The only stream, with at least `count` tokens at this leader."""
    await until(lambda: any(len(session.stream.journal.delivered) >= count for session in world.fleet.sessions))
    (session,) = world.fleet.sessions
    assert group_of(session) == leader.group
    return session


def key_of(world: World, leader: MovingLeader) -> str:
    return next(link.key for link in world.fleet.links.all() if link.endpoint.group == leader.group)


def record_ends(world: World) -> list[tuple[str, str]]:
    """Outcomes and codes of ended moves."""
    received: list[tuple[str, str]] = []

    def record_end(session: StreamSession, request: MoveRequest, ended: MoveEnded) -> None:
        received.append((ended.outcome, ended.code))

    world.fleet.mover.end_listeners.append(record_end)
    return received


@pytest.mark.parametrize("transfer", ["stop", "precopy", "recompute"])
async def test_a_moved_stream_has_each_token_once(transfer: TransferMode) -> None:
    source, target = pair()
    async with running_world(source, target) as world:
        ends = record_ends(world)
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=20)))
        session = await session_at(world, source, 5)
        assert world.fleet.mover.move(session, key_of(world, target), transfer, "manual") is None
        received = await stream
        assert received.tokens == expected([1, 2, 3], 20)
        assert (session.moves.num_completed, session.failures.num_losses, session.failures.num_departures) == (1, 0, 0)
        assert ends == [("moved", "")]
        assert world.metric("phalanx_router_moves_total", outcome="moved", why="manual") == 1
        assert world.metric("phalanx_router_move_stall_seconds_count") == 1
        assert world.metric("phalanx_router_replays_total") == 0
        assert world.metric("phalanx_router_move_bytes_total") == (0 if transfer == "recompute" else 1000)
        await until(lambda: source.aborted == [1])
    assert target.submitted[-1].request.epoch == 1
    assert target.submitted[-1].request.waited_ms > source.submitted[-1].request.waited_ms, "it keeps its place"
    assert (moves.Release in map(type, source.frames)) is True
    assert bool(target.submitted[-1].move) == (transfer != "recompute")
    assert not target.reserved and not source.frozen


async def test_moves_follow_the_longest_step_of_both_groups() -> None:
    source, target = pair()
    target.load = msgspec.structs.replace(target.load, step_s=0.1, longest_step_s=0.4)
    steps: list[float] = []
    async with running_world(source, target) as world:
        world.fleet.mover.end_listeners.append(lambda session, request, ended: steps.append(request.step_s))
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=20)))
        session = await session_at(world, source, 5)
        assert world.fleet.mover.move(session, key_of(world, target), "precopy", "manual") is None
        await stream
    assert steps == [0.4]


async def test_transferred_pages_are_not_computed_again() -> None:
    source, target = pair(target=MoveScript())
    target.script.silent = True
    target.script.hold_at = 0
    async with running_world(source, target) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request(prompt=range(1, 400), max_tokens=20)))
        session = await session_at(world, source, 5)
        await until(lambda: key_of(world, target) in world.fleet.links.eligible(session.tokenizer))
        assert world.fleet.mover.move(session, key_of(world, target), "stop", "manual") is None
        await until(lambda: group_of(session) == target.group)
        assert session.assignment is not None
        unreported = session.assignment.link.group_report.ledger.unreported
        assert (unreported.requests, unreported.prompt_tokens, unreported.pages, unreported.context_tokens) == (1, 1, 1, 404)
        target.release()
        await stream


async def test_another_layout_is_computed_again() -> None:
    source, target = pair(target=MoveScript(served=wire.Served("model-1", "tp4 bf16 16")))
    async with running_world(source, target) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=20)))
        session = await session_at(world, source, 5)
        assert world.fleet.mover.move(session, key_of(world, target), "precopy", "manual") is None
        assert (await stream).tokens == expected([1, 2, 3], 20)
    warm, real = target.submitted
    assert warm.request.sampling.max_tokens == 1 and warm.request.prompt == [1, 2, 3, *expected([1, 2, 3], 5)]
    assert real.request.delivered == expected([1, 2, 3], 5) and not target.frames


async def test_stream_never_moves_to_another_model() -> None:
    source, target = pair(target=MoveScript(served=wire.Served("model-2", "tp2 bf16 16")))
    async with running_world(source, target) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=20)))
        session = await session_at(world, source, 5)
        assert "different model" in (world.fleet.mover.move(session, key_of(world, target), "stop", "manual") or "")
        source.release()
        assert (await stream).tokens == expected([1, 2, 3], 20)
    assert not target.submitted


@pytest.mark.parametrize(
    ("without_successor", "wanted", "ends"),
    [(["a"], True, True), ([], True, False), (["a", "b"], False, True), (["a", "b"], True, False)],
    ids=["the last of its weights went for good", "it may return", "no group is wanted", "another one may start"],
)
async def test_stream_ends_with_the_last_group_of_its_weights(without_successor: list[str], wanted: bool, ends: bool) -> None:
    source, target = pair(target=MoveScript(served=wire.Served("model-2", "tp2 bf16 16")))
    async with running_world(source, target, settings=make_settings(keep_alive_s=0.01)) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=20)))
        session = await session_at(world, source, 5)
        policy = BalancePolicy(number=1, evacuate=["a"], without_successor=without_successor, wanted=wanted)
        world.fleet.balancing.set_policy(policy)
        await source.stop()
        if ends:
            with pytest.raises(
                BackendError, match="a, the last group with the weights that started this stream, does not exist any more"
            ) as caught:
                await stream
            assert (caught.value.status, caught.value.code, caught.value.can_resume) == (503, "weights_gone", False)
        else:
            await until(lambda: session.wait.unassigned_since is not None)
            await source.start()
            source.release()
            assert (await stream).tokens == expected([1, 2, 3], 20)
    assert not target.submitted


async def test_stream_of_the_only_group_continues_after_a_restart() -> None:
    """The successor has another revision with the same weights, and is unknown before its pod has an address."""
    source, target = pair()
    async with running_world(source, target, settings=make_settings(keep_alive_s=0.01)) as world:
        world.source.change(source.endpoint())
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=20)))
        session = await session_at(world, source, 5)
        world.fleet.balancing.set_policy(BalancePolicy(number=1, evacuate=["a"], without_successor=["a"]))
        await source.stop()
        world.source.change()
        await until(lambda: stream.done() or session.wait.unassigned_since is not None)
        world.source.change(target.endpoint())
        assert (await stream).tokens == expected([1, 2, 3], 20)
    assert session.failures.lost_group == "a" and target.submitted


async def test_stream_waits_for_a_group_with_its_weights() -> None:
    """A group that has not reported its model yet; when it reports other weights, the stream ends."""
    source, target = pair(target=MoveScript(served=wire.Served()))
    async with running_world(source, target, settings=make_settings(keep_alive_s=0.01)) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=20)))
        session = await session_at(world, source, 5)
        world.fleet.balancing.set_policy(BalancePolicy(number=1, evacuate=["a"], without_successor=["a"]))
        await target.send(wire.State(serving=False, incarnation=1, reason="loading"))
        await source.stop()
        await until(lambda: session.wait.unassigned_since is not None)
        await target.send(wire.State(serving=True, incarnation=1, served=wire.Served("model-2", "tp2 bf16 16")))
        with pytest.raises(BackendError) as caught:
            await stream
        assert caught.value.code == "weights_gone"


async def test_move_that_is_not_accepted_is_no_death() -> None:
    """The target may be slow, and sends no load report; the stream is replayed elsewhere."""
    source, target = pair()
    target.script.silent, target.script.hold_at = True, 0
    async with running_world(source, target) as world:
        ends = record_ends(world)
        world.fleet.mover.board = MoveBoard(replace(DEFAULT_MOVE_SETTINGS, start_s=0.05))
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=20)))
        session = await session_at(world, source, 5)
        assert world.fleet.mover.move(session, key_of(world, target), "stop", "manual") is None
        await until(lambda: session.failures.num_losses == 1)
        assert (session.failures.num_deaths, ends) == (0, [("moved", "not_accepted")])
        source.release()
        assert (await stream).tokens == expected([1, 2, 3], 20)


@pytest.mark.parametrize(
    ("source_script", "target_script", "outcome"),
    [
        (None, MoveScript(refuse="no_room"), "refused"),
        (None, MoveScript(ignored=(wire.Prepare,)), "timeout"),
        (MoveScript(break_copy=True), None, "timeout"),
    ],
    ids=["no room", "the target does not answer", "the copy breaks"],
)
async def test_failed_move_keeps_the_stream_at_its_source(
    source_script: MoveScript | None, target_script: MoveScript | None, outcome: str
) -> None:
    source, target = pair(source_script, target_script)
    async with running_world(source, target) as world:
        ends = record_ends(world)
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=20)))
        session = await session_at(world, source, 5)
        world.fleet.mover.move(session, key_of(world, target), "stop", "manual")
        await until(lambda: bool(ends))
        source.release()
        assert (await stream).tokens == expected([1, 2, 3], 20)
        assert [end for end, _ in ends] == [outcome] and session.moves.num_completed == 0
        await until(lambda: not target.reserved and not source.frozen)
    assert not target.submitted


@pytest.mark.parametrize("lost", ["source", "target"])
async def test_leader_failure_during_the_copy(lost: str) -> None:
    source, target = pair(MoveScript(break_copy=True))
    async with running_world(source, target) as world:
        ends = record_ends(world)
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=20)))
        session = await session_at(world, source, 5)
        world.fleet.mover.move(session, key_of(world, target), "stop", "manual")
        await until(lambda: moves.MoveOut in map(type, source.frames))
        await (source if lost == "source" else target).stop()
        source.release()
        assert (await stream).tokens == expected([1, 2, 3], 20)
        assert ends == [(lost, f"{lost}_lost")]
        assert session.failures.num_losses == (lost == "source")


async def test_a_stream_that_moves_often_counts_no_loss() -> None:
    peers: list[MovingLeader] = []
    leaders = [MovingLeader(name, peers) for name in "ab"]
    async with running_world(*leaders) as world:
        ends = record_ends(world)
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=400)))
        await until(lambda: bool(world.fleet.sessions))
        (session,) = world.fleet.sessions
        for _ in range(6):
            await until(
                lambda: session.assignment is not None and not session.moves.open_move and not session.stream.journal.is_fresh
            )
            here = session.last_key
            other = next(key for key in (key_of(world, leader) for leader in leaders) if key != here)
            assert world.fleet.mover.move(session, other, "stop", "manual") is None
            await until(lambda: not session.moves.open_move)
        assert (await stream).tokens == expected([1, 2, 3], 400)
        assert ends == [("moved", "")] * 6
        assert (session.moves.num_completed, session.failures.num_losses, session.failures.num_departures) == (6, 0, 0)


async def test_a_stream_moves_once_at_a_time() -> None:
    source, target = pair(target=MoveScript(ignored=(wire.Prepare,)))
    async with running_world(source, target) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=20)))
        session = await session_at(world, source, 5)
        assert world.fleet.mover.move(session, key_of(world, target), "stop", "manual") is None
        assert world.fleet.mover.move(session, key_of(world, target), "stop", "manual") == "the stream is moving already"
        assert world.fleet.mover.move(session, session.last_key, "stop", "manual") is not None
        source.release()
        assert (await stream).tokens == expected([1, 2, 3], 20)


async def test_a_client_that_leaves_ends_the_move() -> None:
    source, target = pair(target=MoveScript())
    source.move.break_copy = True
    async with running_world(source, target) as world:
        ends = record_ends(world)
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=20)))
        session = await session_at(world, source, 5)
        world.fleet.mover.move(session, key_of(world, target), "stop", "manual")
        await until(lambda: bool(source.frozen))
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        assert ends == [("stream", "ended")]
        await until(lambda: not target.reserved)


async def test_balancer_receives_rescue_requests() -> None:
    source, _ = leaders = pair()
    async with running_world(*leaders) as world:
        requests: list[tuple[list[StreamSession], float]] = []

        def record_rescue(link: LeaderLink, sessions: list[StreamSession], within_s: float) -> None:
            requests.append((sessions, within_s))

        world.fleet.mover.rescue_listeners.append(record_rescue)
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=20)))
        session = await session_at(world, source, 5)
        assert session.assignment is not None
        await source.send(moves.RescueRequest([99, session.assignment.handle], 0.5))
        await until(lambda: bool(requests))
        assert requests == [([session], 0.5)]
        source.release()
        await stream


async def test_siblings_move_on_their_own() -> None:
    source, target = pair()
    async with running_world(source, target) as world:
        requests = [make_request(prompt=[1, 2, i], max_tokens=20, id="r") for i in range(2)]
        streams = [asyncio.create_task(read_stream(world.fleet, request)) for request in requests]

        def started() -> list[StreamSession]:
            return [session for session in world.fleet.sessions if session.stream.journal.delivered]

        await until(lambda: any(group_of(session) == "a" for session in started()))
        session = next(session for session in started() if group_of(session) == "a")
        assert world.fleet.mover.move(session, key_of(world, target), "stop", "manual") is None
        source.release()
        received = await asyncio.gather(*streams)
        assert [one.tokens for one in received] == [expected(request.prompt, 20) for request in requests]
        assert session.moves.num_completed == 1
