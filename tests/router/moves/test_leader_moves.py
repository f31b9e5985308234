"""Frames of moves on the leader's side of the link: in the words of each side, to who asked, and no longer than that."""

from phalanx_api import moves, wire
from tests.router.api_servers import FakeEngine
from tests.router.fakes import make_request
from tests.router.links.test_leader_link import opened, receive, until

PREPARED = moves.Prepared("m", 0, [moves.PageAddress("", 7001), moves.PageAddress("10.0.0.9", 7002)], b"k" * 32)


async def test_handles_are_the_engines_and_addresses_are_those_at_which_the_router_reaches_the_pod() -> None:
    engine = FakeEngine()
    async with opened(engine) as (connection, _):
        await connection.send(wire.encode(wire.Submit(5, make_request([1, 2], 50))))
        await until(lambda: bool(engine.submitted))
        (handle,) = engine.submitted
        await connection.send(wire.encode(moves.MoveOut("m1", 5, 0, PREPARED)))
        await connection.send(wire.encode(wire.Prepare("m2", make_request([3], 5))))
        await until(lambda: len(engine.ordered) == 2)
        assert engine.ordered[0] == moves.MoveOut("m1", handle, 0, PREPARED)
        engine.moves.tell(moves.Prepared("m2", 0, PREPARED.addresses, b"k"))
        told = await receive(connection, moves.Prepared)
        assert told.addresses == [moves.PageAddress("127.0.0.1", 7001), moves.PageAddress("10.0.0.9", 7002)]
        engine.moves.tell(moves.Frozen("m1", 0, 3, 4))
        assert await receive(connection, moves.Frozen) == moves.Frozen("m1", 0, 3, 4)
        await connection.send(wire.encode(moves.Release("m1")))
        await until(lambda: engine.aborted == [handle])
        await connection.send(wire.encode(wire.Abort([5])))
        await connection.send(wire.encode(moves.Cancel("m2")))
        await until(lambda: engine.ordered[-1] == moves.Cancel("m2"))


async def test_the_start_of_a_moved_request_names_its_move() -> None:
    engine = FakeEngine()
    async with opened(engine) as (connection, _):
        await connection.send(wire.encode(wire.Prepare("m", make_request([3], 5))))
        await connection.send(wire.encode(wire.Submit(5, make_request([3], 5), "m")))
        await until(lambda: bool(engine.submitted))
        assert list(engine.moved.values()) == ["m"]


async def test_what_the_engine_need_not_be_asked_is_answered_at_once() -> None:
    engine = FakeEngine()
    engine.present = wire.State(False, 1, "it drains", draining=True)
    async with opened(engine) as (connection, _):
        await connection.send(wire.encode(wire.Prepare("m1", make_request([3], 5))))
        refused = await receive(connection, moves.MoveFailed)
        assert (refused.move, refused.code, "it drains" in refused.why) == ("m1", "no_room", True)
        await connection.send(wire.encode(moves.MoveOut("m2", 99, 0, PREPARED)))
        assert (await receive(connection, moves.MoveFailed)).code == "unknown"
        assert engine.ordered == []


async def test_only_the_router_of_a_request_is_asked_to_rescue_it() -> None:
    engine = FakeEngine()
    async with opened(engine) as (connection, _):
        await connection.send(wire.encode(wire.Submit(5, make_request([1, 2], 50))))
        await until(lambda: bool(engine.submitted))
        (handle,) = engine.submitted
        engine.moves.ask(moves.AskRescue([77], 0.5))
        engine.moves.ask(moves.AskRescue([77, handle], 0.25))
        assert await receive(connection, moves.AskRescue) == moves.AskRescue([5], 0.25)


async def test_a_router_that_left_hears_nothing_and_its_moves_run_out_by_themselves() -> None:
    engine = FakeEngine()
    async with opened(engine) as (connection, door):
        await connection.send(wire.encode(wire.Prepare("m", make_request([3], 5))))
        await until(lambda: bool(engine.ordered))
        await connection.close()
        await until(lambda: door.routers == 0)
        engine.moves.tell(moves.Prepared("m", 0, PREPARED.addresses, b"k"))
        engine.moves.ask(moves.AskRescue([1], 0.5))
        assert len(engine.ordered) == 1
