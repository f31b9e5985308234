"""Frames of moves on the leader's side of the link: handles of each side, and only to the router of the move."""

from phalanx_api import moves, wire
from tests.polling import until
from tests.router.api_servers import FakeEngine
from tests.router.fakes import make_request
from tests.router.link_clients import receive, served_link

PREPARED = moves.Prepared(
    move="m", cached_tokens=0, addresses=[moves.PageAddress("", 7001), moves.PageAddress("10.0.0.9", 7002)], key=b"k" * 32
)


async def test_frames_use_engine_handles_and_reachable_addresses() -> None:
    engine = FakeEngine()
    async with served_link(engine) as (connection, _):
        await connection.send(wire.encode(wire.Submit(5, make_request([1, 2], 50))))
        await until(lambda: bool(engine.submitted))
        (handle,) = engine.submitted
        await connection.send(wire.encode(moves.MoveOut(move="m1", handle=5, epoch=0, prepared=PREPARED)))
        await connection.send(wire.encode(wire.Prepare("m2", make_request([3], 5))))
        await until(lambda: len(engine.ordered) == 2)
        assert engine.ordered[0] == moves.MoveOut(move="m1", handle=handle, epoch=0, prepared=PREPARED)
        engine.moves.deliver(moves.Prepared(move="m2", cached_tokens=0, addresses=PREPARED.addresses, key=b"k"))
        prepared = await receive(connection, moves.Prepared)
        assert prepared.addresses == [moves.PageAddress("127.0.0.1", 7001), moves.PageAddress("10.0.0.9", 7002)]
        engine.moves.deliver(moves.Frozen(move="m1", epoch=0, num_output=3, num_computed=4))
        assert await receive(connection, moves.Frozen) == moves.Frozen(move="m1", epoch=0, num_output=3, num_computed=4)
        await connection.send(wire.encode(moves.Release("m1")))
        await until(lambda: engine.aborted == [handle])
        await connection.send(wire.encode(wire.Abort([5])))
        await connection.send(wire.encode(moves.Cancel("m2")))
        await until(lambda: engine.ordered[-1] == moves.Cancel("m2"))


async def test_the_start_of_a_moved_request_names_its_move() -> None:
    engine = FakeEngine()
    async with served_link(engine) as (connection, _):
        await connection.send(wire.encode(wire.Prepare("m", make_request([3], 5))))
        await connection.send(wire.encode(wire.Submit(5, make_request([3], 5), "m")))
        await until(lambda: bool(engine.submitted))
        assert list(engine.moved.values()) == ["m"]


async def test_known_answers_need_no_engine_call() -> None:
    engine = FakeEngine()
    engine.present = wire.State(serving=False, incarnation=1, reason="it drains", draining=True)
    async with served_link(engine) as (connection, _):
        await connection.send(wire.encode(wire.Prepare("m1", make_request([3], 5))))
        refused = await receive(connection, moves.MoveFailed)
        assert (refused.move, refused.code, "it drains" in refused.why) == ("m1", "no_room", True)
        await connection.send(wire.encode(moves.MoveOut(move="m2", handle=99, epoch=0, prepared=PREPARED)))
        assert (await receive(connection, moves.MoveFailed)).code == "unknown"
        assert engine.ordered == []


async def test_only_the_requests_router_receives_the_rescue_request() -> None:
    engine = FakeEngine()
    async with served_link(engine) as (connection, _):
        await connection.send(wire.encode(wire.Submit(5, make_request([1, 2], 50))))
        await until(lambda: bool(engine.submitted))
        (handle,) = engine.submitted
        engine.moves.deliver_rescue(moves.RescueRequest([77], 0.5))
        engine.moves.deliver_rescue(moves.RescueRequest([77, handle], 0.25))
        assert await receive(connection, moves.RescueRequest) == moves.RescueRequest([5], 0.25)


async def test_moves_of_a_lost_router_expire() -> None:
    engine = FakeEngine()
    async with served_link(engine) as (connection, endpoint):
        await connection.send(wire.encode(wire.Prepare("m", make_request([3], 5))))
        await until(lambda: bool(engine.ordered))
        await connection.close()
        await until(lambda: endpoint.num_routers == 0)
        engine.moves.deliver(moves.Prepared(move="m", cached_tokens=0, addresses=PREPARED.addresses, key=b"k"))
        engine.moves.deliver_rescue(moves.RescueRequest([1], 0.5))
        assert len(engine.ordered) == 1
