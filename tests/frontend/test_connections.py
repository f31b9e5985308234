"""The HTTP servers of router and runtime bound the head of a request, tested over sockets."""

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
import uvicorn
from starlette.types import ASGIApp, Receive, Scope, Send

from phalanx_frontend.connections import MAX_HEAD_BYTES
from phalanx_router import program
from phalanx_router.settings import read_settings
from phalanx_runtime.server import pod_server
from tests.polling import until
from tests.router.api_servers import QuietServer

Configure = Callable[[ASGIApp, Path], uvicorn.Config]
ENDLESS = 64 * MAX_HEAD_BYTES


def runtime_config(app: ASGIApp, folder: Path) -> uvicorn.Config:
    return pod_server.make_config(app, "127.0.0.1", 0)


def router_config(app: ASGIApp, folder: Path) -> uvicorn.Config:
    (folder / "token").write_text("secret of the service\n")
    settings = read_settings(["serve", "--token-file", str(folder / "token"), "--leaders", "a:1"], {})
    return program.make_config(app, settings, None)


@pytest.fixture(params=[runtime_config, router_config])
def configure(request: pytest.FixtureRequest) -> Configure:
    found: Configure = request.param
    return found


async def length_of_body(scope: Scope, receive: Receive, send: Send) -> None:
    """Answers with the number of bytes of the body, at `/late` after half a second."""
    if scope["type"] == "lifespan":
        while (await receive())["type"] == "lifespan.startup":
            await send({"type": "lifespan.startup.complete"})
        await send({"type": "lifespan.shutdown.complete"})
        return
    size, has_more = 0, True
    while has_more:
        message = await receive()
        size, has_more = size + len(message.get("body", b"")), message.get("more_body", False)
    if scope["path"] == "/late":
        await asyncio.sleep(0.5)
    body = str(size).encode()
    headers = [(b"content-length", str(len(body)).encode())]
    await send({"type": "http.response.start", "status": 200, "headers": headers})
    await send({"type": "http.response.body", "body": body})


@asynccontextmanager
async def connected(
    configure: Configure, folder: Path, idle_s: float = 60.0
) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    listening, config = socket.create_server(("127.0.0.1", 0)), configure(length_of_body, folder)
    config.timeout_keep_alive = idle_s  # type: ignore[assignment]
    server = QuietServer(config)
    serving = asyncio.create_task(server.serve([listening]))
    try:
        await until(lambda: server.started)
        reader, writer = await asyncio.open_connection(*listening.getsockname())
        yield reader, writer
        writer.close()
    finally:
        server.should_exit = True
        await serving


async def sent(writer: asyncio.StreamWriter, piece: bytes) -> int:
    """Sends a piece again and again, and returns the bytes until the server ended the connection, `ENDLESS` if it did not."""
    count = 0
    try:
        while count < ENDLESS:
            writer.write(piece)
            count += len(piece)
            await writer.drain()
    except ConnectionError:
        pass
    return count


@pytest.mark.parametrize(
    ("start", "piece"),
    [
        (b"GET / HTTP/1.1\r\nhost: x\r\n", b"a: " + b"x" * 1000 + b"\r\n"),
        (b"GET / HTTP/1.1\r\nhost: x\r\na: ", b"x" * 1000),
        (b"GET /", b"x" * 1000),
        (b"POST / HTTP/1.1\r\nhost: x\r\ntransfer-encoding: chunked\r\n\r\n1\r\na\r\n0\r\n", b"a: " + b"x" * 1000 + b"\r\n"),
    ],
    ids=["headers", "header", "path", "trailers"],
)
async def test_an_endless_head_ends_its_connection(configure: Configure, tmp_path: Path, start: bytes, piece: bytes) -> None:
    async with connected(configure, tmp_path) as (_, writer):
        writer.write(start)
        assert await sent(writer, piece) < ENDLESS


async def test_a_long_head_gets_431(configure: Configure, tmp_path: Path) -> None:
    async with connected(configure, tmp_path) as (reader, writer):
        writer.write(b"GET / HTTP/1.1\r\nhost: x\r\na: " + b"x" * MAX_HEAD_BYTES)
        async with asyncio.timeout(60):
            answer = await reader.read()
    assert answer.startswith(b"HTTP/1.1 431 ") and b"more than 65536 bytes" in answer


async def test_long_bodies_and_many_requests_are_served(configure: Configure, tmp_path: Path) -> None:
    head = b"POST / HTTP/1.1\r\nhost: x\r\na: " + b"x" * (MAX_HEAD_BYTES // 2) + b"\r\n"
    async with connected(configure, tmp_path) as (reader, writer):
        for start, piece, count, end in [
            (b"transfer-encoding: chunked\r\n\r\n", b"1\r\na\r\n", 50_000, b"0\r\n\r\n"),
            (b"content-length: 1000000\r\n\r\n", b"a" * 1000, 1000, b""),
            (b"content-length: 0\r\n\r\n", b"", 0, b""),
        ]:
            writer.write(head + start + piece * count + end)
            answer = await reader.readuntil(b"\r\n\r\n")
            size = (piece.count(b"a")) * count
            assert answer.startswith(b"HTTP/1.1 200 ") and await reader.readexactly(len(str(size))) == str(size).encode()


@pytest.mark.parametrize("start", [b"", b"GET / HTTP/1.1\r\nhost: x\r\n"], ids=["nothing", "half"])
async def test_a_head_that_never_ends_is_not_waited_for(configure: Configure, tmp_path: Path, start: bytes) -> None:
    async with connected(configure, tmp_path, idle_s=0.2) as (reader, writer):
        writer.write(start)
        async with asyncio.timeout(60):
            assert await reader.read() == b""


async def test_half_of_a_next_request_ends_no_answer(configure: Configure, tmp_path: Path) -> None:
    async with connected(configure, tmp_path, idle_s=0.1) as (reader, writer):
        writer.write(b"GET /late HTTP/1.1\r\nhost: x\r\n\r\nGET / HTTP/1.1\r\nhost:")
        async with asyncio.timeout(60):
            assert (await reader.readuntil(b"\r\n\r\n")).startswith(b"HTTP/1.1 200 ")
