"""What the operator hears of a router, and when, over HTTP."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import httpx
import msgspec
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.types import Message

from phalanx_api import wire
from phalanx_api.speculation import SpeculationCounts
from phalanx_api.summary import SUMMARY_PATH, Asked, BalancePolicy, Budgets, RouterSummary
from phalanx_frontend.auth.api_keys import ApiKey
from phalanx_kubectl.gauges import read_router
from phalanx_router.app import make_router
from phalanx_router.backend import RouterBackend
from phalanx_router.operator_endpoint import OperatorEndpoint
from phalanx_router.summary import UrgentChange
from tests.control.summaries import summary
from tests.router.api_servers import http_server
from tests.router.fakes import TOKEN, FakeLeader, Leaders, Script, expected, hear, make_request, make_settings

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
KEYS = (ApiKey("alice", "sk-alice"),)


class Router:
    """A router over fake leaders, as the operator sees it."""

    def __init__(self, http: httpx.AsyncClient, fleet: RouterBackend, leaders: list[FakeLeader]) -> None:
        self.http = http
        self.fleet = fleet
        self.leaders = leaders

    async def post(self, content: bytes, token: str = TOKEN) -> httpx.Response:
        return await self.http.post(SUMMARY_PATH, content=content, headers={"authorization": f"Bearer {token}"})

    async def ask(self, wait_s: float = 0.0, policy: BalancePolicy | None = None) -> RouterSummary:
        response = await self.post(msgspec.json.encode(Asked(policy or BalancePolicy(), wait_s)))
        assert response.status_code == 200, response.text
        return msgspec.json.decode(response.content, type=RouterSummary)

    async def until_ready(self, count: int) -> None:
        async with asyncio.timeout(10):
            while self.fleet.links.num_ready != count:
                await asyncio.sleep(0.002)


@asynccontextmanager
async def running_router(*leaders: FakeLeader, ready: int | None = None) -> AsyncIterator[Router]:
    for leader in leaders:
        await leader.start()
    try:
        app, fleet = make_router(make_settings(tick_s=0.05), Leaders(*(leader.endpoint() for leader in leaders)), keys=KEYS)
        async with http_server(app) as address:
            async with httpx.AsyncClient(base_url=f"http://{address}", trust_env=False, timeout=10) as http:
                router = Router(http, fleet, list(leaders))
                await router.until_ready(len(leaders) if ready is None else ready)
                yield router
    finally:
        for leader in leaders:
            await leader.stop()


async def test_summary_contains_groups_traffic_and_latencies() -> None:
    busy = FakeLeader("b", Script(hold_at=3))
    busy.load = HOT
    async with running_router(FakeLeader("a"), busy) as router:
        while not all(link.group_report.load for link in router.fleet.links.all()):
            await asyncio.sleep(0.002)
        assert (await hear(router.fleet, make_request(max_tokens=8))).tokens == expected([1, 2, 3], 8)
        told = await router.ask()
        assert told.router == "router-0" and told.policy == 0
        groups = {group.group: group for group in told.groups}
        assert (groups["a"].state, groups["a"].running, groups["a"].streams) == ("fresh", 0, 0)
        assert (groups["b"].pressure, groups["b"].live_tokens, groups["b"].waiting) == (0.95, 1500, 1)
        assert groups["b"].backlog_s > 0 and groups["b"].page_size == 16 and groups["b"].incarnation == 1
        assert [traffic.arrivals for traffic in told.traffic] == [1, 1, 1]
        assert told.traffic[1].prompt == 3 and told.traffic[1].output == 8
        assert sum(told.ttft.counts) == 1 and sum(told.itl.counts) <= 7, "the first tokens may come together"
        assert told.queued == told.held == 0 and told.idle_s < 5


async def test_group_failures_are_sent_at_once_and_kept() -> None:
    leader = FakeLeader("a")
    async with running_router(leader) as router:
        await router.ask()
        asked = asyncio.create_task(router.ask(wait_s=9.0))
        await leader.tell(
            wire.State(serving=False, incarnation=2, reason="loading the model", deaths=1, death="pod 0: rank 0 ended")
        )
        told = (await asyncio.wait_for(asked, 5)).groups[0]
        assert (told.incarnation, told.deaths, told.death) == (2, 1, "pod 0: rank 0 ended")
        leader.cut()
        while router.fleet.links.all()[0].is_open:
            await asyncio.sleep(0.002)
        assert [(group.deaths, group.state) for group in (await router.ask()).groups] == [(1, "dead")]


async def test_blamed_failures_are_sent_at_once() -> None:
    leader = FakeLeader("a")
    async with running_router(leader) as router:
        assert [group.excused for group in (await router.ask()).groups] == [0]
        asked = asyncio.create_task(router.ask(wait_s=9.0))
        await asyncio.sleep(0)
        router.fleet.excused[leader.endpoint().key] += 1
        assert [group.excused for group in (await asyncio.wait_for(asked, 5)).groups] == [1]


async def test_metrics_show_each_group_as_the_plugin_reads_it() -> None:
    busy = FakeLeader("b", Script(hold_at=3))
    busy.load = HOT
    async with running_router(FakeLeader("a"), busy) as router:
        while not all(link.group_report.load for link in router.fleet.links.all()):
            await asyncio.sleep(0.002)
        read = read_router((await router.http.get("/metrics")).text)
        told = {group.group: group for group in (await router.ask()).groups}
    assert set(read.groups) == {"a", "b"}
    assert read.groups["b"].waiting == told["b"].waiting == 1 and read.groups["b"].incarnation == 1
    assert read.groups["b"].kv == min(1500 / (told["b"].total_pages * 16), 1.0) > read.groups["a"].kv == 0.0


WRONG = {
    "another token": (b"{}", "nobody", 401),
    "a client's key": (msgspec.json.encode(Asked(BalancePolicy())), "sk-alice", 401),
    "no JSON": (b"policy", TOKEN, 400),
    "another shape": (b'{"policy": {"mode": "Sideways"}}', TOKEN, 400),
    "too long": (b" " * (1 << 20) + b"{}", TOKEN, 413),
}


@pytest.mark.parametrize(("content", "token", "status"), WRONG.values(), ids=WRONG.keys())
async def test_a_wrong_question_is_answered(content: bytes, token: str, status: int) -> None:
    async with running_router(FakeLeader()) as router:
        response = await router.post(content, token)
        assert response.status_code == status and response.json()["error"]["message"]


async def test_other_paths_and_methods_are_as_before() -> None:
    async with running_router(FakeLeader()) as router:
        known = {"authorization": f"Bearer {TOKEN}"}
        assert (await router.http.get(SUMMARY_PATH, headers=known)).status_code == 405
        assert (await router.http.get("/healthz")).status_code == 200
        assert (await router.http.get("/v1/models", headers=known)).status_code == 401, "the service token is no API key"


async def test_newest_policy_is_applied() -> None:
    async with running_router(FakeLeader("a"), FakeLeader("b")) as router:
        second = BalancePolicy(
            number=2, mode="Route", routers=3, budgets=Budgets(2, 1e6, 0.01), ttft_target_s=1.0, itl_target_s=0.05, empty=["b"]
        )
        told = await router.ask(policy=second)
        assert told.policy == 2 and told.emptied == ["b"]
        assert {group.group: group.draining for group in told.groups} == {"a": False, "b": True}
        assert (await router.ask(policy=BalancePolicy(number=1))).policy == 2
        assert router.fleet.balancing.policy == second


async def ask_later(router: Router, policy: BalancePolicy | None = None) -> asyncio.Task[RouterSummary]:
    """A question that waits for something to tell, once it does wait."""
    while True:
        await router.ask(policy=policy)
        task = asyncio.create_task(router.ask(30.0, policy))
        done, _ = await asyncio.wait([task], timeout=0.2)
        if not done:
            return task


async def test_a_question_waits_until_there_is_a_hotspot() -> None:
    async with running_router(FakeLeader("a"), FakeLeader("b")) as router:
        asked = await ask_later(router)
        router.leaders[0].load = HOT
        told = await asked
        assert [(spot.group, spot.cause, spot.action) for spot in told.hotspots] == [("a", "kv", "migrate")]
        asked = await ask_later(router)
        router.leaders[0].load = wire.Load(waiting=0, running=0, outstanding_tokens=0, free_pages=10, total_pages=10)
        assert (await asked).hotspots == []


async def test_a_question_waits_until_the_fleet_is_saturated() -> None:
    async with running_router(FakeLeader("a"), FakeLeader("b")) as router:
        asked = await ask_later(router)
        for leader in router.leaders:
            leader.load = HOT
        assert (await asked).fleet_saturated


async def test_a_question_waits_until_a_group_is_empty() -> None:
    async with running_router(FakeLeader("a", Script(hold_at=3))) as router:
        stream = asyncio.create_task(hear(router.fleet, make_request(max_tokens=8)))
        await router.leaders[0].until(lambda: bool(router.leaders[0].submitted))
        policy = BalancePolicy(number=1, empty=["a"])
        told = await router.ask(policy=policy)
        assert told.emptied == [] and told.groups[0].streams == 1
        asked = await ask_later(router, policy)
        router.leaders[0].release()
        assert (await asked).emptied == ["a"]
        await stream


async def test_a_question_waits_until_a_request_is_held() -> None:
    async with running_router(FakeLeader("a", Script(hold_at=3))) as router:
        stream = asyncio.create_task(hear(router.fleet, make_request(max_tokens=8)))
        await router.leaders[0].until(lambda: router.leaders[0].steps == 3)
        asked = await ask_later(router)
        await router.leaders[0].tell(wire.State(serving=False, incarnation=1, reason="loading"))
        told = await asked
        assert (told.held, told.queued, told.queued_tokens) == (1, 1, 6)
        assert [group.state for group in told.groups] == ["dead"]
        await router.leaders[0].tell(wire.State(serving=True, incarnation=2))
        router.leaders[0].release()
        assert (await stream).tokens == expected([1, 2, 3], 8)


async def test_poll_waits_until_a_group_connects_or_is_lost() -> None:
    async with running_router(FakeLeader("a"), FakeLeader("b")) as router:
        asked = await ask_later(router)
        await router.leaders[1].stop()
        assert {group.group: group.state for group in (await asked).groups} == {"a": "fresh", "b": "dead"}
        asked = await ask_later(router)
        await router.leaders[1].start()
        assert {group.group: group.state for group in (await asked).groups} == {"a": "fresh", "b": "fresh"}


async def test_abandoned_poll_leaves_the_next_one_complete() -> None:
    """Its handler goes on until its time is over, and may be the first to see what has changed."""
    now = [UrgentChange(hotspots=frozenset(), is_saturated=False, has_held=False, emptied=frozenset(), is_leaving=False)]
    door = OperatorEndpoint(TOKEN, lambda policy: None, summary, lambda: now[0])

    async def ask(wait_s: float) -> Response:
        async def receive() -> Message:
            return {"type": "http.request", "body": msgspec.json.encode(Asked(BalancePolicy(), wait_s))}

        headers = [(b"authorization", f"Bearer {TOKEN}".encode())]
        return await door.answer(Request({"type": "http", "method": "POST", "headers": headers}, receive))

    await ask(0.0)
    given_up, asked = asyncio.create_task(ask(0.1)), asyncio.create_task(ask(30.0))
    for _ in range(20):
        await asyncio.sleep(0)  # both wait
    now[0] = replace(now[0], is_leaving=True)
    async with asyncio.timeout(10):
        await asyncio.gather(given_up, asked)


async def test_poll_ends_after_its_time_or_on_termination() -> None:
    async with running_router(FakeLeader()) as router:
        await router.ask()
        assert (await router.ask(0.05)).router == "router-0"
        asked = await ask_later(router)
        router.fleet.draining = True
        await asked


async def test_unread_answer_does_no_harm() -> None:
    async with running_router(FakeLeader()) as router:
        await router.ask()
        body = msgspec.json.encode(Asked(BalancePolicy(), 5.0))
        host, port = router.http.base_url.host, router.http.base_url.port
        with socket.create_connection((host, port)) as connection:
            head = (
                f"POST {SUMMARY_PATH} HTTP/1.1\r\nhost: x\r\nauthorization: Bearer {TOKEN}\r\ncontent-length: {len(body)}\r\n\r\n"
            )
            connection.sendall(head.encode() + body)
        assert (await router.ask(0.1)).router == "router-0"


async def test_poll_waits_until_a_group_loses_its_draft() -> None:
    async with running_router(FakeLeader("a"), FakeLeader("b")) as router:
        asked = await ask_later(router)
        router.leaders[1].load = wire.Load(
            waiting=0,
            running=0,
            outstanding_tokens=0,
            free_pages=10,
            total_pages=10,
            speculation=SpeculationCounts(lost="no tensors" * 50),
        )
        told = {group.group: group.draft_lost for group in (await asked).groups}
        assert told["a"] == "" and told["b"] == ("no tensors" * 50)[:300]


async def test_summary_contains_the_model_version_of_a_group() -> None:
    leader = FakeLeader("a")
    async with running_router(leader) as router, asyncio.timeout(10):
        assert (await router.ask()).groups[0].model_version == ""
        await leader.tell(wire.State(serving=True, incarnation=1, served=wire.Served("hash", "layout", 1000, "c0ffee")))
        while (await router.ask()).groups[0].model_version != "c0ffee":
            await asyncio.sleep(0.005)
