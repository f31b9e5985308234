"""The router's fleet over the leader's real link: both sides as they run, only the engine is scripted."""

import asyncio
import dataclasses

from prometheus_client import CollectorRegistry

from phalanx_api import wire
from phalanx_router.backend import RouterBackend
from phalanx_router.links.endpoints import StaticLeaders
from phalanx_router.metrics import RouterMetrics
from tests.router.api_servers import FakeEngine, make_link_settings, running_leader
from tests.router.fakes import ASSETS, expected, hear, make_request, make_settings


async def test_streams_survive_a_new_incarnation_over_real_links() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with running_leader(engines[0]) as (first, _), running_leader(engines[1]) as (second, _):
        fleet = RouterBackend(make_settings(), RouterMetrics(CollectorRegistry()))
        tasks = [asyncio.create_task(fleet.run(StaticLeaders([first, second])))]
        try:
            async with asyncio.timeout(10):
                while fleet.links.num_ready < 2:
                    await asyncio.sleep(0.002)
            assert fleet.assets() == ASSETS
            requests = [make_request([i, 2], max_tokens=50, id=f"r{i}") for i in range(8)]
            streams = [asyncio.create_task(hear(fleet, request)) for request in requests]
            async with asyncio.timeout(10):
                while [len(engine.submitted) for engine in engines] != [4, 4]:
                    await asyncio.sleep(0.002)
            for _ in range(10):
                engines[0].step()
            engines[0].change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
            tasks += [asyncio.create_task(engine.run()) for engine in engines]
            heard = await asyncio.gather(*streams)
            assert [h.tokens for h in heard] == [expected(r.prompt, 50) for r in requests]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_streams_finish_while_their_leader_drains() -> None:
    engine = FakeEngine()
    async with running_leader(engine) as (address, _):
        fleet = RouterBackend(make_settings(), RouterMetrics(CollectorRegistry()))
        tasks = [asyncio.create_task(fleet.run(StaticLeaders([address])))]
        try:
            async with asyncio.timeout(10):
                while fleet.links.num_ready < 1:
                    await asyncio.sleep(0.002)
                stream = asyncio.create_task(hear(fleet, make_request(max_tokens=50)))
                while not engine.submitted:
                    await asyncio.sleep(0.002)
                engine.step()
                engine.change(wire.State(serving=False, incarnation=1, reason="the pod is stopping", draining=True))
                while fleet.links.num_ready:
                    await asyncio.sleep(0.002)
            tasks.append(asyncio.create_task(engine.run()))
            assert (await stream).tokens == expected([1, 2, 3], 50)
            assert engine.aborted == []
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def test_idle_link_stays_connected() -> None:
    engine = FakeEngine()
    async with running_leader(engine, dataclasses.replace(make_link_settings(), silence_s=0.3)) as (address, door):
        metrics = CollectorRegistry()
        fleet = RouterBackend(make_settings(heartbeat_timeout_s=0.2), RouterMetrics(metrics))
        task = asyncio.create_task(fleet.run(StaticLeaders([address])))
        try:
            async with asyncio.timeout(10):
                while fleet.links.num_ready < 1:
                    await asyncio.sleep(0.002)
                await asyncio.sleep(0.7)  # more than two silences of either side
            assert metrics.get_sample_value("phalanx_router_links_lost_total") == 0
            assert (door.routers, fleet.links.num_ready) == (1, 1)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
