"""Routers find the responses that other routers have stored."""

import asyncio
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from phalanx_api.summary import BalancePolicy, ResponseCachePolicy
from phalanx_router.operator_endpoint import PURGE_PATH
from phalanx_router.responses.cache import RouterResponseCache
from phalanx_router.responses.metrics import ResponseCacheMetrics
from phalanx_router.responses.sharing import MAX_RESPONSE_BYTES, MAX_WAITING_BYTES, Outbox, size_of
from phalanx_router.resume.peer_wire import JournalChanges, SharedResponse, decode, encode
from tests.polling import until
from tests.router.cached_routers import CACHE, SEMANTIC, CachedRouter, printing_leader, sharing_routers
from tests.router.fakes import TOKEN, FakeLeader, make_settings, running_world

ASKED = {"prompt": "france, what is its capital", "max_tokens": 40, "temperature": 0}
SIMILAR = {**ASKED, "prompt": "france, what is its capital, please"}


RECEIVED = '{direction="received"}'


def shared(number: int = 0, size: int = 10, **fields: Any) -> SharedResponse:
    response = SharedResponse(
        key=number.to_bytes(32, "big"),
        tokens=list(range(size)),
        finish="stop",
        cached_tokens=0,
        seconds=1.0,
        revision="r1 ",
        scope="tenant",
        age_s=0.0,
        hops=1,
    )
    return msgspec.structs.replace(response, **fields)


async def until_stored(routers: list[CachedRouter], count: int = 1) -> None:
    for router in routers:
        await until(lambda router=router: len(router.fleet.links.revisions()) == 1)  # type: ignore[misc]

    async def have_entries() -> bool:
        return [await router.metric("entries") for router in routers] == [count] * len(routers)

    await until(have_entries)


@pytest.mark.parametrize("names", ["ab", "abc"])
async def test_response_reaches_every_router_once(names: str) -> None:
    async with sharing_routers(names, printing_leader(), SEMANTIC) as routers:
        first = (await routers[-1].post(ASKED)).json()["choices"][0]["text"]
        await until_stored(routers)
        for router in routers[:-1]:
            equal, similar = await router.post(ASKED), await router.post(SIMILAR)
            assert equal.headers["x-phalanx-cache"] == "exact" and equal.json()["choices"][0]["text"] == first
            assert similar.headers["x-phalanx-cache"].startswith("semantic")
            assert similar.json()["choices"][0]["text"] == first
        assert [await router.metric("shared_total", RECEIVED) for router in routers] == [1.0] * (len(names) - 1) + [0.0]
        assert routers[0].num_computed == 1


@pytest.mark.parametrize("policy", [CACHE, SEMANTIC], ids=["exact", "semantic"])
async def test_joined_requests_send_one_response(policy: ResponseCachePolicy) -> None:
    leader = printing_leader(hold_at=0)
    async with sharing_routers("ab", leader, policy) as routers:
        for router in routers:
            router.fleet.balancing.set_policy(BalancePolicy(number=1, response_cache=policy, routers=2, coalesce_requests=True))
        asking = [asyncio.create_task(routers[0].post(ASKED)) for _ in range(16)]
        await until(lambda: sum(not session.stream.journal.is_pooled for session in routers[0].fleet.sessions) == 16)
        leader.release()
        await asyncio.gather(*asking)
        await until_stored(routers)
        sent = await routers[0].metric("shared_total", '{direction="sent"}')
        assert (sent, routers[0].num_computed) == (1, 1)


@pytest.mark.parametrize("body", [ASKED, SIMILAR], ids=["equal", "similar"])
async def test_shared_response_keeps_its_tenant(body: dict[str, object]) -> None:
    async with sharing_routers("ab", printing_leader(), SEMANTIC) as routers:
        await routers[0].post(ASKED, key="sk-1")
        await until_stored(routers)
        assert (await routers[1].post(body, key="sk-2")).headers["x-phalanx-cache"] == "miss"
        assert (await routers[1].post(SIMILAR, key="sk-1")).headers["x-phalanx-cache"].startswith("semantic")


async def test_purge_of_all_routers_drops_shared_responses() -> None:
    async with sharing_routers("ab", printing_leader(), CACHE) as routers:
        await routers[0].post(ASKED)
        await until_stored(routers)
        headers = {"authorization": f"Bearer {TOKEN}"}
        assert [(await router.http.post(PURGE_PATH, headers=headers)).json()["purged"] for router in routers] == [1, 1]
        assert (await routers[1].post(ASKED)).headers["x-phalanx-cache"] == "miss"


QUESTION: dict[str, Any] = {"conversation": bytes(32), "question": "a", "vector": bytes(16)}


@pytest.mark.parametrize(
    ("received", "count"),
    [
        (shared(1), 1),
        (shared(1, **QUESTION), 1),
        (shared(1, age_s=11.0), 0),  # before the purge
        (shared(1, age_s=3.0, seconds=3.0), 0),  # perhaps before, if it took seconds to arrive
        (shared(1, age_s=3.0, seconds=1.0), 1),
        (shared(1, age_s=-1.0), 0),
        (shared(1, scope="service"), 0),
        (shared(1, revision="r2 "), 0),
        (shared(1, tokens=[2**40]), 0),
        (shared(1, key=b"short"), 0),
        (shared(1, **QUESTION | {"conversation": b"short"}), 0),
        (shared(1, **QUESTION | {"vector": bytes(8)}), 0),
        (shared(1, **QUESTION | {"vector": b""}), 0),
        (shared(0), 0),
    ],
    ids=str,
)
async def test_only_valid_responses_are_received(received: SharedResponse, count: int) -> None:
    now = 100.0
    base = make_settings()
    async with running_world(
        FakeLeader(), settings=replace(base, policy=BalancePolicy(response_cache=CACHE, routers=3))
    ) as world:
        cache = RouterResponseCache(world.fleet, ResponseCacheMetrics(world.registry), clock=lambda: now)
        cache.purge()
        now += 10.0
        cache.receive([shared(0, hops=2, **QUESTION)])
        now += 0.5
        assert [(response.hops, response.age_s) for response in cache.take()] == [(1, 0.5)], "passed on"
        now -= 0.5
        cache.receive([received])
        assert world.metric("phalanx_router_response_cache_shared_total", direction="received") == 1 + count
        assert world.metric("phalanx_router_response_cache_entries") == 1 + count
        assert cache.take() == [], "the last router has it"


async def test_response_that_waited_is_older_than_a_purge() -> None:
    """Its router had no peer meanwhile, and purges after the router that receives it."""
    base, now = make_settings(), 100.0
    policy = BalancePolicy(response_cache=CACHE, routers=3)
    async with running_world(FakeLeader(), settings=replace(base, policy=policy)) as world:
        sender = RouterResponseCache(world.fleet, ResponseCacheMetrics(CollectorRegistry()), clock=lambda: now)
        receiver = RouterResponseCache(world.fleet, ResponseCacheMetrics(world.registry), clock=lambda: now)
        sender.receive([shared(hops=3)])
        now += 60.0
        receiver.purge()
        now += 20.0
        receiver.receive(sender.take())
        assert world.metric("phalanx_router_response_cache_entries") == 0


async def test_other_scope_is_not_shared() -> None:
    async with sharing_routers("ab", printing_leader(), CACHE) as routers:
        policy = msgspec.structs.replace(CACHE, scope="service")
        routers[1].fleet.balancing.set_policy(BalancePolicy(number=9, response_cache=policy, routers=2))
        await routers[1].post(ASKED)
        routers[1].fleet.balancing.set_policy(BalancePolicy(number=10, response_cache=CACHE, routers=2))
        await routers[1].post(SIMILAR)
        await until_stored(routers)
        assert (await routers[0].post(SIMILAR)).headers["x-phalanx-cache"] == "exact"


def test_frame_of_an_older_router_has_no_responses() -> None:
    changes = JournalChanges(opened=[], numbers=[], counts=[], tokens=[], closed=[], responses=[shared()])
    assert decode(encode(changes)) == changes
    older = msgspec.msgpack.decode(encode(changes))[:-2]  # neither responses nor replays
    assert decode(msgspec.msgpack.encode(older)) == msgspec.structs.replace(changes, responses=[])


def test_waiting_responses_are_bounded() -> None:
    outbox = Outbox()
    for number in range(100):
        outbox.put(shared(number, 5000), 0.0)
    outbox.put(shared(hops=0), 0.0)
    outbox.put(shared(size=MAX_RESPONSE_BYTES // 5), 0.0)
    taken = []
    while frame := outbox.take(0.0):
        assert sum(map(size_of, frame)) <= 64 << 10
        taken += frame
    assert sum(map(size_of, taken)) <= MAX_WAITING_BYTES
    assert [int.from_bytes(response.key, "big") for response in taken] == list(range(100 - len(taken), 100)), (
        "the oldest are dropped"
    )
    outbox.put(shared(), 0.0)
    outbox.clear()
    assert outbox.take(0.0) == []
