"""A bare WebSocket client in the role of a router, for the leader's side of the link."""

import asyncio
import dataclasses
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any, TypeVar

import msgspec
from websockets.asyncio.client import ClientConnection, connect

from phalanx_api import wire
from phalanx_api.wire import PROTOCOL_VERSION
from phalanx_runtime.server.link.endpoint import LinkEndpoint
from tests.polling import until
from tests.router.api_servers import FakeEngine, make_link_settings, running_leader
from tests.router.fakes import TOKEN, make_request

HELLO = wire.Hello(PROTOCOL_VERSION, "router-0")


def dial(address: str, token: str = TOKEN) -> connect:
    """A connection to a leader, without Hello."""
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    return connect(
        f"ws://{address}{wire.LINK_PATH}",
        additional_headers=headers,
        proxy=None,
        compression=None,
        max_size=None,
        close_timeout=1,
    )


F = TypeVar("F", bound=wire.FromLeader)


async def receive(connection: ClientConnection, kind: type[F]) -> F:
    """Next frame of this kind."""
    async with asyncio.timeout(10):
        while True:
            frame = wire.decode_from_leader(await connection.recv(decode=False))
            if isinstance(frame, kind):
                return frame


@asynccontextmanager
async def served_link(engine: FakeEngine, **bounds: Any) -> AsyncIterator[tuple[ClientConnection, LinkEndpoint]]:
    """Serves the engine; yields a link after Hello and Welcome, and its endpoint."""
    settings = dataclasses.replace(make_link_settings(), **bounds)
    async with running_leader(engine, settings) as (address, endpoint):
        async with dial(address) as connection:
            await connection.send(wire.encode(HELLO))
            await receive(connection, wire.Welcome)
            yield connection, endpoint


@asynccontextmanager
async def router_link(address: str, router: str = "router-1", instance: str = "first") -> AsyncIterator[ClientConnection]:
    """Opens a link and sends Hello."""
    async with dial(address) as connection:
        await connection.send(wire.encode(wire.Hello(PROTOCOL_VERSION, router, instance)))
        yield connection


def resumable(id: str = "a", max_tokens: int = 9, prompt: tuple[int, ...] = (1, 2, 3)) -> wire.Request:
    """A request that survives its router."""
    return msgspec.structs.replace(make_request(prompt, max_tokens, id), can_resume=True)


async def orphan_request(engine: FakeEngine, address: str, request: wire.Request, steps: int = 2, **identity: str) -> None:
    """Submits a request, runs `steps` steps and aborts the connection of its router."""
    async with router_link(address, **identity) as first:
        await first.send(wire.encode(wire.Submit(1, request)))
        await until(lambda: len(engine.submitted) == 1)
        for _ in range(steps):
            engine.step()
        first.transport.abort()


def named(id: str) -> wire.Request:
    """A stream that shares the tokens of an equal request, with another seed."""
    request = resumable(id)
    return msgspec.structs.replace(request, sampling=msgspec.structs.replace(request.sampling, seed=99)).as_shared()
