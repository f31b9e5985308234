"""The router's fleet over the leader's real link: both sides as they run, only the engine is scripted."""

import asyncio

from prometheus_client import CollectorRegistry

from phalanx_api import wire
from phalanx_router.endpoints import StaticLeaders
from phalanx_router.fleet import Fleet
from phalanx_router.metrics import RouterMetrics
from tests.router.doors import FakeEngine, running_leader
from tests.router.fakes import ASSETS, expected, hear, make_request, make_settings


async def test_streams_run_over_real_links_and_survive_a_new_incarnation() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with running_leader(engines[0]) as (first, _), running_leader(engines[1]) as (second, _):
        fleet = Fleet(make_settings(), RouterMetrics(CollectorRegistry()))
        tasks = [asyncio.create_task(fleet.run(StaticLeaders([first, second])))]
        try:
            async with asyncio.timeout(10):
                while fleet.num_ready < 2:
                    await asyncio.sleep(0.002)
            assert fleet.assets() == ASSETS
            requests = [make_request([i, 2], max_tokens=50, id=f"r{i}") for i in range(8)]
            streams = [asyncio.create_task(hear(fleet, request)) for request in requests]
            async with asyncio.timeout(10):
                while [len(engine.submitted) for engine in engines] != [4, 4]:
                    await asyncio.sleep(0.002)
            for _ in range(10):
                engines[0].step()
            engines[0].change(wire.State(False, 2, "rank 1 died"))
            tasks += [asyncio.create_task(engine.run()) for engine in engines]
            heard = await asyncio.gather(*streams)
            assert [h.tokens for h in heard] == [expected(r.prompt, 50) for r in requests]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
