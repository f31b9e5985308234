"""Load reports with and without room for another request, and clients that start streams."""

import asyncio

import msgspec

from phalanx_api import wire
from tests.polling import until
from tests.router.fakes import FakeLeader, StreamResult, World, make_request, read_stream

ROOM = wire.Load(
    waiting=0, running=1, outstanding_tokens=0, free_pages=900, total_pages=1000, max_num_seqs=8, max_num_batched_tokens=512
)
FULL = wire.Load(
    waiting=2,
    running=8,
    outstanding_tokens=0,
    free_pages=0,
    total_pages=1000,
    max_num_seqs=8,
    max_num_batched_tokens=512,
    waiting_prompt_tokens=50_000,
)


async def report_load(world: World, leader: FakeLeader, load: wire.Load) -> None:
    """Lets the leader report this load, and waits until the router has received it."""
    leader.load = load
    await until(
        lambda: any(
            is_same(link.group_report.load, load) for link in world.fleet.links.serving() if link.endpoint.key == leader.group
        )
    )


def is_same(reported_load: wire.Load | None, load: wire.Load) -> bool:
    """Compares loads without their sequence numbers and handles."""
    return reported_load is not None and msgspec.structs.replace(reported_load, sequence=0, last_handle=0) == load


def start_stream(world: World, id: str, priority: int = 0, tenant: str = "") -> asyncio.Task[StreamResult]:
    """Starts a client that reads a stream."""
    request = msgspec.structs.replace(make_request(id=id), priority=priority, tenant=tenant)
    return asyncio.create_task(read_stream(world.fleet, request))


def submitted_ids(leader: FakeLeader) -> list[str]:
    """Ids of the requests that the leader received."""
    return [submit.request.id for submit in leader.submitted]
