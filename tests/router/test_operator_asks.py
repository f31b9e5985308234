"""The operator's own part asks a real router: what one of them tells is what the other one reads."""

import asyncio
import base64
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import aiohttp

from phalanx_api.summary import BalancePolicy
from phalanx_operator.asking import Asking, Pace, Target
from phalanx_operator.decide.draining import why_over
from phalanx_operator.decide.fleet import Fleet
from phalanx_operator.decide.snapshot import Draining
from phalanx_operator.kube import SECRETS
from phalanx_operator.store import Key
from tests.control.builders import NOW, make_group
from tests.control.fake_kube import FakeKube
from tests.router.fakes import TOKEN, FakeLeader, Script, hear, make_request
from tests.router.test_summary import Router, running_router

KEY = ("team", "chat")


@asynccontextmanager
async def asking(router: Router, woken: list[Key]) -> AsyncIterator[tuple[Asking, Target]]:
    kube = FakeKube()
    secret = {"token": base64.b64encode(TOKEN.encode()).decode()}
    kube.put(SECRETS, {"metadata": {"name": "chat-token", "namespace": "team"}, "data": secret})
    async with aiohttp.ClientSession() as http:
        part = Asking(kube, http, woken.append, Pace(pause_s=0.01))
        try:
            yield part, Target("uid-0", f"{router.http.base_url.host}:{router.http.base_url.port}")
        finally:
            await part.close()


async def until(condition: Callable[[], object]) -> None:
    async with asyncio.timeout(10):
        while not condition():
            await asyncio.sleep(0.01)


async def test_a_group_is_emptied_when_its_last_stream_ends_and_the_operator_hears_it_at_once() -> None:
    leader = FakeLeader("a", Script(hold_at=3))
    woken: list[Key] = []
    going = make_group("a", draining=Draining(NOW, "2 groups, 1 wanted"))
    async with running_router(leader) as router, asking(router, woken) as (part, target):

        def fleet() -> Fleet:
            return part.fleet(KEY, [target])

        stream = asyncio.create_task(hear(router.fleet, make_request(max_tokens=8)))
        part.tell(KEY, [target], BalancePolicy(number=5), 15.0)
        await until(lambda: fleet().is_heard and fleet().groups["a"].streams == 1)
        part.tell(KEY, [target], BalancePolicy(number=6, empty=["a"]), 15.0)
        await until(lambda: router.fleet.balancing.policy.number == 6)
        assert why_over(going, fleet(), 300, NOW) == ""
        woken.clear()
        leader.release()
        assert len((await stream).tokens) == 8
        await until(lambda: woken)
        await until(lambda: why_over(going, fleet(), 300, NOW) == "it holds no stream")
