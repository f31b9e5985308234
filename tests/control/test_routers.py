"""Asking routers over real HTTP: the long poll, the policy on its way, and routers that are away, silent, old or broken."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field

import aiohttp
import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from phalanx_api.summary import SUMMARY_PATH, Asked, BalancePolicy, RouterSummary
from phalanx_operator.decide import plan
from phalanx_operator.kube.client import SECRETS
from phalanx_operator.kube.store import Key
from phalanx_operator.routers import PollTiming, RouterPoller, RouterTarget, address_of
from tests.control.fake_kube import FakeKube
from tests.control.summaries import group, summary

KEY = ("team", "chat")
TOKEN = "t0ken"
PACE = PollTiming(pause_s=0.0, first_retry_s=0.01, most_bytes=100_000)


@dataclass
class FakeRouter:
    """Answers the operator. `answers` are given in order, each as soon as it is there; while there is none, the poll hangs."""

    answers: asyncio.Queue[RouterSummary | int | bytes] = field(default_factory=asyncio.Queue)
    bodies: list[bytes] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)
    tokens: list[str] = field(default_factory=list)
    address: str = ""

    async def handle(self, request: web.Request) -> web.Response:
        self.tokens.append(request.headers.get("Authorization", ""))
        self.bodies.append(await request.read())
        self.asked.append(msgspec.json.decode(self.bodies[-1], type=Asked))
        answer = await self.answers.get()
        if isinstance(answer, int):
            return web.Response(status=answer)
        return web.Response(body=answer if isinstance(answer, bytes) else msgspec.json.encode(answer))


@dataclass
class Scene:
    """Two routers, and the operator's part that asks them."""

    routers: list[FakeRouter]
    asking: RouterPoller
    kube: FakeKube
    woken: list[Key]
    now: list[float]
    """What the operator's clock shows."""

    @property
    def targets(self) -> list[RouterTarget]:
        return [RouterTarget(f"uid-{i}", router.address) for i, router in enumerate(self.routers)]

    def tell(self, *, hear_s: float = 15.0, count: int = 1, **policy: object) -> None:
        self.asking.tell(KEY, self.targets[:count], BalancePolicy(**policy), hear_s)  # type: ignore[arg-type]


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.005)


@pytest.fixture
async def scene() -> AsyncIterator[Scene]:
    kube, woken, now = FakeKube(), list[Key](), [0.0]
    secret = {"token": base64.b64encode(TOKEN.encode()).decode()}
    kube.put(SECRETS, {"metadata": {"name": "chat-token", "namespace": "team"}, "data": secret})
    routers = [FakeRouter(), FakeRouter()]
    servers = []
    for router in routers:
        app = web.Application()
        app.router.add_post(SUMMARY_PATH, router.handle)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        router.address = f"127.0.0.1:{servers[-1].port}"
    async with aiohttp.ClientSession() as http:
        part = RouterPoller(kube, http, woken.append, PACE, clock=lambda: now[0])
        yield Scene(routers, part, kube, woken, now)
        await part.close()
    for server in servers:
        await server.close()


async def test_each_router_is_polled_with_policy_and_token(scene: Scene) -> None:
    scene.tell(number=3, mode="Route", count=2)
    assert not scene.asking.fleet(KEY, scene.targets).is_heard
    for router in scene.routers:
        router.answers.put_nowait(summary(group("a", streams=4)))
    await until(lambda: scene.asking.fleet(KEY, scene.targets).answered == 2)
    fleet = scene.asking.fleet(KEY, scene.targets)
    assert (fleet.asked, fleet.groups["a"].streams, scene.woken) == (2, 8, [KEY, KEY])
    first = scene.routers[0]
    await until(lambda: len(first.asked) == 2)
    assert [(one.policy.number, one.wait_s) for one in first.asked] == [(3, 0.0), (3, 15.0)]
    assert first.tokens[0] == f"Bearer {TOKEN}"


async def test_new_policy_reaches_a_router_during_a_poll(scene: Scene) -> None:
    scene.tell(number=1)
    scene.routers[0].answers.put_nowait(summary())
    await until(lambda: len(scene.routers[0].asked) == 2)
    scene.tell(number=2, empty=["a"], hear_s=2.0)
    await until(lambda: len(scene.routers[0].asked) == 3)
    scene.routers[0].answers.put_nowait(summary())
    await until(lambda: len(scene.routers[0].asked) == 4)
    asked = [(one.policy.empty, one.wait_s) for one in scene.routers[0].asked]
    assert asked == [([], 0.0), ([], 15.0), (["a"], 0.0), (["a"], 2.0)], "what it said last is told anew: the answer may be lost"


async def test_only_starts_and_ends_wake(scene: Scene) -> None:
    scene.tell()
    said = [summary(group(streams=4)), summary(group(streams=9)), summary(emptied=["a"]), summary(emptied=["a"]), summary(held=1)]
    for one in said:
        scene.routers[0].answers.put_nowait(one)
    await until(lambda: len(scene.routers[0].asked) == len(said) + 1)
    assert len(scene.woken) == 3


async def test_a_router_of_a_former_version_does_not_count(scene: Scene) -> None:
    scene.tell()
    scene.routers[0].answers.put_nowait(404)
    await until(lambda: scene.asking.fleet(KEY, scene.targets[:1]).asked == 0)


@pytest.mark.parametrize("trouble", [503, b"{", b'{"router": 5}'], ids=["an error", "cut off", "another shape"])
async def test_failing_router_is_retried_and_counts_as_silent(scene: Scene, trouble: int | bytes) -> None:
    scene.tell()
    scene.routers[0].answers.put_nowait(trouble)
    await until(lambda: len(scene.routers[0].asked) == 2)
    fleet = scene.asking.fleet(KEY, scene.targets[:1])
    assert (fleet.asked, fleet.answered) == (1, 0)
    scene.routers[0].answers.put_nowait(summary())
    await until(lambda: scene.asking.fleet(KEY, scene.targets[:1]).is_heard)


async def test_router_with_a_lost_answer_answers_the_next_poll(scene: Scene) -> None:
    """What it said before would be too old by the time that it may keep a question."""
    scene.tell(hear_s=30.0)
    for one in (summary(), b"{", summary()):
        scene.routers[0].answers.put_nowait(one)
    await until(lambda: len(scene.routers[0].asked) == 4)
    assert [one.wait_s for one in scene.routers[0].asked] == [0.0, 30.0, 0.0, 30.0]


def test_lost_long_poll_leaves_time_for_a_retry() -> None:
    pace = PollTiming()
    assert plan.HEAR_S + pace.slack_s + pace.first_retry_s < pace.stale_s


@pytest.mark.parametrize("answer", [summary(), 500], ids=["an answer", "trouble"])
async def test_routers_are_new_until_one_had_time_to_answer(scene: Scene, answer: RouterSummary | int) -> None:
    scene.tell(count=2)
    await until(lambda: all(router.asked for router in scene.routers))
    assert scene.asking.fleet(KEY, scene.targets).is_new and not scene.woken
    scene.routers[0].answers.put_nowait(answer)
    await until(lambda: scene.woken)
    assert not scene.asking.fleet(KEY, scene.targets).is_new


async def test_policy_changes_do_not_keep_a_router_new(scene: Scene) -> None:
    async def change(number: int) -> None:
        scene.tell(number=number)
        await until(lambda: len(scene.routers[0].asked) == number)

    for number in range(1, 4):
        await change(number)
    scene.now[0] = PACE.slack_s - 1.0
    assert scene.asking.fleet(KEY, scene.targets[:1]).is_new
    scene.now[0] += 1.0
    fleet = scene.asking.fleet(KEY, scene.targets[:1])
    assert (fleet.is_new, fleet.asked, fleet.answered, scene.woken) == (False, 1, 0, [])
    assert scene.asking.fleet(KEY, scene.targets[1:]).is_new, "this one was not asked yet"


async def test_unreachable_router_is_polled_until_it_returns(scene: Scene, caplog: pytest.LogCaptureFixture) -> None:
    away = RouterTarget("uid-9", "127.0.0.1:1")
    scene.asking.tell(KEY, [away, scene.targets[0]], BalancePolicy(), 15.0)
    scene.routers[0].answers.put_nowait(summary())
    await until(lambda: scene.asking.fleet(KEY, [away, scene.targets[0]]).answered == 1)
    await until(lambda: "router unreachable" in caplog.text)
    assert scene.asking.fleet(KEY, [away, scene.targets[0]]).is_heard


async def test_refused_token_is_read_again(scene: Scene) -> None:
    scene.tell()
    await until(lambda: scene.routers[0].asked)
    scene.kube.put(SECRETS, scene.kube.of(SECRETS)["chat-token"] | {"data": {"token": base64.b64encode(b"other").decode()}})
    scene.routers[0].answers.put_nowait(401)
    await until(lambda: len(scene.routers[0].tokens) == 2)
    assert scene.routers[0].tokens == [f"Bearer {TOKEN}", "Bearer other"]


async def test_without_token_no_router_is_polled(scene: Scene) -> None:
    del scene.kube.objects["secrets", "team", "chat-token"]
    scene.tell()
    await asyncio.sleep(0.05)
    assert scene.routers[0].asked == []


async def test_deleted_router_is_forgotten(scene: Scene) -> None:
    scene.tell(count=2)
    for router in scene.routers:
        router.answers.put_nowait(summary())
    await until(lambda: scene.asking.fleet(KEY, scene.targets).answered == 2)
    scene.tell(count=1)
    assert scene.asking.fleet(KEY, scene.targets).answered == 1
    scene.asking.forget(KEY)
    assert scene.asking.fleet(KEY, scene.targets).answered == 0


async def test_an_answer_without_end_is_given_up(scene: Scene) -> None:
    scene.tell()
    scene.routers[0].answers.put_nowait(b" " * 200_000)
    await until(lambda: len(scene.routers[0].asked) == 2)
    assert scene.asking.fleet(KEY, scene.targets[:1]).answered == 0


def test_addresses() -> None:
    assert (address_of("10.0.0.1"), address_of("fd00::1")) == ("10.0.0.1:8000", "[fd00::1]:8000")
