"""Requests that wait at the router, through real links: late binding, refusals, priority, replays, requeueing."""

import asyncio
import time
from dataclasses import replace

import msgspec
import pytest

from phalanx_api import wire
from phalanx_api.prefix import PrefixKeys, root_key
from phalanx_api.summary import BalancePolicy, Budgets
from phalanx_frontend.backend import BackendError
from phalanx_router.routing.queue import PER_KIND, QueueBounds
from phalanx_router.routing.view import DEGRADED_AFTER_S
from tests.router.fakes import FakeLeader, Heard, Script, World, expected, hear, make_request, make_settings, running_world

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


async def reported(world: World, leader: FakeLeader, load: wire.Load) -> None:
    """Returns when the router knows this load."""
    leader.load = load
    await world.until(
        lambda: any(
            _is(link.group_report.load, load) for link in world.fleet.links.serving() if link.endpoint.key == leader.group
        )
    )


def _is(told: wire.Load | None, load: wire.Load) -> bool:
    return told is not None and msgspec.structs.replace(told, sequence=0, last_handle=0) == load


def start(world: World, id: str, priority: int = 0, tenant: str = "") -> asyncio.Task[Heard]:
    request = msgspec.structs.replace(make_request(id=id), priority=priority, tenant=tenant)
    return asyncio.create_task(hear(world.fleet, request))


def ids(leader: FakeLeader) -> list[str]:
    return [submit.request.id for submit in leader.submitted]


async def test_requests_wait_at_the_router_above_two_per_group() -> None:
    leader = FakeLeader("a")
    async with running_world(leader) as world:
        await reported(world, leader, FULL)
        streams = [
            start(world, "late", priority=5),
            start(world, "first"),
            start(world, "second"),
            start(world, "urgent", priority=-1),
        ]
        await world.until(lambda: world.metric("phalanx_router_queued_requests") == 4)
        assert leader.submitted == []
        leader.load = ROOM
        heard = await asyncio.gather(*streams)
        assert all(each.tokens == expected([1, 2, 3], 16) for each in heard)
        assert ids(leader) == ["urgent", "first", "second", "late"]
        assert world.metric("phalanx_router_wait_seconds_count") == 4
        assert world.metric("phalanx_router_queued_requests") == 0


async def test_process_stall_makes_no_full_group_available() -> None:
    """The clock of these tests does not count it, so a slow machine fails none of them."""
    leader = FakeLeader("a")
    async with running_world(leader) as world:
        await reported(world, leader, FULL)
        time.sleep(2 * DEGRADED_AFTER_S)
        waiting = start(world, "x")
        await world.until(lambda: world.metric("phalanx_router_queued_requests") == 1)
        leader.load = ROOM
        await waiting


async def test_full_queue_returns_429_with_the_drain_time() -> None:
    leader = FakeLeader("a")
    async with running_world(leader, settings=make_settings(queue=QueueBounds(2))) as world:
        await reported(world, leader, FULL)
        waiting = [start(world, name) for name in ("x", "y")]
        await world.until(lambda: world.metric("phalanx_router_queued_requests") == 2)
        with pytest.raises(BackendError, match="2 requests wait already") as caught:
            await start(world, "z")
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1
        urgent = start(world, "urgent", priority=-1)
        with pytest.raises(BackendError, match="2 requests wait already"):
            await waiting[1]
        leader.load = ROOM
        await asyncio.gather(waiting[0], urgent)
        assert ids(leader) == ["urgent", "x"]
        assert world.metric("phalanx_router_shed_total", why="queue_full") == 2


async def test_a_client_that_leaves_gives_up_its_place() -> None:
    leader = FakeLeader("a")
    async with running_world(leader, settings=make_settings(queue=QueueBounds(1))) as world:
        await reported(world, leader, FULL)
        leaving = start(world, "leaves")
        await world.until(lambda: world.metric("phalanx_router_queued_requests") == 1)
        leaving.cancel()
        await world.until(lambda: world.metric("phalanx_router_queued_requests") == 0)
        staying = start(world, "stays")
        await world.until(lambda: world.metric("phalanx_router_queued_requests") == 1)
        leader.load = ROOM
        assert (await staying).tokens == expected([1, 2, 3], 16)


async def test_replays_go_before_newcomers_and_are_never_shed() -> None:
    dying, full = FakeLeader("a", Script(hold_at=2)), FakeLeader("b")
    async with running_world(dying, full, settings=make_settings(queue=QueueBounds(1))) as world:
        await reported(world, full, FULL)
        begun = start(world, "begun")
        await world.until(lambda: dying.steps == 2)
        await reported(world, dying, FULL)
        demand = start(world, "newcomer")
        await world.until(lambda: world.metric("phalanx_router_queued_requests") == 1)
        await dying.stop()
        assert (await begun).tokens == expected([1, 2, 3], 16)
        full.load = ROOM
        await demand
        assert ids(full) == ["begun", "newcomer"]
        assert world.metric("phalanx_router_replays_total") == 1


async def test_shedding_refuses_the_least_urgent_bands() -> None:
    leader = FakeLeader("a")
    async with running_world(leader) as world:
        await reported(world, leader, FULL)
        streams = {name: start(world, name, priority) for name, priority in (("low", 9), ("middle", 5), ("high", 0))}
        await world.until(lambda: world.metric("phalanx_router_queued_requests") == 3)
        assert world.fleet.dispatcher.shed(1, 7.0, "every group is loaded") == 1
        with pytest.raises(BackendError, match="every group is loaded") as caught:
            await streams.pop("low")
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "overloaded", 7.0)
        leader.load = ROOM
        await asyncio.gather(*streams.values())
        assert ids(leader) == ["high", "middle"]


async def test_saturated_fleet_refuses_waiting_requests_only() -> None:
    leaders = [FakeLeader("a", Script(hold_at=2)), FakeLeader("b")]
    settings = replace(make_settings(tick_s=0.05), policy=BalancePolicy(ttft_target_s=0.5))
    async with running_world(*leaders, settings=settings) as world:
        begun = start(world, "begun")
        await world.until(lambda: leaders[0].steps == 2)
        await asyncio.gather(*(reported(world, leader, FULL) for leader in leaders))
        with pytest.raises(BackendError, match=r"every group is loaded.* the target is 0\.5 s") as caught:
            await start(world, "newcomer")
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1
        leaders[0].release()
        assert (await begun).tokens == expected([1, 2, 3], 16)
        assert world.metric("phalanx_router_shed_total", why="overloaded") == 1


async def test_unstarted_request_is_withdrawn_for_a_better_group() -> None:
    stuck, free = FakeLeader("a", Script(hold_at=0)), FakeLeader("b")
    async with running_world(stuck, free, settings=make_settings(tick_s=0.05)) as world:
        await reported(world, free, msgspec.structs.replace(FULL, waiting_prompt_tokens=400_000))
        stream = start(world, "request")
        await world.until(lambda: ids(stuck) == ["request"])
        stuck.load, free.load = msgspec.structs.replace(FULL, waiting_prompt_tokens=400_000), ROOM
        assert (await stream).tokens == expected([1, 2, 3], 16)
        assert (ids(free), stuck.aborted) == (["request"], [1])
        assert free.submitted[0].request.epoch == 0
        assert world.metric("phalanx_router_requeues_total") == 1
        assert world.metric("phalanx_router_replays_total") == 0


async def test_waiting_request_in_a_draining_group_is_withdrawn() -> None:
    leaving, free = FakeLeader("a", Script(hold_at=0)), FakeLeader("b")
    settings = replace(make_settings(tick_s=0.05), policy=BalancePolicy(budgets=Budgets(moves_per_group=0)))
    async with running_world(leaving, free, settings=settings) as world:
        await reported(world, free, msgspec.structs.replace(FULL, waiting_prompt_tokens=400_000))
        stream = start(world, "request")
        await world.until(lambda: ids(leaving) == ["request"])
        world.source.change(leaving.endpoint(leaving=True), free.endpoint())
        leaving.load, free.load = msgspec.structs.replace(FULL, waiting_prompt_tokens=400_000), ROOM
        assert (await stream).tokens == expected([1, 2, 3], 16)
        assert (ids(free), leaving.aborted) == (["request"], [1])
        assert world.metric("phalanx_router_requeues_total") == 1


async def test_unplaceable_streams_block_no_started_ones() -> None:
    """A group that is being emptied takes what has started, and nothing else."""
    refusing, dying = FakeLeader("a", Script(hold_at=0)), FakeLeader("b", Script(hold_at=0))
    async with running_world(refusing, dying, settings=make_settings(hold_s=60.0)) as world:
        await reported(world, dying, msgspec.structs.replace(FULL, waiting_prompt_tokens=400_000))
        refused = [start(world, f"refused{number}") for number in range(PER_KIND)]
        await world.until(lambda: len(refusing.submitted) == PER_KIND)
        await reported(world, refusing, msgspec.structs.replace(FULL, waiting_prompt_tokens=400_000))
        await reported(world, dying, ROOM)
        started = start(world, "started")
        await world.until(lambda: ids(dying) == ["started"])
        world.source.change(refusing.endpoint(leaving=True), dying.endpoint(leaving=True))
        for submit in list(refusing.submitted):
            await refusing.tell(wire.Refused(handle=submit.handle, epoch=0, status=503, code="draining", message="it is leaving"))
        await world.until(lambda: world.metric("phalanx_router_queued_requests") == PER_KIND)
        refusing.release()
        await dying.stop()
        assert (await started).tokens == expected([1, 2, 3], 16)
        assert world.metric("phalanx_router_queued_requests") == PER_KIND
        for stream in refused:
            stream.cancel()
        await asyncio.gather(*refused, return_exceptions=True)


async def test_prompt_goes_to_the_group_with_its_pages() -> None:
    served = wire.State(serving=True, incarnation=1, served=wire.Served("hash", "layout", 1000))
    leaders = [FakeLeader("a"), FakeLeader("b")]
    prompt = list(range(1, 66))
    keys = PrefixKeys(root_key("hash"), 16).extend(prompt)
    async with running_world(*leaders) as world:
        for leader in leaders:
            await leader.tell(served)
        await leaders[1].tell(wire.PageChanges(0, [(True, key) for key in keys], is_snapshot=True))
        await world.until(lambda: world.fleet.links.fleet_view.prefixes.num_keys == 4)
        for number in range(3):
            await hear(world.fleet, make_request(prompt, id=f"r{number}"))
        assert [len(leader.submitted) for leader in leaders] == [0, 3]
        assert world.metric("phalanx_router_choices_total", why="home") == 3
        leaders[1].cut()
        await world.until(lambda: world.fleet.links.fleet_view.prefixes.num_keys == 0)


async def test_old_reports_show_and_stop_nothing() -> None:
    """Two of three groups tell nothing more: requests go on by the ledger."""
    leaders = [FakeLeader(name, Script(silent=name != "c", hold_at=0)) for name in "abc"]
    async with running_world(*leaders, settings=make_settings(tick_s=0.02, heartbeat_timeout_s=30)) as world:
        streams = [start(world, f"r{number}") for number in range(6)]
        await world.until(lambda: world.metric("phalanx_router_groups", state="suspect") == 2)
        before = world.metric("phalanx_router_choices_total", why="ledger")
        streams += [start(world, f"late{number}") for number in range(6)]
        await world.until(lambda: world.metric("phalanx_router_choices_total", why="ledger") == before + 6)
        for leader in leaders:
            leader.release()
        assert all(heard.tokens == expected([1, 2, 3], 16) for heard in await asyncio.gather(*streams))


async def test_a_request_that_cannot_be_sent_harms_no_other() -> None:
    leader = FakeLeader("a")
    async with running_world(leader) as world:
        await reported(world, leader, FULL)
        bad = msgspec.structs.replace(make_request(id="\ud800"), tenant="bad")
        streams = [asyncio.create_task(hear(world.fleet, bad)), start(world, "good")]
        await world.until(lambda: world.metric("phalanx_router_queued_requests") == 2)
        leader.load = ROOM
        with pytest.raises(UnicodeEncodeError):
            await streams[0]
        assert (await streams[1]).tokens == expected([1, 2, 3], 16)
        assert world.metric("phalanx_router_links_lost_total") == 0
        assert world.metric("phalanx_router_queued_requests") == 0
