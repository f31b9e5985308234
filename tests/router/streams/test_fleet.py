"""A stream survives its group: each index once, in order, equal to the undisturbed stream."""

import asyncio
from collections.abc import Callable
from functools import partial

import pytest
from prometheus_client import CollectorRegistry

from phalanx_api import wire
from phalanx_frontend.backend import BackendError, Delta, KeepAlive
from phalanx_router.backend import RouterBackend
from phalanx_router.metrics import RouterMetrics
from phalanx_runtime.core.admission import Limits, Refusal
from phalanx_runtime.core.scheduling.config import make_scheduler
from phalanx_runtime.core.step_plan import PoolShape
from tests.polling import until
from tests.router.fakes import FakeLeader, Script, expected, make_request, make_settings, read_stream, running_world


async def test_streams_continue_elsewhere_when_a_leader_fails() -> None:
    dying, other = FakeLeader("a", Script(die_after=7)), FakeLeader("b")
    async with running_world(dying, other) as world:
        requests = [make_request(prompt=[i, 5, 9], max_tokens=40, id=f"r{i}") for i in range(8)]
        received = await asyncio.gather(*(read_stream(world.fleet, request) for request in requests))
        assert [h.tokens for h in received] == [expected(r.prompt, 40) for r in requests]
        assert {h.finish for h in received} == {"length"}
        assert world.metric("phalanx_router_replays_total") >= 4
        assert world.metric("phalanx_router_requests_total", outcome="finished") == 8
    replayed = [s.request for s in other.submitted if s.request.delivered]
    assert replayed
    assert all(r.epoch == 1 and r.delivered == expected(r.prompt, len(r.delivered)) for r in replayed)


@pytest.mark.parametrize(
    "script",
    [Script(echo=3), Script(stale=True), Script(echo=2, stale=True), Script(skip={3, 9})],
    ids=["every frame thrice", "stale epochs", "both", "lost tokens"],
)
async def test_each_token_comes_once_whatever_a_leader_sends(script: Script) -> None:
    async with running_world(FakeLeader("a", script), FakeLeader("b")) as world:
        received = await read_stream(world.fleet, make_request(max_tokens=20))
        assert received.tokens == expected([1, 2, 3], 20)


@pytest.mark.parametrize(
    "state",
    [wire.State(serving=False, incarnation=1, reason="rank 1 is lost"), wire.State(serving=True, incarnation=2)],
    ids=["stops serving", "new incarnation"],
)
async def test_streams_go_on_when_a_group(state: wire.State) -> None:
    held, other = FakeLeader("a", Script(hold_at=3)), FakeLeader("b", Script(hold_at=0))
    async with running_world(held, other) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=10)))
        await until(lambda: held.steps == 3)
        other.release()
        await held.send(state)
        held.release()
        received = await stream
        assert received.tokens == expected([1, 2, 3], 10)
        await until(lambda: held.aborted == [1])
        replayed = [submit.request for leader in (held, other) for submit in leader.submitted if submit.request.epoch]
        assert [request.delivered for request in replayed] == [expected([1, 2, 3], 3)]


async def test_a_silent_leader_is_lost() -> None:
    silent = FakeLeader("a", Script(silent=True, hold_at=2))
    async with running_world(
        silent, FakeLeader("b", Script()), settings=make_settings(heartbeat_timeout_s=0.2), ready=2
    ) as world:
        received = await read_stream(world.fleet, make_request(max_tokens=10))
        assert received.tokens == expected([1, 2, 3], 10)
        assert world.metric("phalanx_router_links_lost_total") >= 1


async def test_no_ready_group_returns_503_with_retry_after() -> None:
    leader = FakeLeader()
    leader.state = wire.State(serving=False, incarnation=1, reason="loading")
    async with running_world(leader, ready=0) as world:
        with pytest.raises(BackendError) as caught:
            await read_stream(world.fleet, make_request())
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "no_group_ready", 2.0)
        assert world.metric("phalanx_router_requests_total", outcome="failed") == 1


async def test_running_stream_waits_for_its_group() -> None:
    leader = FakeLeader("a", Script(die_after=4))
    async with running_world(leader, settings=make_settings(keep_alive_s=0.05)) as world:
        tokens: list[int] = []
        stopped = started = False
        async for item in world.fleet.generate(make_request(max_tokens=12)):
            if isinstance(item, Delta):
                tokens += item.tokens
            elif stopped and not started:
                await leader.start()
                started = True
            if len(tokens) >= 4 and not stopped:
                await leader.stop()
                leader.script.die_after = None
                stopped = True
        assert tokens == expected([1, 2, 3], 12)


async def test_running_stream_ends_with_a_reason_without_a_group() -> None:
    leader = FakeLeader("a", Script(die_after=4))
    async with running_world(leader, settings=make_settings(patience_s=0.05)) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=12)))
        await until(lambda: leader.steps == 4)
        await leader.stop()
        with pytest.raises(BackendError, match="no group is ready after"):
            await stream


async def test_a_stream_is_replayed_a_bounded_number_of_times() -> None:
    leaders = [FakeLeader(name, Script(die_after=1)) for name in "abcd"]
    async with running_world(*leaders, settings=make_settings(max_replays=1)) as world:
        for leader in leaders:
            leader.script.die_after = 1
            leader.steps = 0
        with pytest.raises(BackendError) as caught:
            await read_stream(world.fleet, make_request(max_tokens=500))
        assert caught.value.code == "too_many_replays"


async def test_fourth_loss_of_a_stream_ends_it() -> None:
    """The cause lies outside of the groups, so the request is not blamed."""
    groups = [FakeLeader(name, Script(hold_at=1)) for name in "abcde"]
    async with running_world(*groups) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        for number, group in enumerate(groups[:4]):
            await until(partial(has_stepped, group))
            await group.send(wire.State(serving=False, incarnation=2, reason=f"its node went, {number}", cause="outside"))
        with pytest.raises(BackendError, match="lost its group 4 times; last: group d: its node went, 3") as caught:
            await stream
        assert (caught.value.status, caught.value.code) == (503, "too_many_replays")
        assert world.metric("phalanx_router_replays_total") == 3
    assert groups[4].submitted == []


def refusing(status: int, code: str, first: int = 10**9) -> Callable[[wire.Submit], wire.Refused | None]:
    """Refuses the first submits."""
    left = iter(range(first))

    def refuse(submit: wire.Submit) -> wire.Refused | None:
        if next(left, None) is None:
            return None
        return wire.Refused(
            handle=submit.handle, epoch=submit.request.epoch, status=status, code=code, message="why", retry_after_s=9.0
        )

    return refuse


def shed(submit: wire.Submit) -> wire.Refused | None:
    """Refusal of an engine with a full queue."""
    answer = make_scheduler(
        Limits(max_model_len=200, max_num_seqs=8, max_num_batched_tokens=64, max_waiting=0), PoolShape(64, 4)
    ).submit(submit.handle, submit.request)
    if not isinstance(answer, Refusal):
        return None
    return wire.Refused(
        handle=submit.handle, epoch=submit.request.epoch, status=answer.status, code=answer.code, message=answer.message
    )


@pytest.mark.parametrize("status", [429, 503])
async def test_another_group_is_tried_when_one_refuses(status: int) -> None:
    full = FakeLeader("a", Script(refuse=refusing(status, "queue_full")))
    async with running_world(full, FakeLeader("b")) as world:
        received = await read_stream(world.fleet, make_request())
        assert received.tokens == expected([1, 2, 3], 16)
        assert len(full.submitted) == 1


async def test_refusal_counts_as_no_loss() -> None:
    leaders = [FakeLeader(name, Script(refuse=shed)) for name in "abc"]
    async with running_world(*leaders) as world:
        with pytest.raises(BackendError) as caught:
            await read_stream(world.fleet, make_request())
        assert (caught.value.status, caught.value.code) == (429, "queue_full")
    assert [(s.request.epoch, s.request.delivered) for leader in leaders for s in leader.submitted] == [(0, [])] * 3


async def test_lost_stream_is_accepted_despite_a_full_queue() -> None:
    dying, full = FakeLeader("a", Script(hold_at=0)), FakeLeader("b", Script(refuse=shed))
    async with running_world(dying, full) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))  # equal loads: it goes to the first
        await until(lambda: len(dying.submitted) == 1)
        await dying.stop()
        assert (await stream).tokens == expected([1, 2, 3], 16)
        assert [s.request.epoch for s in full.submitted] == [1]


@pytest.mark.parametrize(
    ("status", "code", "count"),
    [(429, "queue_full", 2), (503, "draining", 2), (400, "context_length_exceeded", 1)],
    ids=["full", "draining", "too long"],
)
async def test_a_refusal_reaches_the_client(status: int, code: str, count: int) -> None:
    leaders = [FakeLeader(name, Script(refuse=refusing(status, code))) for name in "ab"]
    async with running_world(*leaders) as world:
        with pytest.raises(BackendError) as caught:
            await read_stream(world.fleet, make_request())
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (status, code, 9.0)
        assert sum(len(leader.submitted) for leader in leaders) == count


async def test_a_running_stream_waits_out_refusals() -> None:
    dying, full = FakeLeader("a", Script(die_after=3)), FakeLeader("b", Script(refuse=refusing(429, "queue_full", first=5)))
    async with running_world(dying, full) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=9)))
        await until(lambda: dying.steps >= 3)
        await dying.stop()
        assert (await stream).tokens == expected([1, 2, 3], 9)
        assert len(full.submitted) == 6


async def test_a_running_request_that_is_refused_is_replayed() -> None:
    shed = FakeLeader("a", Script(hold_at=2))
    async with running_world(shed, FakeLeader("b")) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request(max_tokens=9)))
        await until(lambda: shed.steps == 2)
        await shed.send(wire.Refused(handle=shed.submitted[0].handle, epoch=0, status=503, code="preempted", message="no pages"))
        assert (await stream).tokens == expected([1, 2, 3], 9)


async def test_stream_with_its_last_token_needs_no_group() -> None:
    leader = FakeLeader("a", Script(finish=False, die_after=6))
    async with running_world(leader) as world:
        received = await read_stream(world.fleet, make_request(max_tokens=6))
        assert (received.tokens, received.finish) == (expected([1, 2, 3], 6), "length")
        assert len(leader.submitted) == 1


async def test_closing_a_stream_aborts_it_in_the_group() -> None:
    leader = FakeLeader("a", Script(hold_at=2))
    async with running_world(leader) as world:
        stream = world.fleet.generate(make_request())
        first = await anext(stream)
        assert isinstance(first, Delta)
        await stream.aclose()  # type: ignore[attr-defined]
        await until(lambda: leader.aborted == [1])
        assert world.metric("phalanx_router_requests_total", outcome="cancelled") == 1


async def test_silent_stream_gets_keep_alive_comments() -> None:
    leader = FakeLeader("a", Script(hold_at=0))
    async with running_world(leader, settings=make_settings(keep_alive_s=0.01)) as world:
        stream = world.fleet.generate(make_request())
        assert isinstance(await anext(stream), KeepAlive)
        leader.release()
        tokens = [token async for item in stream if isinstance(item, Delta) for token in item.tokens]
        assert tokens == expected([1, 2, 3], 16)


async def test_requests_spread_over_groups_before_any_report() -> None:
    leaders = [FakeLeader(name, Script(hold_at=0, silent=True)) for name in "ab"]
    async with running_world(*leaders) as world:
        streams = [asyncio.create_task(read_stream(world.fleet, make_request(id=f"r{i}"))) for i in range(8)]
        await until(lambda: sum(len(leader.submitted) for leader in leaders) == 8)
        assert [len(leader.submitted) for leader in leaders] == [4, 4]
        for leader in leaders:
            leader.release()
        await asyncio.gather(*streams)


async def test_the_group_that_reports_less_work_is_chosen() -> None:
    busy, idle = FakeLeader("a"), FakeLeader("b")
    busy.load = wire.Load(waiting=0, running=4, outstanding_tokens=5000, free_pages=0, total_pages=10)
    async with running_world(busy, idle) as world:
        while not idle.submitted:  # the first report may still be on its way
            await read_stream(world.fleet, make_request())
        before = len(busy.submitted)
        for _ in range(5):
            await read_stream(world.fleet, make_request())
        assert (len(busy.submitted), len(idle.submitted)) == (before, 6)


async def test_leaving_leader_keeps_streams_and_gets_no_requests() -> None:
    leaving, staying = FakeLeader("a", Script(hold_at=1)), FakeLeader("b")
    async with running_world(leaving, staying) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request(id="old")))
        await until(lambda: leaving.steps == 1)
        world.source.change(leaving.endpoint(is_leaving=True), staying.endpoint())
        await read_stream(world.fleet, make_request(id="new"))
        leaving.release()
        assert (await stream).tokens == expected([1, 2, 3], 16)
        assert [s.request.id for s in leaving.submitted] == ["old"]


LEAVING = wire.State(serving=False, incarnation=1, reason="the pod is stopping", draining=True)


async def test_draining_group_keeps_streams_and_gets_no_requests() -> None:
    draining, other = FakeLeader("a", Script(hold_at=1)), FakeLeader("b")
    async with running_world(draining, other) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request(id="old")))
        await until(lambda: draining.steps == 1)
        await draining.send(LEAVING)
        await world.until_ready(1)
        await read_stream(world.fleet, make_request(id="new"))
        draining.release()
        assert (await stream).tokens == expected([1, 2, 3], 16)
        assert [s.request.id for s in draining.submitted] == ["old"]
        assert [s.request.id for s in other.submitted] == ["new"]
        assert draining.aborted == []


async def test_stream_finishes_in_the_only_group_while_it_drains() -> None:
    draining = FakeLeader("a", Script(hold_at=1))
    async with running_world(draining) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        await until(lambda: draining.steps == 1)
        await draining.send(LEAVING)
        await world.until_ready(0)
        with pytest.raises(BackendError, match="no group is ready"):
            await read_stream(world.fleet, make_request(id="new"))
        draining.release()
        assert (await stream).tokens == expected([1, 2, 3], 16)


@pytest.mark.parametrize(
    "end",
    [
        wire.State(serving=False, incarnation=1, reason="failed"),
        wire.State(serving=False, incarnation=2, reason="rank 1 died"),
        wire.State(serving=False, incarnation=2, reason="?", draining=True),
    ],
)
async def test_streams_go_on_elsewhere_when_draining_ends_before_them(end: wire.State) -> None:
    draining, other = FakeLeader("a", Script(hold_at=1)), FakeLeader("b")
    async with running_world(draining, other) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        await until(lambda: draining.steps == 1)
        await draining.send(LEAVING)
        await world.until_ready(1)
        assert not other.submitted
        await draining.send(end)
        assert (await stream).tokens == expected([1, 2, 3], 16)
        assert [s.request.delivered for s in other.submitted] == [expected([1, 2, 3], 1)]


def has_stepped(leader: FakeLeader) -> bool:
    return leader.steps > 0


@pytest.mark.parametrize(
    ("max_replays", "max_departures", "ends"),
    [(0, 32, None), (0, 3, None), (0, 2, "too_many_moves")],
    ids=["leaves are no losses", "as many moves as allowed", "one more"],
)
async def test_stream_of_cleanly_leaving_groups_loses_none(max_replays: int, max_departures: int, ends: str | None) -> None:
    """Three groups drain and stop one after the other; the fourth finishes."""
    leaders = [FakeLeader(name, Script(hold_at=1)) for name in "abc"] + [FakeLeader("d")]
    async with running_world(*leaders, settings=make_settings(max_replays=max_replays, max_departures=max_departures)) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        for count, leader in enumerate(leaders[:3], 1):
            await until(partial(has_stepped, leader))
            await leader.send(LEAVING)
            await world.until_ready(4 - count)
            await leader.send(wire.State(serving=False, incarnation=1, reason="the pod is stopping"))
        if ends is None:
            assert (await stream).tokens == expected([1, 2, 3], 16)
        else:
            with pytest.raises(BackendError, match="moved 3 times; last: group c: the pod is stopping") as caught:
                await stream
            assert caught.value.code == ends
        assert world.metric("phalanx_router_replays_total") == (3 if ends is None else 2)


async def test_drained_leader_that_closed_its_link_left_cleanly() -> None:
    leader, other = FakeLeader("a", Script(hold_at=1)), FakeLeader("b")
    async with running_world(leader, other, settings=make_settings(max_replays=0)) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        await until(lambda: leader.steps == 1)
        await leader.send(LEAVING)
        await world.until_ready(1)
        await leader.close()
        assert (await stream).tokens == expected([1, 2, 3], 16)


@pytest.mark.parametrize("end", ["cut", "new incarnation"])
async def test_group_failure_while_draining_is_a_loss(end: str) -> None:
    leader, other = FakeLeader("a", Script(hold_at=1)), FakeLeader("b")
    async with running_world(leader, other, settings=make_settings(max_replays=0)) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        await until(lambda: leader.steps == 1)
        await leader.send(LEAVING)
        await world.until_ready(1)
        if end == "cut":
            leader.cut()
        else:
            await leader.send(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
        with pytest.raises(BackendError) as caught:
            await stream
        assert caught.value.code == "too_many_replays"


async def test_streams_leave_a_leader_that_left_the_list() -> None:
    lost, other = FakeLeader("a", Script(hold_at=1)), FakeLeader("b")
    async with running_world(lost, other) as world:
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        await until(lambda: lost.steps == 1)
        world.source.change(other.endpoint())
        assert (await stream).tokens == expected([1, 2, 3], 16)
        assert world.metric("phalanx_router_groups_known") == 1


async def test_ready_means_that_leaders_were_listed() -> None:
    assert (
        RouterBackend(make_settings(), RouterMetrics(CollectorRegistry())).not_ready() == "the router has no list of leaders yet"
    )
    async with running_world() as world:
        await until(lambda: world.fleet.not_ready() is None)
        world.fleet.is_draining = True
        assert world.fleet.not_ready() == "the router is shutting down"
