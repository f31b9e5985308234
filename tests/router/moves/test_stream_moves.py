"""Streams of a running router go from leader to leader, over real links; the client sees one stream with each token once."""

import asyncio
from collections.abc import Callable

import pytest

from phalanx_api import moves, wire
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.backend import BackendError
from phalanx_router.links.leader_link import LeaderLink
from phalanx_router.moves.records import MoveEnded, MoveRequest, TransferMode
from phalanx_router.session import StreamSession
from tests.router.fakes import Script, World, expected, hear, make_request, make_settings, running_world
from tests.router.moves.moving_leaders import MoveScript, MovingLeader


def pair(source: MoveScript | None = None, target: MoveScript | None = None) -> tuple[MovingLeader, MovingLeader]:
    """The source holds after 5 steps; the target begins when it is told to."""
    peers: list[MovingLeader] = []
    return MovingLeader("a", peers, Script(hold_at=5), source), MovingLeader("b", peers, None, target)


async def run_at(world: World, leader: MovingLeader, count: int) -> StreamSession:
    """The only stream, once it runs there and has so many tokens."""
    await world.until(lambda: any(len(run.stream.journal.delivered) >= count for run in world.fleet.runs))
    (run,) = world.fleet.runs
    assert run.link is not None and run.link.endpoint.group == leader.group
    return run


def key_of(world: World, leader: MovingLeader) -> str:
    links: list[LeaderLink] = list(world.fleet.links._links.values())
    return next(link.key for link in links if link.endpoint.group == leader.group)


def overs(world: World) -> list[tuple[str, str]]:
    """Hears how moves end."""
    heard: list[tuple[str, str]] = []

    def hear_end(run: StreamSession, proposal: MoveRequest, over: MoveEnded) -> None:
        heard.append((over.outcome, over.code))

    world.fleet.mover.ended.append(hear_end)
    return heard


@pytest.mark.parametrize("how", ["stop", "precopy", "recompute"])
async def test_a_moved_stream_has_each_token_once(how: TransferMode) -> None:
    source, target = pair()
    async with running_world(source, target) as world:
        ends = overs(world)
        stream = asyncio.create_task(hear(world.fleet, make_request(max_tokens=20)))
        run = await run_at(world, source, 5)
        assert world.fleet.mover.move(run, key_of(world, target), how, "asked") is None
        heard = await stream
        assert heard.tokens == expected([1, 2, 3], 20)
        assert (run.moved, run.losses, run.moves) == (1, 0, 0)
        assert ends == [("moved", "")]
        assert world.metric("phalanx_router_moves_total", outcome="moved", why="asked") == 1
        assert world.metric("phalanx_router_move_stall_seconds_count") == 1
        assert world.metric("phalanx_router_replays_total") == 0
        assert world.metric("phalanx_router_move_bytes_total") == (0 if how == "recompute" else 1000)
        await source.until(lambda: source.aborted == [1])
    assert target.submitted[-1].request.epoch == 1
    assert target.submitted[-1].request.waited_ms > source.submitted[-1].request.waited_ms, "it keeps its place"
    assert (moves.Release in map(type, source.frames)) is True
    assert bool(target.submitted[-1].move) == (how != "recompute")
    assert not target.reserved and not source.out


async def test_transferred_pages_are_not_computed_again() -> None:
    source, target = pair(target=MoveScript())
    target.script.silent = True
    target.script.hold_at = 0
    async with running_world(source, target) as world:
        stream = asyncio.create_task(hear(world.fleet, make_request(prompt=range(1, 400), max_tokens=20)))
        run = await run_at(world, source, 5)
        await world.until(lambda: key_of(world, target) in world.fleet.links.eligible(run.tokenizer))
        assert world.fleet.mover.move(run, key_of(world, target), "stop", "asked") is None
        await world.until(lambda: run.link is not None and run.link.endpoint.group == target.group)
        assert run.link is not None
        unseen = run.link.group_report.ledger.unseen
        assert (unseen.requests, unseen.prompt_tokens, unseen.pages, unseen.context_tokens) == (1, 1, 1, 404)
        target.release()
        await stream


async def test_another_layout_is_computed_again() -> None:
    source, target = pair(target=MoveScript(served=wire.Served("model-1", "tp4 bf16 16")))
    async with running_world(source, target) as world:
        stream = asyncio.create_task(hear(world.fleet, make_request(max_tokens=20)))
        run = await run_at(world, source, 5)
        assert world.fleet.mover.move(run, key_of(world, target), "precopy", "asked") is None
        assert (await stream).tokens == expected([1, 2, 3], 20)
    warm, real = target.submitted
    assert warm.request.sampling.max_tokens == 1 and warm.request.prompt == [1, 2, 3, *expected([1, 2, 3], 5)]
    assert real.request.delivered == expected([1, 2, 3], 5) and not target.frames


async def test_stream_never_moves_to_another_model() -> None:
    source, target = pair(target=MoveScript(served=wire.Served("model-2", "tp2 bf16 16")))
    async with running_world(source, target) as world:
        stream = asyncio.create_task(hear(world.fleet, make_request(max_tokens=20)))
        run = await run_at(world, source, 5)
        assert "different model" in (world.fleet.mover.move(run, key_of(world, target), "stop", "asked") or "")
        source.release()
        assert (await stream).tokens == expected([1, 2, 3], 20)
    assert not target.submitted


@pytest.mark.parametrize(
    ("for_good", "wanted", "ends"),
    [(["a"], True, True), ([], True, False), (["a", "b"], False, True), (["a", "b"], True, False)],
    ids=["the last of its weights went for good", "it may come back", "none is wanted", "nobody knows what comes"],
)
async def test_stream_ends_with_the_last_group_of_its_weights(for_good: list[str], wanted: bool, ends: bool) -> None:
    source, target = pair(target=MoveScript(served=wire.Served("model-2", "tp2 bf16 16")))
    async with running_world(source, target, settings=make_settings(keep_alive_s=0.01)) as world:
        stream = asyncio.create_task(hear(world.fleet, make_request(max_tokens=20)))
        run = await run_at(world, source, 5)
        world.fleet.balancing.set_policy(BalancePolicy(number=1, empty=["a"], for_good=for_good, wanted=wanted))
        await source.stop()
        if ends:
            with pytest.raises(
                BackendError, match="a, the last group with the weights that started this stream, does not exist any more"
            ) as caught:
                await stream
            assert (caught.value.status, caught.value.code, caught.value.can_resume) == (503, "weights_gone", False)
        else:
            await world.until(lambda: run.unassigned_since is not None)
            await source.start()
            source.release()
            assert (await stream).tokens == expected([1, 2, 3], 20)
    assert not target.submitted


async def test_stream_of_the_only_group_continues_after_a_restart() -> None:
    """The successor is of another revision with the same weights, and nobody knows it before its pod has an address."""
    source, target = pair()
    async with running_world(source, target, settings=make_settings(keep_alive_s=0.01)) as world:
        world.source.change(source.endpoint())
        stream = asyncio.create_task(hear(world.fleet, make_request(max_tokens=20)))
        run = await run_at(world, source, 5)
        world.fleet.balancing.set_policy(BalancePolicy(number=1, empty=["a"], for_good=["a"]))
        await source.stop()
        world.source.change()
        await world.until(lambda: stream.done() or run.unassigned_since is not None)
        world.source.change(target.endpoint())
        assert (await stream).tokens == expected([1, 2, 3], 20)
    assert run.lost_group == "a" and target.submitted


async def test_stream_waits_for_a_group_with_its_weights() -> None:
    """One that has not told yet what it serves; when it tells of others, the stream ends."""
    source, target = pair(target=MoveScript(served=wire.Served()))
    async with running_world(source, target, settings=make_settings(keep_alive_s=0.01)) as world:
        stream = asyncio.create_task(hear(world.fleet, make_request(max_tokens=20)))
        run = await run_at(world, source, 5)
        world.fleet.balancing.set_policy(BalancePolicy(number=1, empty=["a"], for_good=["a"]))
        await target.tell(wire.State(serving=False, incarnation=1, reason="loading"))
        await source.stop()
        await world.until(lambda: run.unassigned_since is not None)
        await target.tell(wire.State(serving=True, incarnation=1, served=wire.Served("model-2", "tp2 bf16 16")))
        with pytest.raises(BackendError) as caught:
            await stream
        assert caught.value.code == "weights_gone"


@pytest.mark.parametrize(
    ("source_script", "target_script", "outcome"),
    [
        (None, MoveScript(refuse="no_room"), "refused"),
        (None, MoveScript(deaf=(wire.Prepare,)), "timeout"),
        (MoveScript(break_copy=True), None, "timeout"),
    ],
    ids=["no room", "the target does not answer", "the copy breaks"],
)
async def test_failed_move_keeps_the_stream_at_its_source(
    source_script: MoveScript | None, target_script: MoveScript | None, outcome: str
) -> None:
    source, target = pair(source_script, target_script)
    async with running_world(source, target) as world:
        ends = overs(world)
        stream = asyncio.create_task(hear(world.fleet, make_request(max_tokens=20)))
        run = await run_at(world, source, 5)
        world.fleet.mover.move(run, key_of(world, target), "stop", "asked")
        await world.until(lambda: bool(ends))
        source.release()
        assert (await stream).tokens == expected([1, 2, 3], 20)
        assert [end for end, _ in ends] == [outcome] and run.moved == 0
        await world.until(lambda: not target.reserved and not source.out)
    assert not target.submitted


@pytest.mark.parametrize("who", ["source", "target"])
async def test_leader_failure_during_the_copy(who: str) -> None:
    source, target = pair(MoveScript(break_copy=True))
    async with running_world(source, target) as world:
        ends = overs(world)
        stream = asyncio.create_task(hear(world.fleet, make_request(max_tokens=20)))
        run = await run_at(world, source, 5)
        world.fleet.mover.move(run, key_of(world, target), "stop", "asked")
        await source.until(lambda: moves.MoveOut in map(type, source.frames))
        await (source if who == "source" else target).stop()
        source.release()
        assert (await stream).tokens == expected([1, 2, 3], 20)
        assert ends == [(who, f"{who}_lost")]
        assert run.losses == (who == "source")


async def test_a_stream_that_moves_often_counts_no_loss() -> None:
    peers: list[MovingLeader] = []
    leaders = [MovingLeader(name, peers) for name in "ab"]
    async with running_world(*leaders) as world:
        ends = overs(world)
        stream = asyncio.create_task(hear(world.fleet, make_request(max_tokens=400)))
        await world.until(lambda: bool(world.fleet.runs))
        (run,) = world.fleet.runs
        for _ in range(6):
            await world.until(lambda: run.link is not None and not run.move and not run.stream.journal.is_fresh)
            here = run.group
            other = next(key for key in (key_of(world, leader) for leader in leaders) if key != here)
            assert world.fleet.mover.move(run, other, "stop", "asked") is None
            await world.until(lambda: not run.move)
        assert (await stream).tokens == expected([1, 2, 3], 400)
        assert ends == [("moved", "")] * 6
        assert (run.moved, run.losses, run.moves) == (6, 0, 0)


async def test_a_stream_moves_once_at_a_time() -> None:
    source, target = pair(target=MoveScript(deaf=(wire.Prepare,)))
    async with running_world(source, target) as world:
        stream = asyncio.create_task(hear(world.fleet, make_request(max_tokens=20)))
        run = await run_at(world, source, 5)
        assert world.fleet.mover.move(run, key_of(world, target), "stop", "asked") is None
        assert world.fleet.mover.move(run, key_of(world, target), "stop", "asked") == "the stream is moving already"
        assert world.fleet.mover.move(run, run.group, "stop", "asked") is not None
        source.release()
        assert (await stream).tokens == expected([1, 2, 3], 20)


async def test_a_client_that_leaves_ends_the_move() -> None:
    source, target = pair(target=MoveScript())
    source.move.break_copy = True
    async with running_world(source, target) as world:
        ends = overs(world)
        stream = asyncio.create_task(hear(world.fleet, make_request(max_tokens=20)))
        run = await run_at(world, source, 5)
        world.fleet.mover.move(run, key_of(world, target), "stop", "asked")
        await world.until(lambda: bool(source.out))
        stream.cancel()
        await asyncio.gather(stream, return_exceptions=True)
        assert ends == [("stream", "ended")]
        await world.until(lambda: not target.reserved)


async def test_balancer_receives_rescue_requests() -> None:
    source, _ = leaders = pair()
    async with running_world(*leaders) as world:
        asked: list[tuple[list[StreamSession], float]] = []

        def hear_rescue(link: LeaderLink, runs: list[StreamSession], within_s: float) -> None:
            asked.append((runs, within_s))

        world.fleet.mover.asked_rescue.append(hear_rescue)
        stream = asyncio.create_task(hear(world.fleet, make_request(max_tokens=20)))
        run = await run_at(world, source, 5)
        await source.tell(moves.AskRescue([99, run.handle], 0.5))
        await world.until(lambda: bool(asked))
        assert asked == [([run], 0.5)]
        source.release()
        await stream


async def test_siblings_move_on_their_own() -> None:
    source, target = pair()
    async with running_world(source, target) as world:
        requests = [make_request(prompt=[1, 2, i], max_tokens=20, id="r") for i in range(2)]
        streams = [asyncio.create_task(hear(world.fleet, request)) for request in requests]
        here: Callable[[], list[StreamSession]] = lambda: [run for run in world.fleet.runs if run.stream.journal.delivered]  # noqa: E731
        await world.until(lambda: any(run.link is not None and run.link.endpoint.group == "a" for run in here()))
        run = next(run for run in here() if run.link is not None and run.link.endpoint.group == "a")
        assert world.fleet.mover.move(run, key_of(world, target), "stop", "asked") is None
        source.release()
        heard = await asyncio.gather(*streams)
        assert [one.tokens for one in heard] == [expected(request.prompt, 20) for request in requests]
        assert run.moved == 1
