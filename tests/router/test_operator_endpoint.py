"""The operator's poller against a real router."""

import asyncio
import base64
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import aiohttp
import pytest

from phalanx_api import wire
from phalanx_api.spec.lifecycle import RestartPolicy
from phalanx_api.summary import BalancePolicy, LatencyObjectives
from phalanx_frontend.backend import BackendError
from phalanx_operator.apply.certificates import OperatorIdentity
from phalanx_operator.decide.groups import recovery
from phalanx_operator.decide.groups.drain import drained_reason
from phalanx_operator.decide.state.fleet import Fleet
from phalanx_operator.decide.state.snapshot import DrainMark
from phalanx_operator.kube.client import SECRETS
from phalanx_operator.kube.store import Key
from phalanx_operator.routers import PollTiming, RouterPoller, RouterTarget
from tests.control.builders import NOW, make_group
from tests.control.fake_kube import FakeKube
from tests.polling import until
from tests.router.cached_routers import printing_leader
from tests.router.fakes import TOKEN, FakeLeader, Script, make_request, read_stream
from tests.router.poison import POISON, poisoned_leaders
from tests.router.polled_routers import KEYS, PolledRouter, polled_router

KEY = ("team", "chat")


@asynccontextmanager
async def running_poller(router: PolledRouter, woken: list[Key]) -> AsyncIterator[tuple[RouterPoller, RouterTarget]]:
    kube = FakeKube()
    secret = {"token": base64.b64encode(TOKEN.encode()).decode()}
    kube.put(SECRETS, {"metadata": {"name": "chat-token", "namespace": "team"}, "data": secret})
    async with aiohttp.ClientSession() as http:
        poller = RouterPoller(kube, http, woken.append, OperatorIdentity(kube), PollTiming(pause_s=0.01))
        try:
            yield poller, RouterTarget("uid-0", f"{router.http.base_url.host}:{router.http.base_url.port}")
        finally:
            await poller.close()


async def test_group_is_empty_after_its_last_stream() -> None:
    leader = FakeLeader("a", Script(hold_at=3))
    woken: list[Key] = []
    draining = make_group("a", draining=DrainMark(NOW, "2 groups, 1 wanted"))
    async with polled_router(leader) as router, running_poller(router, woken) as (poller, target):

        def fleet() -> Fleet:
            return poller.fleet(KEY, [target])

        stream = asyncio.create_task(read_stream(router.fleet, make_request(max_tokens=8)))
        poller.publish(KEY, [target], BalancePolicy(number=5), 15.0)
        await until(lambda: fleet().has_quorum and fleet().groups["a"].load.streams == 1)
        poller.publish(KEY, [target], BalancePolicy(number=6, evacuate=["a"]), 15.0)
        await until(lambda: router.fleet.balancing.policy.number == 6)
        assert drained_reason(draining, fleet(), 300, NOW) == ""
        woken.clear()
        leader.release()
        assert len((await stream).tokens) == 8
        await until(lambda: woken)
        await until(lambda: drained_reason(draining, fleet(), 300, NOW) == "it has no streams")


async def test_failures_blamed_on_a_request_are_excused() -> None:
    groups = poisoned_leaders("abcd")
    async with polled_router(*groups) as router, running_poller(router, []) as (poller, target):

        def restarts() -> dict[str, recovery.RestartCount]:
            seen = poller.fleet(KEY, [target])
            return {group.group: recovery.count_restarts(make_group(group.group), seen, RestartPolicy(), NOW) for group in groups}

        poller.publish(KEY, [target], BalancePolicy(number=5), 15.0)
        with pytest.raises(BackendError, match="3 groups died"):
            await read_stream(router.fleet, make_request(POISON, max_tokens=60))
        await router.until_ready(4)
        died = {group.group: group.deaths or 1 for group in groups}
        for group in groups:
            await group.send(wire.State(serving=True, incarnation=2, deaths=died[group.group], death="pod 0: rank 0 ended"))
        await until(lambda: {name: counted.record.deaths for name, counted in restarts().items()} == died)
        assert sum(group.deaths for group in groups) == 3
        assert {name: counted.recent for name, counted in restarts().items()} == {
            group.group: 0 if group.deaths else 1 for group in groups
        }


async def test_objectives_of_the_policy_judge_tokens_at_once() -> None:
    async with polled_router(printing_leader()) as router:

        async def count(objective: str, outcome: str) -> float:
            line = f'phalanx_router_objective_events_total{{objective="{objective}",outcome="{outcome}"}} '
            return float((await router.http.get("/metrics")).text.partition(line)[2].partition("\n")[0])

        async def request() -> None:
            headers, body = {"authorization": f"Bearer {KEYS[0].key}"}, {"prompt": "x", "max_tokens": 4}
            assert (await router.http.post("/v1/completions", json=body, headers=headers)).status_code == 200

        await request()
        assert (await count("availability", "good"), await count("ttft", "good"), await count("ttft", "bad")) == (1, 0, 0)
        await router.poll(policy=BalancePolicy(number=1, objectives=LatencyObjectives(ttft_s=0.0, itl_s=60.0)))
        await request()
        assert (await count("ttft", "bad"), await count("itl", "good"), await count("itl", "bad")) == (1, 3, 0)
