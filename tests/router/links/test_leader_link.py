"""The leader's side of the link, driven by a bare WebSocket client."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import msgspec
import pytest
from websockets.asyncio.client import ClientConnection
from websockets.exceptions import ConnectionClosed, InvalidStatus

from phalanx_api import moves, wire
from phalanx_api.wire import PROTOCOL_VERSION
from phalanx_api.wire.holders import holder_token
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_frontend.backend import BackendError
from phalanx_runtime.engine.open_requests import RequestSink
from phalanx_runtime.server.link.send_queue import BYTES_PER_TOKEN, SendQueue
from tests.polling import until
from tests.router.api_servers import FakeEngine, make_link_settings, running_leader
from tests.router.fakes import ASSETS, TOKEN, expected, make_request
from tests.router.link_clients import HELLO, dial, receive, served_link


@pytest.mark.parametrize("token", ["", "wrong", TOKEN + "x", "ünïcode"], ids=["none", "wrong", "longer", "not ASCII"])
async def test_a_peer_without_the_token_gets_401(token: str) -> None:
    async with running_leader(FakeEngine()) as (address, endpoint):
        with pytest.raises((InvalidStatus, UnicodeEncodeError)) as caught:
            async with dial(address, token):
                pass
        if isinstance(caught.value, InvalidStatus):
            assert caught.value.response.status_code == 401
            assert endpoint.refusals["token"] == 1


@pytest.mark.parametrize("token", ["new", "former", holder_token("new"), holder_token("former")])
async def test_both_tokens_of_a_rotation_open_links(token: str) -> None:
    settings = replace(make_link_settings(), token=ServiceToken(["new", "former"]))
    async with running_leader(FakeEngine(), settings) as (address, endpoint), dial(address, token):
        assert endpoint.refusals["token"] == 0


@pytest.mark.parametrize(
    ("first", "code", "reason"),
    [
        (wire.encode(wire.Hello(99, "r")), 4426, "link version 1, the router 99"),
        (wire.encode(wire.Abort([1])), 4400, "expected Hello"),
        (b"\xc1", 4400, "no frame of the link"),
        ("text", 4400, "no frame of the link"),
        (None, 4400, "no Hello within"),
    ],
    ids=["version", "other frame", "no frame", "text", "nothing"],
)
async def test_invalid_hello_closes_the_link_with_a_reason(first: bytes | str | None, code: int, reason: str) -> None:
    async with running_leader(FakeEngine(), make_link_settings(hello_s=0.05)) as (address, endpoint), dial(address) as connection:
        if first is not None:
            await connection.send(first)
        with pytest.raises(ConnectionClosed) as caught:
            await connection.recv()
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == code
        assert reason in caught.value.rcvd.reason
        assert sum(endpoint.refusals.values()) == 1


async def test_a_peer_may_leave_before_hello() -> None:
    async with running_leader(FakeEngine()) as (address, endpoint):
        async with dial(address):
            pass
        assert endpoint.refusals.total() == 0


async def test_leader_sends_identity_then_state_then_load() -> None:
    async with running_leader(FakeEngine()) as (address, endpoint), dial(address) as connection:
        await connection.send(wire.encode(HELLO))
        frames = [wire.decode_from_leader(await connection.recv(decode=False)) for _ in range(3)]
        assert frames == [
            wire.Welcome(
                protocol_version=PROTOCOL_VERSION,
                group="group-a",
                revision="r1",
                page_size=16,
                assets_hash=ASSETS.content_hash,
                can_send_prefixes=True,
                can_share=True,
            ),
            wire.State(serving=True, incarnation=1),
            wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=8, total_pages=8),
        ]
        assert endpoint.num_routers == 1


async def test_one_frame_has_all_tokens_of_a_step() -> None:
    engine = FakeEngine()
    async with served_link(engine) as (connection, _):
        for handle in (7, 8, 9):
            await connection.send(wire.encode(wire.Submit(handle, make_request([handle], max_tokens=2))))
        await until(lambda: len(engine.submitted) == 3)
        engine.step()
        assert await receive(connection, wire.Tokens) == wire.Tokens(
            handles=[7, 8, 9], epochs=[0, 0, 0], indices=[0, 0, 0], tokens=[expected([h], 1)[0] for h in (7, 8, 9)], finished=[]
        )
        engine.step()
        frame = await receive(connection, wire.Tokens)
        assert [end.handle for end in frame.finished] == [7, 8, 9]


async def test_details_stay_with_their_tokens_in_joined_frames() -> None:
    engine, detail = FakeEngine(), wire.TokenDetail(logprob=-1.0, rank=0, top_ids=[], top_logprobs=[])
    async with served_link(engine) as (connection, _):
        for handle in (7, 8):
            await connection.send(wire.encode(wire.Submit(handle, make_request([handle]))))
        await until(lambda: len(engine.submitted) == 2)
        sink = engine.submitted[1000][1]
        sink.tokens(wire.Tokens(handles=[1000], epochs=[0], indices=[0], tokens=[5], finished=[]))
        prompt_details = [wire.PromptDetails(1001, 0, 1, [detail])]
        sink.tokens(
            wire.Tokens(
                handles=[1001], epochs=[0], indices=[0], tokens=[6], finished=[], details=[detail], prompt_details=prompt_details
            )
        )
        sink.tokens(
            wire.Tokens(handles=[1000], epochs=[0], indices=[1], tokens=[7], finished=[], cached=[wire.Cached(1000, 0, 4)])
        )
        frame = await receive(connection, wire.Tokens)
        assert frame.cached == [wire.Cached(7, 0, 4)]
        assert (frame.handles, frame.tokens, frame.details) == ([7, 8, 7], [5, 6, 7], [None, detail, None])
        assert frame.prompt_details == [wire.PromptDetails(8, 0, 1, [detail])]


async def test_tokens_that_wait_together_leave_together() -> None:
    engine = FakeEngine()
    async with served_link(engine) as (connection, _):
        await connection.send(wire.encode(wire.Submit(7, make_request(max_tokens=9))))
        await until(lambda: len(engine.submitted) == 1)
        for _ in range(4):
            engine.step()
        frame = await receive(connection, wire.Tokens)
        assert (frame.indices, frame.tokens) == ([0, 1, 2, 3], expected([1, 2, 3], 4))


async def test_aborted_requests_are_aborted_in_the_engine() -> None:
    engine = FakeEngine()
    async with served_link(engine) as (connection, _):
        await connection.send(wire.encode(wire.Submit(7, make_request())))
        await connection.send(wire.encode(wire.Abort([7, 99])))
        await until(lambda: engine.aborted == [1000])


async def test_the_requests_of_a_router_that_left_are_aborted() -> None:
    engine = FakeEngine()
    async with served_link(engine) as (connection, endpoint):
        await connection.send(wire.encode(wire.Submit(7, make_request())))
        await until(lambda: len(engine.submitted) == 1)
        connection.transport.abort()
        await until(lambda: engine.aborted == [1000] and endpoint.num_routers == 0)
        assert len(engine.subscribers) == 1, "that of the orphans"


async def test_refusals_carry_the_handle_of_the_router() -> None:
    engine = FakeEngine()
    async with served_link(engine) as (connection, _):
        await connection.send(wire.encode(wire.Submit(7, make_request())))
        await until(lambda: len(engine.submitted) == 1)
        engine.submitted[1000][1].refused(
            wire.Refused(handle=1000, epoch=0, status=429, code="queue_full", message="full", retry_after_s=3.0)
        )
        assert await receive(connection, wire.Refused) == wire.Refused(
            handle=7, epoch=0, status=429, code="queue_full", message="full", retry_after_s=3.0
        )


async def test_a_group_that_does_not_serve_refuses() -> None:
    engine = FakeEngine()
    engine.present = wire.State(serving=False, incarnation=1, reason="rank 1 loads")
    async with served_link(engine) as (connection, _):
        await connection.send(wire.encode(wire.Submit(7, make_request())))
        assert await receive(connection, wire.Refused) == wire.Refused(
            handle=7, epoch=0, status=503, code="not_ready", message="rank 1 loads"
        )


async def test_a_request_that_the_engine_refuses_ends_no_other() -> None:
    engine = FakeEngine()
    async with served_link(engine) as (connection, _):
        await connection.send(wire.encode(wire.Submit(6, make_request())))
        await until(lambda: len(engine.submitted) == 1)
        engine.refusal = BackendError(429, "image_memory_full", "full")
        await connection.send(wire.encode(wire.Submit(7, make_request())))
        assert await receive(connection, wire.Refused) == wire.Refused(
            handle=7, epoch=0, status=429, code="image_memory_full", message="full"
        )
        assert list(engine.submitted) == [1000] and engine.aborted == []


async def test_new_incarnation_is_sent_at_once_and_frees_handles() -> None:
    engine = FakeEngine()
    async with served_link(engine) as (connection, _):
        await receive(connection, wire.State)
        await connection.send(wire.encode(wire.Submit(7, make_request())))
        await until(lambda: len(engine.submitted) == 1)
        engine.change(engine.present)
        engine.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        assert await receive(connection, wire.State) == wire.State(serving=False, incarnation=2, reason="rank 1 died")
        engine.change(wire.State(serving=True, incarnation=2))
        await connection.send(wire.encode(wire.Submit(7, make_request())))
        await until(lambda: len(engine.submitted) == 1)
        assert engine.aborted == []


async def test_assets_are_sent_on_request_and_on_change() -> None:
    engine = FakeEngine()
    engine.known_assets = None
    async with served_link(engine) as (connection, _):
        await connection.send(wire.encode(wire.Fetch("anything")))
        engine.known_assets = ASSETS
        engine.change(wire.State(serving=True, incarnation=2))
        assert await receive(connection, wire.Assets) == ASSETS
        assert await receive(connection, wire.State) == wire.State(serving=True, incarnation=2)
        await connection.send(wire.encode(wire.Fetch(ASSETS.content_hash)))
        assert await receive(connection, wire.Assets) == ASSETS


async def test_last_report_is_repeated_without_a_newer_one() -> None:
    engine = FakeEngine()
    async with served_link(engine) as (connection, _):
        assert await receive(connection, wire.Load) == await receive(connection, wire.Load) == engine.reported


async def test_newest_report_replaces_unsent_ones() -> None:
    engine = FakeEngine()
    async with served_link(engine, heartbeat_s=1000) as (connection, _):
        await receive(connection, wire.Load)
        for sequence in range(1, 50):
            engine.report(wire.Load(waiting=0, running=1, outstanding_tokens=10, free_pages=4, total_pages=8, sequence=sequence))
        assert (await receive(connection, wire.Load)).sequence == 49


async def test_report_contains_the_routers_newest_handle() -> None:
    engine = FakeEngine()
    async with served_link(engine, heartbeat_s=1000) as (connection, _):
        await receive(connection, wire.Load)
        last_handles = []
        for handle in (7, 8, 9):
            await connection.send(wire.encode(wire.Submit(handle, make_request([handle]))))
            await until(lambda: len(engine.submitted) == handle - 6)  # noqa: B023
            engine.report(wire.Load(waiting=0, running=1, outstanding_tokens=10, free_pages=4, total_pages=8, last_handle=1000))
            last_handles.append((await receive(connection, wire.Load)).last_handle)
        engine.report(wire.Load(waiting=0, running=1, outstanding_tokens=10, free_pages=4, total_pages=8, last_handle=1002))
        last_handles.append((await receive(connection, wire.Load)).last_handle)
        assert last_handles == [7, 7, 7, 9]
        engine.present = wire.State(serving=False, incarnation=1, reason="rank 1 loads")
        await connection.send(wire.encode(wire.Submit(10, make_request())))
        await receive(connection, wire.Refused)
        engine.report(wire.Load(waiting=0, running=1, outstanding_tokens=10, free_pages=4, total_pages=8, last_handle=1002))
        assert (await receive(connection, wire.Load)).last_handle == 10, "what was refused here waits for no engine"


async def test_page_changes_follow_a_requested_snapshot() -> None:
    engine = FakeEngine()
    keys = [bytes([i]) * 16 for i in range(4)]
    async with served_link(engine) as (connection, _):
        engine.send_pages(wire.PageChanges(0, [(True, keys[0]), (True, keys[1]), (False, keys[0])]))
        await connection.send(wire.encode(wire.SendPages()))
        snapshot = await receive(connection, wire.PageChanges)
        assert snapshot == wire.PageChanges(3, [(True, keys[1])], is_snapshot=True)
        engine.send_pages(wire.PageChanges(3, [(True, keys[2])]))
        assert await receive(connection, wire.PageChanges) == wire.PageChanges(3, [(True, keys[2])])
        engine.change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        engine.send_pages(wire.PageChanges(0, [(True, keys[3])]))
        assert await receive(connection, wire.PageChanges) == wire.PageChanges(0, [(True, keys[3])])
        await connection.send(wire.encode(wire.SendPages()))
        assert await receive(connection, wire.PageChanges) == wire.PageChanges(1, [(True, keys[3])], is_snapshot=True)


@asynccontextmanager
async def link_for_pages(engine: FakeEngine) -> AsyncIterator[ClientConnection]:
    """A link of a router of another service."""
    async with running_leader(engine) as (address, _), dial(address, holder_token(TOKEN)) as connection:
        await connection.send(wire.encode(HELLO))
        await receive(connection, wire.Welcome)
        yield connection


async def test_another_services_router_gets_cached_pages() -> None:
    engine = FakeEngine()
    prepared = moves.Prepared(move="m", cached_tokens=0, addresses=[moves.PageAddress("10.0.0.9", 7002)], key=b"k" * 32)
    order = moves.SendPrefix(move="m", prepared=prepared, keys=[b"1" * 16])
    async with link_for_pages(engine) as connection:
        for frame in (wire.SendPages(), wire.Abort([]), order, moves.Release("m")):
            await connection.send(wire.encode(frame))
        assert (await receive(connection, wire.PageChanges)).is_snapshot
        await until(lambda: engine.ordered == [order, moves.Release("m")])


@pytest.mark.parametrize(
    "frame",
    [
        wire.Submit(7, make_request()),
        wire.Prepare("m", make_request()),
        wire.Adopt(7, "a"),
        wire.Abort([7]),
        wire.Disown([7]),
        wire.Fetch("hash"),
        moves.Thaw("of another router"),
        moves.Release("of another router"),
        moves.Cancel("of another router"),
    ],
    ids=lambda frame: type(frame).__name__,
)
async def test_another_services_router_gets_nothing_else(frame: wire.ToLeader) -> None:
    engine = FakeEngine()
    async with link_for_pages(engine) as connection:
        await connection.send(wire.encode(frame))
        with pytest.raises(ConnectionClosed) as caught:
            await receive(connection, wire.Assets)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 4400
        assert "needs the service's token" in caught.value.rcvd.reason
        assert not engine.ordered and not engine.submitted


@pytest.mark.parametrize(
    "bad",
    [wire.encode(HELLO), b"\xc1", "text", wire.encode(wire.Submit(7, make_request()))],
    ids=["hello twice", "no frame", "text", "handle in use"],
)
async def test_a_router_that_breaks_the_rules_is_closed(bad: bytes | str) -> None:
    engine = FakeEngine()
    async with served_link(engine) as (connection, _):
        await connection.send(wire.encode(wire.Submit(7, make_request())))
        await connection.send(bad)
        with pytest.raises(ConnectionClosed) as caught:
            await receive(connection, wire.Assets)
        assert caught.value.rcvd is not None
        assert caught.value.rcvd.code == 4400
        assert engine.aborted == [1000]


async def test_leader_bug_is_not_blamed_on_the_router(caplog: pytest.LogCaptureFixture) -> None:
    class Broken(FakeEngine):
        def submit(self, request: wire.Request, sink: RequestSink, move: str = "") -> int:
            if request.id == "bad":
                raise KeyError("a bug")
            return super().submit(request, sink, move)

    engine = Broken()
    async with served_link(engine) as (connection, endpoint):
        await connection.send(wire.encode(wire.Submit(7, make_request())))
        await connection.send(wire.encode(wire.Submit(8, make_request(id="bad"))))
        with pytest.raises(ConnectionClosed) as caught:
            await receive(connection, wire.Assets)
        assert caught.value.rcvd is not None and caught.value.rcvd.code == 1011
        await until(lambda: engine.aborted == [1000] and endpoint.num_routers == 0)
    assert "link failed" in caplog.text and "a bug" in caplog.text


async def test_silent_router_counts_as_lost() -> None:
    engine = FakeEngine()
    async with served_link(engine, silence_s=0.1) as (connection, endpoint):
        await connection.send(wire.encode(wire.Submit(7, make_request())))
        await until(lambda: engine.aborted == [1000] and endpoint.num_routers == 0)


@pytest.mark.parametrize(
    "bounds", [{"stall_s": 0.05}, {"max_waiting_tokens": 100_000}], ids=["reads nothing for long", "leaves too much"]
)
async def test_a_router_that_does_not_read_is_closed(bounds: dict[str, float]) -> None:
    engine = FakeEngine()
    async with served_link(engine, **bounds) as (connection, endpoint):
        await connection.send(wire.encode(wire.Submit(7, make_request())))
        await until(lambda: len(engine.submitted) == 1)
        connection.transport.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.transport.pause_reading()
        sink = engine.submitted[1000][1]
        size = 2_000_000
        for _ in range(2):  # more than the socket takes
            sink.tokens(
                wire.Tokens(handles=[1000] * size, epochs=[0] * size, indices=[2**40] * size, tokens=[2**40] * size, finished=[])
            )
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await until(lambda: engine.aborted == [1000] and endpoint.num_routers == 0)
        connection.transport.abort()


def test_vectors_count_towards_the_bound_of_a_slow_router() -> None:
    queue = SendQueue()
    for handle in range(2):
        end = wire.Finished(handle, 0, "stop", 0, bytes(100 * BYTES_PER_TOKEN))
        queue.add_tokens(wire.Tokens(handles=[], epochs=[], indices=[], tokens=[], finished=[end]))
    assert queue.num_tokens == 200
    [frame] = queue.take()
    assert isinstance(frame, wire.Tokens) and len(frame.finished) == 2 and not queue.num_tokens


@pytest.mark.parametrize("reads_changes", [True, False], ids=["present version", "older version"])
async def test_changed_adapters_are_sent_without_files(reads_changes: bool) -> None:
    engine = FakeEngine()
    async with running_leader(engine, make_link_settings()) as (address, _), dial(address) as connection:
        await connection.send(wire.encode(msgspec.structs.replace(HELLO, reads_adapter_changes=reads_changes)))
        await receive(connection, wire.Welcome)
        engine.known_assets = changed = wire.with_adapters(ASSETS, [wire.Adapter("first", "hash")])
        engine.change(engine.present)
        if reads_changes:
            frame = await receive(connection, wire.AdaptersChanged)
            assert frame == wire.AdaptersChanged(changed.content_hash, ASSETS.content_hash, changed.adapters)
        else:
            assert await receive(connection, wire.Assets) == changed
        engine.known_assets = longer = wire.make_assets(ASSETS.files, ["tiny"], 8192, [0])
        engine.change(engine.present)
        assert await receive(connection, wire.Assets) == longer
