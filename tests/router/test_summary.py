"""The operator's summaries over HTTP."""

import asyncio
import socket
from dataclasses import replace

import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from phalanx_api import wire
from phalanx_api.cache_curve import CacheCurve, CacheUse, TierCurve
from phalanx_api.speculation import SpeculationCounts
from phalanx_api.summary import SUMMARY_PATH, BalancePolicy, Budgets, RouterSummary, SummaryRequest
from phalanx_frontend.auth.service_token import ServiceToken
from phalanx_kubectl.gauges import read_router
from phalanx_router.operator_endpoint import MAX_WAIT_S, OperatorEndpoint
from phalanx_router.summary import UrgentState
from tests.control.summaries import summary
from tests.polling import until
from tests.router.fakes import TOKEN, FakeLeader, Script, expected, make_request, read_stream
from tests.router.polled_routers import PolledRouter, polled_router

HOT = wire.Load(
    waiting=1,
    running=4,
    outstanding_tokens=4000,
    free_pages=5,
    total_pages=100,
    context_tokens=1500,
    mean_output_tokens=200.0,
    waiting_prompt_tokens=300,
)


async def test_summary_contains_groups_traffic_and_latencies() -> None:
    busy = FakeLeader("b", Script(hold_at=3))
    busy.load = HOT
    async with polled_router(FakeLeader("a"), busy) as router:
        await until(lambda: all(link.group_report.load for link in router.fleet.links.all()))
        assert (await read_stream(router.fleet, make_request(max_tokens=8))).tokens == expected([1, 2, 3], 8)
        answer = await router.poll()
        assert answer.router == "router-0" and answer.policy == 0
        groups = {group.group: group for group in answer.groups}
        assert (groups["a"].state, groups["a"].running, groups["a"].streams) == ("fresh", 0, 0)
        assert (groups["b"].pressure, groups["b"].live_tokens, groups["b"].waiting) == (0.95, 1500, 1)
        assert groups["b"].backlog_s > 0 and groups["b"].page_size == 16 and groups["b"].incarnation == 1
        assert [traffic.arrivals for traffic in answer.traffic] == [1, 1, 1]
        assert answer.traffic[1].prompt == 3 and answer.traffic[1].output == 8
        assert sum(answer.ttft.counts) == 1 and sum(answer.itl.counts) <= 7, "the first tokens may come together"
        assert answer.queued == answer.held == 0 and answer.idle_s < 5


async def test_group_failures_are_sent_at_once_and_kept() -> None:
    leader = FakeLeader("a")
    async with polled_router(leader) as router:
        await router.poll()
        polling = asyncio.create_task(router.poll(wait_s=9.0))
        await leader.send(
            wire.State(serving=False, incarnation=2, reason="loading the model", deaths=1, death="pod 0: rank 0 ended")
        )
        answer = (await asyncio.wait_for(polling, 5)).groups[0]
        assert (answer.incarnation, answer.deaths, answer.death) == (2, 1, "pod 0: rank 0 ended")
        leader.cut()
        await until(lambda: not router.fleet.links.all()[0].is_open)
        assert [(group.deaths, group.state) for group in (await router.poll()).groups] == [(1, "dead")]


async def test_blamed_failures_are_sent_at_once() -> None:
    leader = FakeLeader("a")
    async with polled_router(leader) as router:
        assert [group.excused for group in (await router.poll()).groups] == [0]
        polling = asyncio.create_task(router.poll(wait_s=9.0))
        await asyncio.sleep(0)
        router.fleet.excused[leader.endpoint().key] += 1
        assert [group.excused for group in (await asyncio.wait_for(polling, 5)).groups] == [1]


async def test_metrics_show_each_group_as_the_plugin_reads_it() -> None:
    busy = FakeLeader("b", Script(hold_at=3))
    busy.load = HOT
    async with polled_router(FakeLeader("a"), busy) as router:
        await until(lambda: all(link.group_report.load for link in router.fleet.links.all()))
        read = read_router((await router.http.get("/metrics")).text)
        answer = {group.group: group for group in (await router.poll()).groups}
    assert set(read.groups) == {"a", "b"}
    assert read.groups["b"].waiting == answer["b"].waiting == 1 and read.groups["b"].incarnation == 1
    assert read.groups["b"].kv == min(1500 / (answer["b"].total_pages * 16), 1.0) > read.groups["a"].kv == 0.0


WRONG = {
    "another token": (b"{}", "wrong", 401),
    "a client's key": (msgspec.json.encode(SummaryRequest(BalancePolicy())), "sk-alice", 401),
    "no JSON": (b"policy", TOKEN, 400),
    "another shape": (b'{"policy": {"mode": "Sideways"}}', TOKEN, 400),
    "too long": (b" " * (1 << 20) + b"{}", TOKEN, 413),
}


@pytest.mark.parametrize(("content", "token", "status"), WRONG.values(), ids=WRONG.keys())
async def test_invalid_poll_is_answered(content: bytes, token: str, status: int) -> None:
    async with polled_router(FakeLeader()) as router:
        response = await router.post(content, token)
        assert response.status_code == status and response.json()["error"]["message"]
        assert response.json()["error"]["code"] == {401: "invalid_token", 413: "request_too_large"}.get(status)


async def test_other_paths_and_methods_are_as_before() -> None:
    async with polled_router(FakeLeader()) as router:
        known = {"authorization": f"Bearer {TOKEN}"}
        assert (await router.http.get(SUMMARY_PATH, headers=known)).status_code == 405
        assert (await router.http.get("/healthz")).status_code == 200
        assert (await router.http.get("/v1/models", headers=known)).status_code == 401, "the service token is no API key"


async def test_newest_policy_is_applied() -> None:
    async with polled_router(FakeLeader("a"), FakeLeader("b")) as router:
        second = BalancePolicy(
            number=2, mode="Route", routers=3, budgets=Budgets(2, 1e6, 0.01), ttft_target_s=1.0, itl_target_s=0.05, evacuate=["b"]
        )
        answer = await router.poll(policy=second)
        assert answer.policy == 2 and answer.evacuated == ["b"]
        assert {group.group: group.draining for group in answer.groups} == {"a": False, "b": True}
        assert (await router.poll(policy=BalancePolicy(number=1))).policy == 2
        assert router.fleet.balancing.policy == second


async def start_poll(router: PolledRouter, policy: BalancePolicy | None = None) -> asyncio.Task[RouterSummary]:
    """A long poll that is waiting."""
    while True:
        await router.poll(policy=policy)
        task = asyncio.create_task(router.poll(30.0, policy))
        done, _ = await asyncio.wait([task], timeout=0.2)
        if not done:
            return task


async def test_poll_waits_until_there_is_a_hotspot() -> None:
    async with polled_router(FakeLeader("a"), FakeLeader("b")) as router:
        polling = await start_poll(router)
        router.leaders[0].load = HOT
        answer = await polling
        assert [(spot.group, spot.cause, spot.action) for spot in answer.hotspots] == [("a", "kv", "migrate")]
        polling = await start_poll(router)
        router.leaders[0].load = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=10, total_pages=10)
        assert (await polling).hotspots == []


async def test_poll_waits_until_the_fleet_is_saturated() -> None:
    async with polled_router(FakeLeader("a"), FakeLeader("b")) as router:
        polling = await start_poll(router)
        for leader in router.leaders:
            leader.load = HOT
        assert (await polling).fleet_saturated


async def test_a_silent_group_with_awaited_weights_is_not_empty() -> None:
    """A stream whose tokens it computed waits for its return."""
    async with polled_router(FakeLeader("a", Script(hold_at=3))) as router:
        (leader,), fleet = router.leaders, router.fleet
        stream = asyncio.create_task(read_stream(fleet, make_request(max_tokens=8)))
        await until(lambda: [len(session.stream.journal.delivered) for session in fleet.sessions] == [3])
        policy = BalancePolicy(number=1, evacuate=["a"], without_successor=["a"], wanted=True)
        await router.poll(policy=policy)
        await leader.stop()
        await until(lambda: all(session.is_waiting for session in fleet.sessions))
        assert (await router.poll(policy=policy)).evacuated == []
        leader.release()
        await leader.start()
        assert (await stream).tokens == expected([1, 2, 3], 8)
        assert (await router.poll(policy=policy)).evacuated == ["a"]


async def test_poll_waits_until_a_group_is_empty() -> None:
    async with polled_router(FakeLeader("a", Script(hold_at=3))) as router:
        stream = asyncio.create_task(read_stream(router.fleet, make_request(max_tokens=8)))
        await until(lambda: bool(router.leaders[0].submitted))
        policy = BalancePolicy(number=1, evacuate=["a"])
        answer = await router.poll(policy=policy)
        assert answer.evacuated == [] and answer.groups[0].streams == 1
        polling = await start_poll(router, policy)
        router.leaders[0].release()
        assert (await polling).evacuated == ["a"]
        await stream


async def test_poll_waits_until_a_request_is_held() -> None:
    async with polled_router(FakeLeader("a", Script(hold_at=3))) as router:
        stream = asyncio.create_task(read_stream(router.fleet, make_request(max_tokens=8)))
        await until(lambda: router.leaders[0].steps == 3)
        polling = await start_poll(router)
        await router.leaders[0].send(wire.State(serving=False, incarnation=1, reason="loading"))
        answer = await polling
        assert (answer.held, answer.queued, answer.queued_tokens) == (1, 1, 6)
        assert [group.state for group in answer.groups] == ["dead"]
        await router.leaders[0].send(wire.State(serving=True, incarnation=2))
        router.leaders[0].release()
        assert (await stream).tokens == expected([1, 2, 3], 8)


async def test_poll_waits_until_a_group_connects_or_is_lost() -> None:
    async with polled_router(FakeLeader("a"), FakeLeader("b")) as router:
        polling = await start_poll(router)
        await router.leaders[1].stop()
        assert {group.group: group.state for group in (await polling).groups} == {"a": "fresh", "b": "dead"}
        polling = await start_poll(router)
        await router.leaders[1].start()
        assert {group.group: group.state for group in (await polling).groups} == {"a": "fresh", "b": "fresh"}


async def test_abandoned_poll_leaves_the_next_one_complete() -> None:
    """Its handler runs until its timeout and may detect the change first."""
    now = [UrgentState(hotspots=frozenset(), is_saturated=False, has_held=False, evacuated=frozenset(), is_leaving=False)]
    endpoint = OperatorEndpoint(ServiceToken([TOKEN]), lambda policy: None, summary, lambda: now[0])

    async def poll(wait_s: float) -> Response:
        async def receive() -> Message:
            return {"type": "http.request", "body": msgspec.json.encode(SummaryRequest(BalancePolicy(), wait_s))}

        headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
        return await endpoint.answer(Request({"type": "http", "method": "POST", "headers": headers}, receive))

    await poll(0.0)
    given_up, polling = asyncio.create_task(poll(0.1)), asyncio.create_task(poll(30.0))
    for _ in range(20):
        await asyncio.sleep(0)  # both wait
    now[0] = replace(now[0], is_leaving=True)
    async with asyncio.timeout(10):
        await asyncio.gather(given_up, polling)


async def test_explanation_expires_without_polls() -> None:
    now, state = (
        [0.0],
        UrgentState(hotspots=frozenset(), is_saturated=False, has_held=False, evacuated=frozenset(), is_leaving=False),
    )
    endpoint = OperatorEndpoint(ServiceToken([TOKEN]), lambda policy: None, summary, lambda: state, lambda: now[0])

    async def receive() -> Message:
        poll = SummaryRequest(BalancePolicy(), 0.0, explanation=["2 groups"])
        return {"type": "http.request", "body": msgspec.json.encode(poll)}

    assert endpoint.explanation() == []
    headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
    await endpoint.answer(Request({"type": "http", "method": "POST", "headers": headers}, receive))
    assert endpoint.explanation() == ["2 groups"]
    now[0] = 2 * MAX_WAIT_S
    assert endpoint.explanation() == []


async def test_poll_ends_after_its_time_or_on_termination() -> None:
    async with polled_router(FakeLeader()) as router:
        await router.poll()
        assert (await router.poll(0.05)).router == "router-0"
        polling = await start_poll(router)
        router.fleet.is_draining = True
        await polling


async def test_unread_answer_does_no_harm() -> None:
    async with polled_router(FakeLeader()) as router:
        await router.poll()
        body = msgspec.json.encode(SummaryRequest(BalancePolicy(), 5.0))
        host, port = router.http.base_url.host, router.http.base_url.port
        with socket.create_connection((host, port)) as connection:
            head = (
                f"POST {SUMMARY_PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
        assert (await router.poll(0.1)).router == "router-0"


async def test_poll_waits_until_a_group_loses_its_draft() -> None:
    async with polled_router(FakeLeader("a"), FakeLeader("b")) as router:
        polling = await start_poll(router)
        router.leaders[1].load = wire.Load(
            waiting=0,
            running=0,
            outstanding_tokens=0,
            free_pages=10,
            total_pages=10,
            speculation=SpeculationCounts(draft_failure="no tensors" * 50),
        )
        answer = {group.group: group.draft_lost for group in (await polling).groups}
        assert answer["a"] == "" and answer["b"] == ("no tensors" * 50)[:300]


async def test_poll_waits_until_a_device_has_a_problem() -> None:
    problem = wire.DeviceProblem(kind="fault", pod=1, device=3, xid=79, message="Xid 79")
    async with polled_router(FakeLeader("a"), FakeLeader("b")) as router:
        polling = await start_poll(router)
        await router.leaders[1].send(wire.State(serving=True, incarnation=1, devices=[problem]))
        assert {group.group: group.devices for group in (await polling).groups} == {"a": [], "b": [problem]}


async def test_summary_contains_the_use_of_the_devices() -> None:
    async with polled_router(FakeLeader("a")) as router:
        polling = await start_poll(router)
        load = wire.Load(waiting=0, running=1, outstanding_tokens=9, free_pages=10, total_pages=10)
        load = msgspec.structs.replace(load, device_busy=0.9, bandwidth_utilization=0.8, flop_utilization=0.1)
        router.leaders[0].load = load
        problem = wire.DeviceProblem(kind="throttled", pod=0, device=0)
        await until(lambda: router.leaders[0].load is load)
        await router.leaders[0].send(load)
        await router.leaders[0].send(wire.State(serving=True, incarnation=1, devices=[problem]))
        (group,) = (await polling).groups
        assert (group.device_busy, group.bandwidth_utilization, group.flop_utilization) == (0.9, 0.8, 0.1)


async def test_live_tokens_are_in_pages() -> None:
    """Requests with windows have more tokens than their pages."""
    leader = FakeLeader("a")
    leader.load = msgspec.structs.replace(HOT, max_request_pages=5)
    async with polled_router(leader) as router:
        await until(lambda: all(link.group_report.load for link in router.fleet.links.all()))
        (group,) = (await router.poll()).groups
        assert (group.live_tokens, group.max_request_pages) == (4 * 5 * 16, 5)


async def test_summary_contains_the_curve_of_a_group() -> None:
    leader, curve = FakeLeader("a"), CacheCurve(100, [0.25, 0.5, 0.75, 1.0], TierCurve(64, [0.5, 0.6, 0.7, 0.8], 0.6))
    leader.state = wire.State(serving=True, incarnation=1, served=wire.Served("hash", "layout", 1000))
    leader.load = msgspec.structs.replace(leader.load, cache_curve=curve, cache_use=CacheUse(residency_s=12.5))
    async with polled_router(leader) as router:

        async def is_reported() -> bool:
            (group,) = (await router.poll()).groups
            return (group.cache_curve, group.page_bytes) == (curve, 1000)

        await until(is_reported)
        page = (await router.http.get("/metrics")).text
    assert 'phalanx_router_group_cache_hit_rate_twice{group="a"} 0.75' in page
    assert 'phalanx_router_group_cache_lookups{group="a"} 100.0' in page
    assert 'phalanx_router_group_cache_hit_rate_host{group="a"} 0.6' in page
    assert 'phalanx_router_group_cache_residency_seconds{group="a"} 12.5' in page
    assert 'phalanx_router_group_cache_host_pages{group="a"} 64.0' in page
    assert 'phalanx_router_group_cache_host_hit_rate_twice{group="a"} 0.7' in page
    assert "phalanx_router_group_cache_hit_rate_disk{" not in page, "no disk"


async def test_summary_contains_the_model_version_of_a_group() -> None:
    leader = FakeLeader("a")
    async with polled_router(leader) as router:
        assert (await router.poll()).groups[0].model_version == ""
        await leader.send(wire.State(serving=True, incarnation=1, served=wire.Served("hash", "layout", 1000, "c0ffee")))

        async def is_reported() -> bool:
            return (await router.poll()).groups[0].model_version == "c0ffee"

        await until(is_reported)
