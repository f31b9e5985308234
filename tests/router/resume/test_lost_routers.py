"""A router whose machine is lost ends no connection: the router that has its journals notices that no pong arrives."""

import asyncio
import contextlib
from collections.abc import AsyncIterator

import pytest
from starlette.applications import Starlette
from websockets.client import ClientProtocol
from websockets.uri import parse_uri

from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_router import program
from phalanx_router.program import make_config
from phalanx_router.resume import peer_wire
from phalanx_router.resume.journal_store import JournalStore, PeerCopies
from phalanx_router.resume.peer_wire import JournalChanges, JournalCopy
from phalanx_router.resume.peers import PeerEndpoint
from tests.polling import until
from tests.router.api_servers import QuietServer
from tests.router.fakes import TOKEN, make_request
from tests.router.programs import read


@contextlib.asynccontextmanager
async def silent_router(port: int) -> AsyncIterator[None]:
    """A router that sends one journal, and then neither reads nor ends its connection."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    protocol = ClientProtocol(parse_uri(f"ws://127.0.0.1:{port}{peer_wire.PEER_PATH}"))
    upgrade = protocol.connect()
    upgrade.headers["Authorization"] = f"Bearer {TOKEN}"
    protocol.send_request(upgrade)
    writer.write(b"".join(protocol.data_to_send()))
    protocol.receive_data(await reader.readuntil(b"\r\n\r\n"))
    changes = JournalChanges(opened=[(1, JournalCopy(make_request(id="a")))], numbers=[], counts=[], tokens=[], closed=[])
    for frame in (peer_wire.Greeting("lost", "1"), changes):
        protocol.send_binary(peer_wire.encode(frame))
    writer.write(b"".join(protocol.data_to_send()))
    try:
        yield
    finally:
        writer.close()


async def test_journals_of_a_lost_router_expire(token_file: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "PING_INTERVAL_S", 0.05)
    monkeypatch.setattr(program, "PING_TIMEOUT_S", 0.05)
    now = [0.0]
    copies = PeerCopies(JournalStore(lambda: now[0]))
    app = Starlette(routes=[PeerEndpoint(ServiceToken([TOKEN]), copies).route()])
    server = QuietServer(make_config(app, read(token_file, "--leaders", "a:1", "--port", "0"), None))
    task = asyncio.create_task(server.serve())
    try:
        await until(lambda: server.started)
        async with silent_router(server.servers[0].sockets[0].getsockname()[1]):
            await until(lambda: len(copies) == 1)
            await until(lambda: len(copies) == 0)
            assert [copy.request.id for copy in copies.find(["a"])] == ["a"], "it can be resumed for a minute"
            now[0] = 61.0
            assert copies.find(["a"]) == []
    finally:
        server.should_exit = True
        await task
