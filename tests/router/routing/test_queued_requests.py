"""Requests queued at the router, over real links: late binding, refusals, priority, replays, requeueing."""

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
from tests.polling import until
from tests.router.fakes import FakeLeader, Script, expected, make_request, make_settings, read_stream, running_world
from tests.router.loads import FULL, ROOM, report_load, start_stream, submitted_ids


async def test_requests_wait_at_the_router_above_two_per_group() -> None:
    leader = FakeLeader("a")
    async with running_world(leader) as world:
        await report_load(world, leader, FULL)
        streams = [
            start_stream(world, "late", priority=5),
            start_stream(world, "first"),
            start_stream(world, "second"),
            start_stream(world, "urgent", priority=-1),
        ]
        await until(lambda: world.metric("phalanx_router_queued_requests") == 4)
        assert leader.submitted == []
        leader.load = ROOM
        received = await asyncio.gather(*streams)
        assert all(each.tokens == expected([1, 2, 3], 16) for each in received)
        assert submitted_ids(leader) == ["urgent", "first", "second", "late"]
        assert world.metric("phalanx_router_wait_seconds_count") == 4
        assert world.metric("phalanx_router_queued_requests") == 0


async def test_process_stall_makes_no_full_group_available() -> None:
    """The clock of these tests ignores pauses of the process."""
    leader = FakeLeader("a")
    async with running_world(leader) as world:
        await report_load(world, leader, FULL)
        time.sleep(2 * DEGRADED_AFTER_S)
        waiting = start_stream(world, "x")
        await until(lambda: world.metric("phalanx_router_queued_requests") == 1)
        leader.load = ROOM
        await waiting


async def test_full_queue_returns_429_with_the_drain_time() -> None:
    leader = FakeLeader("a")
    async with running_world(leader, settings=make_settings(queue=QueueBounds(2))) as world:
        await report_load(world, leader, FULL)
        waiting = [start_stream(world, name) for name in ("x", "y")]
        await until(lambda: world.metric("phalanx_router_queued_requests") == 2)
        with pytest.raises(BackendError, match="2 requests are queued already") as caught:
            await start_stream(world, "z")
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
        assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1
        urgent = start_stream(world, "urgent", priority=-1)
        with pytest.raises(BackendError, match="2 requests are queued already"):
            await waiting[1]
        leader.load = ROOM
        await asyncio.gather(waiting[0], urgent)
        assert submitted_ids(leader) == ["urgent", "x"]
        assert world.metric("phalanx_router_shed_total", why="queue_full") == 2


async def test_a_client_that_leaves_gives_up_its_place() -> None:
    leader = FakeLeader("a")
    async with running_world(leader, settings=make_settings(queue=QueueBounds(1))) as world:
        await report_load(world, leader, FULL)
        leaving = start_stream(world, "leaves")
        await until(lambda: world.metric("phalanx_router_queued_requests") == 1)
        leaving.cancel()
        await until(lambda: world.metric("phalanx_router_queued_requests") == 0)
        staying = start_stream(world, "stays")
        await until(lambda: world.metric("phalanx_router_queued_requests") == 1)
        leader.load = ROOM
        assert (await staying).tokens == expected([1, 2, 3], 16)


async def test_replays_go_before_newcomers_and_are_never_shed() -> None:
    dying, full = FakeLeader("a", Script(hold_at=2)), FakeLeader("b")
    async with running_world(dying, full, settings=make_settings(queue=QueueBounds(1))) as world:
        await report_load(world, full, FULL)
        started = start_stream(world, "started")
        await until(lambda: dying.steps == 2)
        await report_load(world, dying, FULL)
        demand = start_stream(world, "new")
        await until(lambda: world.metric("phalanx_router_queued_requests") == 1)
        await dying.stop()
        assert (await started).tokens == expected([1, 2, 3], 16)
        full.load = ROOM
        await demand
        assert submitted_ids(full) == ["started", "new"]
        assert world.metric("phalanx_router_replays_total") == 1


async def test_shedding_refuses_the_least_urgent_bands() -> None:
    leader = FakeLeader("a")
    async with running_world(leader) as world:
        await report_load(world, leader, FULL)
        streams = {name: start_stream(world, name, priority) for name, priority in (("low", 9), ("middle", 5), ("high", 0))}
        await until(lambda: world.metric("phalanx_router_queued_requests") == 3)
        assert world.fleet.dispatcher.shed(1, 7.0, "every group is loaded") == 1
        with pytest.raises(BackendError, match="every group is loaded") as caught:
            await streams.pop("low")
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (429, "overloaded", 7.0)
        leader.load = ROOM
        await asyncio.gather(*streams.values())
        assert submitted_ids(leader) == ["high", "middle"]


async def test_saturated_fleet_refuses_waiting_requests_only() -> None:
    leaders = [FakeLeader("a", Script(hold_at=2)), FakeLeader("b")]
    settings = replace(make_settings(tick_s=0.05), policy=BalancePolicy(ttft_target_s=0.5))
    async with running_world(*leaders, settings=settings) as world:
        started = start_stream(world, "started")
        await until(lambda: leaders[0].steps == 2)
        await asyncio.gather(*(report_load(world, leader, FULL) for leader in leaders))
        with pytest.raises(BackendError, match=r"every group is loaded.* the target is 0\.5 s") as caught:
            await start_stream(world, "new")
        assert (caught.value.status, caught.value.code) == (429, "overloaded")
        assert caught.value.retry_after_s is not None and caught.value.retry_after_s >= 1
        leaders[0].release()
        assert (await started).tokens == expected([1, 2, 3], 16)
        assert world.metric("phalanx_router_shed_total", why="overloaded") == 1


async def test_unstarted_request_is_withdrawn_for_a_better_group() -> None:
    stuck, free = FakeLeader("a", Script(hold_at=0)), FakeLeader("b")
    async with running_world(stuck, free, settings=make_settings(tick_s=0.05)) as world:
        await report_load(world, free, msgspec.structs.replace(FULL, waiting_prompt_tokens=400_000))
        stream = start_stream(world, "request")
        await until(lambda: submitted_ids(stuck) == ["request"])
        stuck.load, free.load = msgspec.structs.replace(FULL, waiting_prompt_tokens=400_000), ROOM
        assert (await stream).tokens == expected([1, 2, 3], 16)
        assert (submitted_ids(free), stuck.aborted) == (["request"], [1])
        assert free.submitted[0].request.epoch == 0
        assert world.metric("phalanx_router_requeues_total") == 1
        assert world.metric("phalanx_router_replays_total") == 0


async def test_waiting_request_in_a_draining_group_is_withdrawn() -> None:
    leaving, free = FakeLeader("a", Script(hold_at=0)), FakeLeader("b")
    settings = replace(make_settings(tick_s=0.05), policy=BalancePolicy(budgets=Budgets(moves_per_group=0)))
    async with running_world(leaving, free, settings=settings) as world:
        await report_load(world, free, msgspec.structs.replace(FULL, waiting_prompt_tokens=400_000))
        stream = start_stream(world, "request")
        await until(lambda: submitted_ids(leaving) == ["request"])
        world.source.change(leaving.endpoint(is_leaving=True), free.endpoint())
        leaving.load, free.load = msgspec.structs.replace(FULL, waiting_prompt_tokens=400_000), ROOM
        assert (await stream).tokens == expected([1, 2, 3], 16)
        assert (submitted_ids(free), leaving.aborted) == (["request"], [1])
        assert world.metric("phalanx_router_requeues_total") == 1


async def test_unplaceable_streams_block_no_started_ones() -> None:
    """An evacuated group takes only started streams."""
    refusing, dying = FakeLeader("a", Script(hold_at=0)), FakeLeader("b", Script(hold_at=0))
    async with running_world(refusing, dying, settings=make_settings(hold_s=60.0)) as world:
        await report_load(world, dying, msgspec.structs.replace(FULL, waiting_prompt_tokens=400_000))
        refused = [start_stream(world, f"refused{number}") for number in range(PER_KIND)]
        await until(lambda: len(refusing.submitted) == PER_KIND)
        await report_load(world, refusing, msgspec.structs.replace(FULL, waiting_prompt_tokens=400_000))
        await report_load(world, dying, ROOM)
        started = start_stream(world, "started")
        await until(lambda: submitted_ids(dying) == ["started"])
        world.source.change(refusing.endpoint(is_leaving=True), dying.endpoint(is_leaving=True))
        for submit in list(refusing.submitted):
            await refusing.send(wire.Refused(handle=submit.handle, epoch=0, status=503, code="draining", message="it is leaving"))
        await until(lambda: world.metric("phalanx_router_queued_requests") == PER_KIND)
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
            await leader.send(served)
        await leaders[1].send(wire.PageChanges(0, [(True, key) for key in keys], is_snapshot=True))
        await until(lambda: world.fleet.links.fleet_view.prefixes.num_keys == 4)
        for number in range(3):
            await read_stream(world.fleet, make_request(prompt, id=f"r{number}"))
        assert [len(leader.submitted) for leader in leaders] == [0, 3]
        assert world.metric("phalanx_router_choices_total", why="home") == 3
        leaders[1].cut()
        await until(lambda: world.fleet.links.fleet_view.prefixes.num_keys == 0)


async def test_old_reports_show_and_stop_nothing() -> None:
    """Two of three groups stop reporting: requests are dispatched by the ledger."""
    leaders = [FakeLeader(name, Script(silent=name != "c", hold_at=0)) for name in "abc"]
    async with running_world(*leaders, settings=make_settings(tick_s=0.02, heartbeat_timeout_s=30)) as world:
        streams = [start_stream(world, f"r{number}") for number in range(6)]
        await until(lambda: world.metric("phalanx_router_groups", state="suspect") == 2)
        before = world.metric("phalanx_router_choices_total", why="ledger")
        streams += [start_stream(world, f"late{number}") for number in range(6)]
        await until(lambda: world.metric("phalanx_router_choices_total", why="ledger") == before + 6)
        for leader in leaders:
            leader.release()
        assert all(received.tokens == expected([1, 2, 3], 16) for received in await asyncio.gather(*streams))


async def test_a_request_that_cannot_be_sent_harms_no_other() -> None:
    leader = FakeLeader("a")
    async with running_world(leader) as world:
        await report_load(world, leader, FULL)
        bad = msgspec.structs.replace(make_request(id="\ud800"), tenant="bad")
        streams = [asyncio.create_task(read_stream(world.fleet, bad)), start_stream(world, "good")]
        await until(lambda: world.metric("phalanx_router_queued_requests") == 2)
        leader.load = ROOM
        with pytest.raises(UnicodeEncodeError):
            await streams[0]
        assert (await streams[1]).tokens == expected([1, 2, 3], 16)
        assert world.metric("phalanx_router_links_lost_total") == 0
        assert world.metric("phalanx_router_queued_requests") == 0
