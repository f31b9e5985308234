"""Streams that a group holds back until the test releases them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import msgspec

from tests.polling import until
from tests.router.fakes import Script, expected, make_request, read_stream
from tests.router.moves.moving_leaders import MoveScript, MovingLeader
from tests.router.polled_routers import PolledRouter, polled_router

STREAMS = 3


@asynccontextmanager
async def streams_at_a(streams: int = STREAMS, **move: MoveScript) -> AsyncIterator[PolledRouter]:
    """Some streams at group a, which holds them, and two other groups; at the end all tokens are right."""
    peers: list[MovingLeader] = []
    source, *others = (MovingLeader(group, peers, Script(hold_at=5), move.get(group)) for group in "abc")
    source.load = msgspec.structs.replace(source.load, free_pages=100, total_pages=100)
    for other in others:
        other.state = msgspec.structs.replace(other.state, serving=False)
    async with polled_router(source, *others, ready=1) as router:
        asking = [asyncio.create_task(read_stream(router.fleet, make_request(max_tokens=20))) for _ in range(streams)]
        await until(lambda: sum(session.assignment is not None for session in router.fleet.sessions) == streams)
        for other in others:
            await other.send(msgspec.structs.replace(other.state, serving=True))
        await router.until_ready(3)
        yield router
        for leader in peers:
            leader.release()
        assert [received.tokens for received in await asyncio.gather(*asking)] == [expected([1, 2, 3], 20)] * streams
