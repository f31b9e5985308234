"""Requests while a service has no group: held, with comments for streams, then served or refused."""

import asyncio
import dataclasses
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import httpx
import pytest
from fastapi import FastAPI
from prometheus_client import CollectorRegistry

from phalanx_api import wire
from phalanx_api.summary import BalancePolicy
from phalanx_frontend.backend import BackendError
from phalanx_router.app import make_router
from phalanx_router.backend import RouterBackend
from phalanx_router.metrics import RouterMetrics
from phalanx_router.migration import balance_loop
from phalanx_router.session import FleetSettings
from phalanx_router.summary import SummaryBuilder
from tests.frontend.fakes import tiny_assets
from tests.frontend.serving import served
from tests.polling import until
from tests.router.fakes import FakeLeader, Leaders, Script, expected, make_request, make_settings, read_stream, running_world

STARTING = wire.State(serving=False, incarnation=1, reason="loading")


@asynccontextmanager
async def running_server(source: Leaders, settings: FleetSettings) -> AsyncIterator[tuple[httpx.AsyncClient, RouterBackend]]:
    app, fleet = make_router(settings, source)
    assert isinstance(app, FastAPI)
    async with served(app) as url, httpx.AsyncClient(base_url=url, trust_env=False, timeout=10) as http:
        await until(lambda: fleet.not_ready() is None)
        yield http, fleet


async def until_held(fleet: RouterBackend, count: int) -> None:
    await until(lambda: fleet.dispatcher.cold_start.num_held == count)


async def test_a_request_is_held_until_a_group_is_ready() -> None:
    leader = FakeLeader("a")
    async with running_world(leader, settings=make_settings(hold_s=10, keep_alive_s=0.01)) as world:
        await leader.send(STARTING)
        await world.until_ready(0)
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        await until_held(world.fleet, 1)
        await asyncio.sleep(0.03)
        await leader.send(wire.State(serving=True, incarnation=1))
        received = await stream
        assert received.tokens == expected([1, 2, 3], 16)
        assert received.keep_alives > 0
        assert world.fleet.dispatcher.cold_start.num_held == 0
        assert world.metric("phalanx_router_held_requests") == 0


async def test_requests_are_held_by_policy_and_counted() -> None:
    """Also before any group has reported the model: the operator starts a group only for reported requests."""
    async with running_server(Leaders(), make_settings()) as (http, fleet):
        fleet.balancing.set_policy(BalancePolicy(number=1, max_held=1, hold_s=0.5))
        first = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await until_held(fleet, 1)
        summing = SummaryBuilder(fleet, RouterMetrics(CollectorRegistry()), "r", time.monotonic)
        assert (summing.summary().held, summing.summary().idle_s, summing.urgent_state().has_held) == (1, 0.0, True)
        assert (await http.post("/v1/completions", json={"prompt": "x"})).status_code == 503
        assert (await first).status_code == 503
        assert summing.summary().held == 0


async def test_end_of_a_hold_is_activity() -> None:
    """The model's tokenizer is loaded then, and the request has no session yet."""
    now = [1000.0]
    async with running_world(settings=make_settings(hold_s=10), clock=lambda: now[0]) as world:
        summing = SummaryBuilder(world.fleet, world.metrics, "r", lambda: now[0])
        holding = asyncio.create_task(world.fleet.wait_for_assets())
        await until_held(world.fleet, 1)
        now[0] += 9.0
        assert summing.summary().idle_s == 0.0
        holding.cancel()
        await asyncio.gather(holding, return_exceptions=True)
        now[0] += 2.0
        assert (summing.summary().held, summing.summary().idle_s) == (0, 2.0)


async def test_a_request_held_before_any_model_ends_the_rest(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operator, which starts a group for it, learns of it by a balancing tick."""
    monkeypatch.setattr(balance_loop, "REST_S", 3600.0)
    held: list[int] = []
    async with running_server(Leaders(), make_settings(tick_s=0.01, hold_s=1.0)) as (http, fleet):
        fleet.balancing.tick_listeners.append(lambda: held.append(fleet.dispatcher.cold_start.num_held))
        before = -1
        while before < len(held):
            before = len(held)
            await asyncio.sleep(0.1)
        answer = asyncio.create_task(http.post("/v1/completions", json={"prompt": "x"}))
        await until(lambda: 1 in held)
        assert (await answer).status_code == 503


async def test_held_request_gets_503_after_its_time_or_bound() -> None:
    leader = FakeLeader("a")
    async with running_world(leader, settings=make_settings(hold_s=0.2, max_held=1)) as world:
        await leader.send(STARTING)
        await world.until_ready(0)
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        await until_held(world.fleet, 1)
        with pytest.raises(BackendError, match="no group is ready, and 1 requests wait for one already"):
            await read_stream(world.fleet, make_request())
        with pytest.raises(BackendError, match=r"no group is ready after 0\.2 s") as caught:
            await stream
        assert (caught.value.status, caught.value.code, caught.value.retry_after_s) == (503, "no_group_ready", 2.0)
        assert world.fleet.dispatcher.cold_start.num_held == 0


async def test_a_client_that_leaves_is_held_no_more() -> None:
    leader = FakeLeader("a")
    async with running_world(leader, settings=make_settings(hold_s=10)) as world:
        await leader.send(STARTING)
        await world.until_ready(0)
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        await until_held(world.fleet, 1)
        stream.cancel()
        await until_held(world.fleet, 0)


@pytest.mark.parametrize("stream", [False, True])
async def test_router_without_groups_holds_requests_without_a_model(stream: bool) -> None:
    leader, source = FakeLeader(script=Script(assets=tiny_assets())), Leaders()
    await leader.start()
    try:
        async with running_server(source, make_settings(hold_s=10, keep_alive_s=0.02)) as (http, fleet):
            body = {"model": "tiny", "prompt": "hello", "max_tokens": 3, "stream": stream}
            pending = asyncio.create_task(http.post("/v1/completions", json=body))
            await until_held(fleet, 1)
            await asyncio.sleep(0.06)
            source.change(leader.endpoint())
            answer = await pending
            assert answer.status_code == 200
            assert fleet.dispatcher.cold_start.num_held == 0
            if stream:
                assert answer.text.startswith(": keep-alive\n")
                assert answer.text.endswith("data: [DONE]\n\n")
            else:
                assert answer.json()["usage"]["completion_tokens"] == 3
    finally:
        await leader.stop()


@pytest.mark.parametrize(("body", "code"), [({}, "no_group_ready"), ({"model": "other"}, "model_not_found")])
async def test_failure_after_comments_is_an_error_event(body: dict[str, object], code: str) -> None:
    leader, source = FakeLeader(script=Script(assets=tiny_assets())), Leaders()
    await leader.start()
    try:
        async with running_server(source, make_settings(hold_s=10 if body else 0.1, keep_alive_s=0.02)) as (http, fleet):
            pending = asyncio.create_task(http.post("/v1/completions", json={"prompt": "hello", "stream": True, **body}))
            await until_held(fleet, 1)
            await asyncio.sleep(0.06)
            if body:
                source.change(leader.endpoint())
            answer = await pending
            assert answer.status_code == 200
            assert f'"code": "{code}"' in answer.text.split("data: ")[-1]
    finally:
        await leader.stop()


async def test_without_holding_the_answer_is_503_at_once() -> None:
    async with running_server(Leaders(), make_settings()) as (http, _):
        for stream in (False, True):
            answer = await http.post("/v1/completions", json={"prompt": "hello", "stream": stream})
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "no_group_ready")
            assert answer.headers["retry-after"] == "2"


async def test_draining_group_finishes_streams_new_requests_wait() -> None:
    old, new = FakeLeader("old", Script(hold_at=3)), FakeLeader("new")
    await new.start()
    try:
        async with running_world(old, settings=make_settings(keep_alive_s=0.01)) as world:
            started = asyncio.create_task(read_stream(world.fleet, make_request(id="started")))
            await until(lambda: old.steps == 3)
            world.fleet.balancing.set_policy(BalancePolicy(number=1, evacuate=["old"], max_held=8, hold_s=30.0))
            waiting = asyncio.create_task(read_stream(world.fleet, make_request(id="waiting")))
            await until_held(world.fleet, 1)
            old.release()
            assert (await started).tokens == expected([1, 2, 3], 16)
            await until_held(world.fleet, 1)
            world.source.change(old.endpoint(), new.endpoint())
            received = await waiting
            assert received.tokens == expected([1, 2, 3], 16) and received.keep_alives > 0
            assert [s.request.id for s in old.submitted] == ["started"]
            assert [s.request.id for s in new.submitted] == ["waiting"]
    finally:
        await new.stop()


@pytest.mark.parametrize("how", ["by the policy", "by its leader pod"])
async def test_draining_last_group_refuses_new_requests(how: str) -> None:
    leader = FakeLeader("a", Script(hold_at=3))
    settings = dataclasses.replace(make_settings(), retry_after_s=0.05)
    async with running_world(leader, settings=settings) as world:
        started = asyncio.create_task(read_stream(world.fleet, make_request()))
        await until(lambda: leader.steps == 3)
        if how == "by the policy":
            world.fleet.balancing.set_policy(BalancePolicy(number=1, evacuate=["a"]))
        else:
            world.source.change(leader.endpoint(is_leaving=True))
        with pytest.raises(BackendError, match="every group is being evacuated") as caught:
            await read_stream(world.fleet, make_request())
        assert (caught.value.status, caught.value.retry_after_s) == (503, 0.05)
        leader.release()
        assert (await started).tokens == expected([1, 2, 3], 16)
        assert len(leader.submitted) == 1


async def test_request_without_hold_waits_for_the_operators_decision() -> None:
    leader = FakeLeader("a")
    async with running_world(leader, settings=dataclasses.replace(make_settings(), retry_after_s=60.0)) as world:
        world.fleet.balancing.set_policy(BalancePolicy(number=1, evacuate=["a"]))
        waiting = asyncio.create_task(read_stream(world.fleet, make_request()))
        await until(lambda: waiting.done() or world.metric("phalanx_router_queued_requests") == 1)
        world.fleet.balancing.set_policy(BalancePolicy(number=2))
        world.fleet.dispatcher.dispatch()
        assert (await waiting).tokens == expected([1, 2, 3], 16)


async def test_kept_group_serves_waiting_requests() -> None:
    leader = FakeLeader("a")
    async with running_world(leader) as world:
        world.fleet.balancing.set_policy(BalancePolicy(number=1, evacuate=["a"], max_held=8, hold_s=30.0))
        waiting = asyncio.create_task(read_stream(world.fleet, make_request()))
        await until_held(world.fleet, 1)
        world.fleet.balancing.set_policy(BalancePolicy(number=2))
        world.fleet.dispatcher.dispatch()
        assert (await waiting).tokens == expected([1, 2, 3], 16)


async def test_started_stream_continues_in_a_draining_group() -> None:
    first, last = FakeLeader("first", Script(hold_at=3)), FakeLeader("last")
    async with running_world(first, last) as world:
        world.fleet.balancing.set_policy(BalancePolicy(number=1, evacuate=["last"]))
        stream = asyncio.create_task(read_stream(world.fleet, make_request()))
        await until(lambda: first.steps == 3)
        await first.stop()
        assert (await stream).tokens == expected([1, 2, 3], 16)
        assert len(last.submitted) == 1
