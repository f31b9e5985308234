"""Requests of a lost router at a real leader's link: they continue, are adopted, or end."""

import asyncio
import dataclasses
import gc
from typing import Any

import msgspec
import pytest
from websockets.asyncio.client import ClientConnection

from phalanx_api import moves, wire
from phalanx_runtime.server.link.orphans import MAX_SHARED_BYTES, MAX_SHARES, RECORD_BYTES, TOKEN_BYTES, RequestRecord
from tests.polling import until
from tests.router.api_servers import FakeEngine, make_link_settings, running_leader
from tests.router.fakes import expected, make_request
from tests.router.link_clients import named, orphan_request, receive, resumable, router_link


async def answer(connection: ClientConnection) -> wire.Adopted | wire.Refused:
    """Answer to an Adopt."""
    async with asyncio.timeout(10):
        while True:
            frame = wire.decode_from_leader(await connection.recv(decode=False))
            if isinstance(frame, wire.Adopted | wire.Refused):
                return frame


async def tokens_of(connection: ClientConnection, handle: int, count: int) -> list[int]:
    """Next tokens of a request."""
    tokens: list[int] = []
    async with asyncio.timeout(10):
        while len(tokens) < count:
            frame = wire.decode_from_leader(await connection.recv(decode=False))
            if isinstance(frame, wire.Tokens):
                tokens += [token for h, token in zip(frame.handles, frame.tokens, strict=True) if h == handle]
    return tokens


@pytest.fixture
def engine() -> FakeEngine:
    return FakeEngine()


def settings(**bounds: Any) -> Any:
    return dataclasses.replace(make_link_settings(), **bounds)


async def test_another_router_adopts_a_stream_at_its_position(engine: FakeEngine) -> None:
    async with running_leader(engine) as (address, endpoint):
        await orphan_request(engine, address, resumable())
        await until(lambda: endpoint.num_routers == 0)
        engine.step()
        async with router_link(address, "router-2") as second:
            await second.send(wire.encode(wire.Adopt(7, "a")))
            adopted = await answer(second)
            assert isinstance(adopted, wire.Adopted)
            assert (adopted.handle, adopted.finish, adopted.is_running) == (7, None, True)
            assert adopted.request == msgspec.structs.replace(resumable(), delivered=expected([1, 2, 3], 3))
            for _ in range(6):
                engine.step()
            assert await tokens_of(second, 7, 6) == expected([1, 2, 3], 9)[3:]
        assert engine.aborted == []


async def test_an_adopted_stream_survives_the_second_router_too(engine: FakeEngine) -> None:
    async with running_leader(engine) as (address, _):
        await orphan_request(engine, address, resumable())
        async with router_link(address, "router-2") as second:
            await second.send(wire.encode(wire.Adopt(7, "a")))
            await answer(second)
            engine.step()
            second.transport.abort()
        async with router_link(address, "router-3") as third:
            await third.send(wire.encode(wire.Adopt(1, "a")))
            adopted = await answer(third)
            assert isinstance(adopted, wire.Adopted) and adopted.request.delivered == expected([1, 2, 3], 3)


async def test_a_stream_is_adopted_before_its_router_is_missed(engine: FakeEngine) -> None:
    async with running_leader(engine) as (address, _), router_link(address) as first, router_link(address, "router-2") as second:
        await first.send(wire.encode(wire.Submit(5, resumable())))
        await until(lambda: len(engine.submitted) == 1)
        engine.step()
        await second.send(wire.encode(wire.Adopt(7, "a")))
        adopted = await answer(second)
        assert isinstance(adopted, wire.Adopted) and adopted.request.delivered == expected([1, 2, 3], 1)
        frame = await answer(first)
        assert isinstance(frame, wire.Refused) and (frame.handle, frame.status, frame.code) == (5, 409, "adopted")
        engine.step()
        assert await tokens_of(second, 7, 1) == expected([1, 2, 3], 2)[1:]


async def test_a_shared_request_is_found_by_each_stream(engine: FakeEngine) -> None:
    """It stays with its router; once that is lost, it runs on for the first stream that is resumed."""
    request = msgspec.structs.replace(resumable(), tenant="one")
    async with running_leader(engine) as (address, endpoint):
        async with router_link(address) as first:
            await first.send(wire.encode(wire.Submit(1, request)))
            for handle, id in ((1, "b"), (1, "c"), (9, "d")):
                await first.send(wire.encode(wire.Share(handle, named(id))))
            await until(lambda: len(engine.submitted) == 1)
            engine.step()
            async with router_link(address, "router-2") as second:
                await second.send(wire.encode(wire.Adopt(7, "b", "one")))
                adopted = await answer(second)
            assert isinstance(adopted, wire.Adopted) and (adopted.request.id, adopted.is_running) == ("b", False)
            first.transport.abort()
        await until(lambda: endpoint.num_routers == 0)
        engine.step()
        async with router_link(address, "router-2") as second:
            for handle, (id, tenant) in enumerate([("b", "one"), ("c", "two"), ("d", "one"), ("a", "one"), ("c", "one")]):
                await second.send(wire.encode(wire.Adopt(handle, id, tenant)))
                adopted = await answer(second)
                assert isinstance(adopted, wire.Refused if id == "d" or tenant == "two" else wire.Adopted), id
                if isinstance(adopted, wire.Adopted):
                    assert (adopted.request.id, adopted.is_running, adopted.finish) == (id, id == "b", None)
                    assert adopted.request.delivered == expected([1, 2, 3], 2) and adopted.request.prompt == [1, 2, 3]
                    assert (adopted.request.sampling.seed == 99) == (id != "a")
        assert engine.aborted == []


async def test_an_orphan_continues_for_a_stream_that_shares_it(engine: FakeEngine) -> None:
    """And for its own one, if that is resumed after the loss of the next router."""
    request = msgspec.structs.replace(resumable(), epoch=3, alone=True)
    async with running_leader(engine) as (address, endpoint):
        async with router_link(address) as first:
            await first.send(wire.encode(wire.Submit(1, request)))
            await first.send(wire.encode(wire.Share(1, named("b"))))
            await until(lambda: len(engine.submitted) == 1)
            engine.step()
            first.transport.abort()
        for number, id in enumerate("bab", 1):
            await until(lambda: endpoint.num_routers == 0)
            async with router_link(address, f"router-{number + 1}") as router:
                await router.send(wire.encode(wire.Adopt(7, id)))
                adopted = await answer(router)
                assert isinstance(adopted, wire.Adopted)
                seed = 99 if id == "b" else request.sampling.seed
                assert adopted == wire.Adopted(
                    7,
                    msgspec.structs.replace(
                        request,
                        id=id,
                        delivered=expected([1, 2, 3], number),
                        sampling=msgspec.structs.replace(request.sampling, seed=seed),
                    ),
                    None,
                    True,
                )
                engine.step()
                frame = await receive(router, wire.Tokens)
                assert (frame.handles, frame.epochs, frame.indices) == ([7], [3], [number])
                assert frame.tokens == expected([1, 2, 3], number + 1)[number:]
                router.transport.abort()
        assert (engine.aborted, len(engine.submitted)) == ([], 1)


async def test_streams_of_an_ended_request_are_found(engine: FakeEngine) -> None:
    async with running_leader(engine) as (address, _), router_link(address) as first, router_link(address, "router-2") as second:
        await first.send(wire.encode(wire.Submit(1, resumable(max_tokens=2))))
        await first.send(wire.encode(wire.Share(1, named("b"))))
        await until(lambda: len(engine.submitted) == 1)
        for _ in range(3):
            engine.step()
        await second.send(wire.encode(wire.Adopt(7, "b")))
        adopted = await answer(second)
        assert isinstance(adopted, wire.Adopted) and (adopted.finish, adopted.request.delivered) == (
            "length",
            expected([1, 2, 3], 2),
        )


async def test_streams_of_an_adopted_request_outlive_it(engine: FakeEngine) -> None:
    """The router that adopted it does not know them, and aborts it when its own client leaves."""
    async with running_leader(engine) as (address, endpoint):
        async with router_link(address) as first:
            await first.send(wire.encode(wire.Submit(1, resumable())))
            await first.send(wire.encode(wire.Share(1, named("b"))))
            await until(lambda: len(engine.submitted) == 1)
            engine.step()
            first.transport.abort()
        await until(lambda: endpoint.num_routers == 0)
        async with router_link(address, "router-2") as second:
            await second.send(wire.encode(wire.Adopt(7, "a")))
            await answer(second)
            engine.step()
            await second.send(wire.encode(wire.Abort([7])))
            await second.send(wire.encode(wire.Adopt(8, "b")))
            adopted = await answer(second)
        assert isinstance(adopted, wire.Adopted) and (adopted.is_running, adopted.finish) == (False, None)
        assert adopted.request.delivered == expected([1, 2, 3], 2) and engine.aborted == [1000]


async def test_last_streams_of_a_request_are_kept(engine: FakeEngine) -> None:
    async with running_leader(engine) as (address, _), router_link(address) as first, router_link(address, "router-2") as second:
        await first.send(wire.encode(wire.Submit(1, resumable())))
        large = msgspec.structs.replace(named("large"), cache_salt="x" * MAX_SHARED_BYTES)
        for stream in [large, *(named(f"s{number}") for number in range(MAX_SHARES + 1))]:
            await first.send(wire.encode(wire.Share(1, stream)))
        await until(lambda: len(engine.submitted) == 1)
        for id, is_found in (("large", False), ("s0", False), ("s1", True), (f"s{MAX_SHARES}", True)):
            await second.send(wire.encode(wire.Adopt(7, id)))
            assert isinstance(await answer(second), wire.Adopted) == is_found, id


async def test_unclaimed_orphan_ends(engine: FakeEngine) -> None:
    async with running_leader(engine, settings(orphan_s=0.05)) as (address, _):
        await orphan_request(engine, address, resumable())
        await until(lambda: engine.aborted == [1000])
        async with router_link(address, "router-2") as second:
            await second.send(wire.encode(wire.Adopt(7, "a")))
            frame = await answer(second)
            assert isinstance(frame, wire.Refused) and (frame.status, frame.code) == (404, "unknown_stream")


async def test_an_orphan_that_ended_stays_to_be_read(engine: FakeEngine) -> None:
    async with running_leader(engine) as (address, endpoint):
        await orphan_request(engine, address, resumable(max_tokens=4))
        await until(lambda: endpoint.num_routers == 0)
        for _ in range(2):
            engine.step()
        for router in ("router-2", "router-3"):
            async with router_link(address, router) as other:
                await other.send(wire.encode(wire.Adopt(7, "a")))
                adopted = await answer(other)
                assert isinstance(adopted, wire.Adopted) and (adopted.finish, adopted.is_running) == ("length", False)
                assert adopted.request.delivered == expected([1, 2, 3], 4)


async def test_request_that_ended_before_the_loss_is_readable(engine: FakeEngine) -> None:
    async with running_leader(engine) as (address, _):
        await orphan_request(engine, address, resumable(max_tokens=2))
        async with router_link(address, "router-2") as second:
            await second.send(wire.encode(wire.Adopt(7, "a")))
            adopted = await answer(second)
            assert isinstance(adopted, wire.Adopted) and adopted.finish == "length"


@pytest.mark.parametrize("how", ["aborted on purpose", "cannot be resumed"])
async def test_unresumable_requests_leave_no_orphan(engine: FakeEngine, how: str) -> None:
    async with running_leader(engine) as (address, endpoint):
        async with router_link(address) as first:
            can_resume = how == "aborted on purpose"
            await first.send(wire.encode(wire.Submit(1, msgspec.structs.replace(resumable(), can_resume=can_resume))))
            await until(lambda: len(engine.submitted) == 1)
            if can_resume:
                await first.send(wire.encode(wire.Abort([1])))
        await until(lambda: engine.aborted == [1000] and endpoint.num_routers == 0)
        async with router_link(address, "router-2") as second:
            await second.send(wire.encode(wire.Adopt(7, "a")))
            assert isinstance(await answer(second), wire.Refused)


async def test_new_incarnation_drops_orphans_and_keeps_their_tokens(engine: FakeEngine) -> None:
    async with running_leader(engine) as (address, endpoint):
        await orphan_request(engine, address, resumable())
        await until(lambda: endpoint.num_routers == 0)
        engine.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        async with router_link(address, "router-2") as second:
            await second.send(wire.encode(wire.Adopt(7, "a")))
            adopted = await answer(second)
            assert isinstance(adopted, wire.Adopted) and (adopted.finish, adopted.is_running) == (None, False)
            assert adopted.request.delivered == expected([1, 2, 3], 2)


@pytest.mark.parametrize(("instance", "aborted"), [("first", [1000]), ("second", [])], ids=["it lived", "it was lost"])
async def test_a_router_that_lived_has_given_its_streams_elsewhere(engine: FakeEngine, instance: str, aborted: list[int]) -> None:
    async with running_leader(engine) as (address, endpoint):
        await orphan_request(engine, address, resumable())
        await until(lambda: endpoint.num_routers == 0)
        async with router_link(address, instance=instance):
            await until(lambda: endpoint.num_routers == 1)
            assert engine.aborted == aborted


async def test_orphans_are_bounded(engine: FakeEngine) -> None:
    submit = wire.encode(wire.Submit(1, resumable("r1")))
    bound = 3 * (RECORD_BYTES + len(submit) + TOKEN_BYTES) + TOKEN_BYTES
    async with running_leader(engine, settings(max_kept_bytes=bound)) as (address, endpoint):
        async with router_link(address) as first:
            for handle in range(3):
                await first.send(wire.encode(wire.Submit(handle, resumable(f"r{handle}"))))
            await until(lambda: len(engine.submitted) == 3)
            engine.step()
            first.transport.abort()
        await until(lambda: endpoint.num_routers == 0)
        assert engine.aborted == []
        engine.step()
        assert engine.aborted == [1000]


async def test_evicted_orphan_costs_no_other_stream_a_token(engine: FakeEngine) -> None:
    """The first router's request ends and evicts its orphan before its part of the step is delivered."""
    submit = wire.encode(wire.Submit(1, resumable("r1")))
    async with (
        running_leader(engine, settings(max_kept_bytes=RECORD_BYTES + len(submit) + 8 * TOKEN_BYTES)) as (address, endpoint),
        router_link(address) as ends,
        router_link(address, "router-3") as goes_on,
    ):
        await ends.send(wire.encode(wire.Submit(1, resumable("r1", max_tokens=2))))
        await until(lambda: len(engine.submitted) == 1)
        async with router_link(address, "router-2") as lost:
            await lost.send(wire.encode(wire.Submit(1, resumable("r2"))))
            await until(lambda: len(engine.submitted) == 2)
            lost.transport.abort()
        await goes_on.send(wire.encode(wire.Submit(1, make_request())))
        await until(lambda: len(engine.submitted) == 3 and endpoint.num_routers == 2)
        engine.step()
        assert engine.aborted == []
        engine.step()
        assert engine.aborted == [1001]
        assert await tokens_of(goes_on, 1, 2) == expected([1, 2, 3], 2)
        await goes_on.send(wire.encode(wire.Adopt(2, "r1")))
        assert isinstance(await answer(goes_on), wire.Adopted), "what ended last is kept"


async def test_forgotten_orphan_is_held_nowhere(engine: FakeEngine) -> None:
    large = resumable(max_tokens=1, prompt=tuple(range(2000)))
    bound = 4 * (RECORD_BYTES + len(wire.encode(wire.Submit(1, large))))
    earlier = records()  # of other tests
    async with running_leader(engine, settings(max_kept_bytes=bound)) as (address, _), router_link(address) as first:
        for handle in range(20):
            await first.send(wire.encode(wire.Submit(handle, msgspec.structs.replace(large, id=f"r{handle}"))))
            await until(lambda: len(engine.submitted) == 1)
            engine.step()
        assert 0 < len(records()) - len(earlier) <= 4


def records() -> list[RequestRecord]:
    gc.collect()
    # `isinstance` reads `__class__` of every object, which warns for some
    return [held for held in gc.get_objects() if type(held) is RequestRecord]


async def test_disowned_stream_continues_and_is_adopted_again(engine: FakeEngine) -> None:
    async with running_leader(engine) as (address, _):
        await orphan_request(engine, address, resumable())
        async with router_link(address, "router-2") as second:
            for handle in (7, 8):
                await second.send(wire.encode(wire.Adopt(handle, "a")))
                assert isinstance(await answer(second), wire.Adopted)
                engine.step()
                if handle == 7:
                    await second.send(wire.encode(wire.Disown([7, 99])))
            engine.step()
            assert (await tokens_of(second, 8, 2)) == expected([1, 2, 3], 5)[3:]
        assert engine.aborted == []


async def test_disowned_unresumable_request_ends(engine: FakeEngine) -> None:
    async with running_leader(engine) as (address, _), router_link(address) as first:
        await first.send(wire.encode(wire.Submit(1, make_request())))
        await first.send(wire.encode(wire.Disown([1])))
        await until(lambda: engine.aborted == [1000])


async def test_router_finds_a_stream_after_a_lost_adoption(engine: FakeEngine) -> None:
    async with running_leader(engine) as (address, endpoint):
        await orphan_request(engine, address, resumable())
        async with router_link(address, "router-2") as second:
            await second.send(wire.encode(wire.Adopt(7, "a")))
            await answer(second)
            second.transport.abort()
        await until(lambda: endpoint.num_routers == 0)
        async with router_link(address, "router-2") as again:
            await again.send(wire.encode(wire.Adopt(1, "a")))
            assert isinstance(await answer(again), wire.Adopted)
        assert engine.aborted == []


async def test_only_its_tenant_gets_a_stream(engine: FakeEngine) -> None:
    mine = msgspec.structs.replace(resumable(), tenant="alice")
    async with running_leader(engine) as (address, _), router_link(address) as first, router_link(address, "router-2") as second:
        await first.send(wire.encode(wire.Submit(5, mine)))
        await until(lambda: len(engine.submitted) == 1)
        await second.send(wire.encode(wire.Adopt(7, "a", "bob")))
        frame = await answer(second)
        assert isinstance(frame, wire.Refused) and (frame.handle, frame.status) == (7, 404)
        engine.step()
        assert await tokens_of(first, 5, 1) == expected([1, 2, 3], 1), "its router still has it"
        first.transport.abort()
        await second.send(wire.encode(wire.Adopt(8, "a", "bob")))
        assert isinstance(await answer(second), wire.Refused)
        await second.send(wire.encode(wire.Adopt(9, "a", "alice")))
        assert isinstance(await answer(second), wire.Adopted)


async def test_router_without_the_stream_stops_its_move(engine: FakeEngine) -> None:
    out = moves.MoveOut(move="m", handle=5, epoch=0, prepared=moves.Prepared(move="m", cached_tokens=0, addresses=[], key=b"k"))
    async with running_leader(engine) as (address, _), router_link(address) as first, router_link(address, "router-2") as second:
        await first.send(wire.encode(wire.Submit(5, resumable())))
        await first.send(wire.encode(out))
        await until(lambda: len(engine.ordered) == 1)
        await second.send(wire.encode(wire.Adopt(7, "a")))
        assert isinstance(await answer(second), wire.Adopted)
        assert engine.ordered[1:] == [moves.Thaw("m")]
        await first.send(wire.encode(moves.Release("m")))  # the first router had committed the move
        await until(lambda: engine.ordered[-1] == moves.Release("m"))
        engine.step()
        assert await tokens_of(second, 7, 1) == expected([1, 2, 3], 1)
        assert engine.aborted == []


async def test_moved_request_is_no_orphan(engine: FakeEngine) -> None:
    out = moves.MoveOut(move="m", handle=5, epoch=0, prepared=moves.Prepared(move="m", cached_tokens=0, addresses=[], key=b"k"))
    async with running_leader(engine) as (address, endpoint):
        async with router_link(address) as first:
            await first.send(wire.encode(wire.Submit(5, resumable())))
            for frame in (out, moves.Release("m")):
                await first.send(wire.encode(frame))
            await until(lambda: engine.aborted == [1000])
            first.transport.abort()  # before the Abort that follows a Release
        await until(lambda: endpoint.num_routers == 0)
        async with router_link(address, "router-2") as second:
            await second.send(wire.encode(wire.Adopt(7, "a")))
            assert isinstance(await answer(second), wire.Refused), "no router waits for a stream that runs elsewhere"
