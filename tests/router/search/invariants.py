"""What must hold of a fleet once it is quiet: streams are whole, nothing is held, all processes have returned."""

import asyncio
import math
from collections.abc import Iterator

from tests.router.search.client import Loss, StreamClient
from tests.router.search.fleet import FleetWorld

COPY_S = 1.0
"""Until a peer has the journal of a stream: periods of replication, and delays."""
LATE_TOKENS = 10
"""Of another run that fit by chance: there are few different tokens."""
EFFECT_S = 10.0
"""Until a fault of a process has taken effect: a cluster applies it at its next look."""
WINDOW_S = 90.0
"""Faults before a loss that may have caused it."""


def nothing_hangs(world: FleetWorld) -> Iterator[str]:
    """Each stream has ended."""
    now = asyncio.get_running_loop().time()
    for client in world.clients:
        if client.ask.at <= now and not client.has_ended:
            yield f"{client.request.id} has {len(client.reading.tokens)} of {len(client.expected)} tokens and does not end"


def resumable_streams_survive(world: FleetWorld) -> Iterator[str]:
    """A client that resumes starts again only after two faults: one loses no stream.

    A router that ends loses the streams of clients that left it, unless a peer has their journals. Without a peer the leave of a
    client is a fault, and so it is if the router ends before it has sent them.
    """
    for client in world.clients:
        for loss in client.reading.losses:
            left_alone = _has_left_alone(world, client.reading.reconnected_at)
            if client.request.can_resume and _num_faults(world, client, loss) + left_alone < 2:
                yield f"{client.request.id} lost {loss.num_tokens} tokens at {loss.at:.2f} s: {loss.code}"


def _has_left_alone(world: FleetWorld, at: float | None) -> bool:
    """Returns whether no other router had the journal of a stream whose client left at this time, when its router ended."""
    if at is None or world.plan.num_routers == 1:
        return at is not None
    return any(fault.where == "router" and at <= fault.at <= at + COPY_S for fault in world.plan.faults)


def _num_faults(world: FleetWorld, client: StreamClient, loss: Loss) -> int:
    """Returns the faults that may have caused a loss."""
    since = min(client.ask.at, loss.at - WINDOW_S)
    harmless = {"move", "clock", "restart operator", "corrupt pages", "slow disk", "lost pages", "silence", "late watch"}
    faults = [fault for fault in world.plan.faults if fault.kind not in harmless and fault.where != "api-operator"]
    return sum(fault.at <= loss.at and fault.at + max(fault.seconds, EFFECT_S) >= since for fault in faults)


def clients_read_one_run(world: FleetWorld) -> Iterator[str]:
    """Where groups sample different tokens, each token of a client follows from the ones before.

    Tokens that the copy of a journal lacks are sampled again: that takes the loss of a router and of the group, and is seen after
    a resume. A lost link and a lost router together keep the group that has the stream.
    """
    for client in world.clients:
        since, until = client.ask.at - EFFECT_S, client.reading.ended_at or math.inf
        faults = [fault for fault in world.plan.faults if since <= fault.at + fault.seconds and fault.at <= until]
        is_rare = len(faults) > 2 or not {fault.where for fault in faults} <= {"router", "router-leader"}
        for index in client.reading.breaks:
            if not (is_rare and any(at <= index < at + LATE_TOKENS for at in client.reading.resumed)):
                yield f"{client.request.id} has a token of another run at index {index}, and resumed at {client.reading.resumed}"


def groups_hold_nothing(world: FleetWorld) -> Iterator[str]:
    """No group has a request, a held page or a move."""
    for group in world.living_groups():
        yield from group.violations()
        if group.leader.client.open_handles:
            yield f"{group.name}: its leader has {len(group.leader.client.open_handles)} open requests"


def routers_hold_nothing(world: FleetWorld) -> Iterator[str]:
    """No router has a stream, a move, a request at a group, or a journal."""
    for router in world.living_routers():
        backend = router.backend
        registry = backend.stream_registry
        registry.store.get("")  # drops expired entries
        held = {
            "streams": len(backend.sessions),
            "moves": len(backend.mover.board.open()),
            "requests at groups": sum(link.num_requests for link in backend.links.all()),
            "open journals": len(registry.open_sessions()),
            "journals of other routers": len(registry.copies),
            "stored journals": len(registry.store),
        }
        yield from (f"{router.name}: {count} {what}" for what, count in held.items() if count)


def all_return(world: FleetWorld) -> Iterator[str]:
    """Each router is linked to each group, and has a peer."""
    if len(world.living_routers()) != world.plan.num_routers:
        yield f"{len(world.living_routers())} routers of {world.plan.num_routers}"
    if len(world.living_groups()) != world.num_wanted or not world.is_settled:
        yield f"{len(world.living_groups())} groups of {world.num_wanted}"
    for router in world.living_routers():
        if router.backend.links.num_ready != len(world.living_groups()):
            yield f"{router.name}: {router.backend.links.num_ready} groups are ready"
        if (router.peers.peer is None) != (world.plan.num_routers == 1):
            yield f"{router.name}: no peer has its journals"


def polls_continue(world: FleetWorld) -> Iterator[str]:
    """An operator that the API server does not answer polls the routers, unless another fault keeps it from them."""
    others = [
        fault
        for fault in world.plan.faults
        if fault.where in ("router", "operator", "operator-router") and fault.kind not in ("late watch", "clock")
    ]
    for at in world.unanswered:
        if not any(fault.at <= at <= fault.at + fault.seconds + WINDOW_S for fault in others):
            yield f"a router has not answered at {at:.2f} s"


def status_is_whole(world: FleetWorld) -> Iterator[str]:
    """The status says that the service is ready, and that no partition lasts."""
    yield from world.unfulfilled()


INVARIANTS = (
    nothing_hangs,
    resumable_streams_survive,
    clients_read_one_run,
    groups_hold_nothing,
    routers_hold_nothing,
    all_return,
    polls_continue,
    status_is_whole,
)


def check(world: FleetWorld) -> list[str]:
    """Returns all violations."""
    return [f"{invariant.__name__}: {found}" for invariant in INVARIANTS for found in invariant(world)]
