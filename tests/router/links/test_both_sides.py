"""The router's backend over the leader's real link; only the engine is scripted."""

import asyncio
import dataclasses
from functools import partial

import msgspec
import pytest
from prometheus_client import CollectorRegistry

from phalanx_api import wire
from phalanx_router.backend import RouterBackend
from phalanx_router.links.endpoints import StaticLeaders
from phalanx_router.links.link_pool import AssetCache
from phalanx_router.metrics import RouterMetrics
from tests.polling import until
from tests.router.api_servers import FakeEngine, make_link_settings, running_leader
from tests.router.fakes import ASSETS, expected, make_request, make_settings, read_stream

CHANGED = wire.with_adapters(ASSETS, [wire.Adapter("first", "hash")])


async def test_streams_survive_a_new_incarnation_over_real_links() -> None:
    engines = [FakeEngine(), FakeEngine()]
    async with running_leader(engines[0]) as (first, _), running_leader(engines[1]) as (second, _):
        fleet = RouterBackend(make_settings(), RouterMetrics(CollectorRegistry()))
        tasks = [asyncio.create_task(fleet.run(StaticLeaders([first, second])))]
        try:
            await until(lambda: fleet.links.num_ready == 2)
            assert fleet.assets() == ASSETS
            requests = [make_request([i, 2], max_tokens=50, id=f"r{i}") for i in range(8)]
            streams = [asyncio.create_task(read_stream(fleet, request)) for request in requests]
            await until(lambda: [len(engine.submitted) for engine in engines] == [4, 4])
            for _ in range(10):
                engines[0].step()
            engines[0].change(wire.State(serving=False, incarnation=2, reason="rank 1 died"))
            tasks += [asyncio.create_task(engine.run()) for engine in engines]
            received = await asyncio.gather(*streams)
            assert [h.tokens for h in received] == [expected(r.prompt, 50) for r in requests]
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
            await until(lambda: fleet.links.num_ready == 1)
            stream = asyncio.create_task(read_stream(fleet, make_request(max_tokens=50)))
            await until(lambda: engine.submitted)
            engine.step()
            engine.change(wire.State(serving=False, incarnation=1, reason="the pod is stopping", draining=True))
            await until(lambda: not fleet.links.num_ready)
            tasks.append(asyncio.create_task(engine.run()))
            assert (await stream).tokens == expected([1, 2, 3], 50)
            assert engine.aborted == []
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def has_adapters(fleet: RouterBackend, adapters: list[wire.Adapter]) -> bool:
    return fleet.assets().adapters == adapters


async def test_adapters_of_a_serving_group_reach_the_router() -> None:
    engine, adapter = FakeEngine(), wire.Adapter("first", "hash")
    async with running_leader(engine) as (address, _):
        fleet = RouterBackend(make_settings(), RouterMetrics(CollectorRegistry()))
        task = asyncio.create_task(fleet.run(StaticLeaders([address])))
        try:
            await until(lambda: fleet.links.num_ready == 1)
            for adapters in ([adapter], []):
                engine.known_assets = wire.with_adapters(ASSETS, adapters)
                engine.change(engine.present)  # the subscribers are called; the state is the same
                await until(partial(has_adapters, fleet, adapters))
                assert fleet.links.num_ready == 1
                tokenizer = fleet.links.tokenizer()
                assert len(fleet.links.eligible(tokenizer, adapter=adapter)) == len(adapters)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


async def test_changed_adapters_send_no_files() -> None:
    engine, adapter = FakeEngine(), wire.Adapter("first", "hash")
    async with running_leader(engine) as (address, _):
        fleet = RouterBackend(make_settings(), RouterMetrics(CollectorRegistry()))
        task = asyncio.create_task(fleet.run(StaticLeaders([address])))
        try:
            await until(lambda: fleet.links.num_ready == 1)
            files = fleet.assets().files
            engine.known_assets = wire.with_adapters(ASSETS, [adapter])
            engine.change(engine.present)
            await until(partial(has_adapters, fleet, [adapter]))
            assert fleet.assets() == engine.known_assets and fleet.assets().files is files
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)


@pytest.mark.parametrize(
    ("change", "is_known"),
    [
        (wire.AdaptersChanged(CHANGED.content_hash, ASSETS.content_hash, CHANGED.adapters), True),
        (wire.AdaptersChanged("another hash", ASSETS.content_hash, CHANGED.adapters), False),
        (wire.AdaptersChanged(CHANGED.content_hash, "unknown assets", CHANGED.adapters), False),
    ],
)
def test_changes_of_unknown_assets_are_fetched(change: wire.AdaptersChanged, is_known: bool) -> None:
    cache = AssetCache()
    assert cache.add(ASSETS) and cache.change(change) == is_known and cache.has(change.content_hash) == is_known
    assert cache.add(msgspec.structs.replace(CHANGED, files=dict(ASSETS.files)))  # sent whole
    cache.use(CHANGED.content_hash)
    current = cache.current()
    assert current == CHANGED and current is not None and current.files is ASSETS.files


async def test_idle_link_stays_connected() -> None:
    engine = FakeEngine()
    async with running_leader(engine, dataclasses.replace(make_link_settings(), silence_s=0.3)) as (address, endpoint):
        metrics = CollectorRegistry()
        fleet = RouterBackend(make_settings(heartbeat_timeout_s=0.2), RouterMetrics(metrics))
        task = asyncio.create_task(fleet.run(StaticLeaders([address])))
        try:
            await until(lambda: fleet.links.num_ready == 1)
            await asyncio.sleep(0.7)  # more than twice the heartbeat timeout of either side
            assert metrics.get_sample_value("phalanx_router_links_lost_total") == 0
            assert (endpoint.num_routers, fleet.links.num_ready) == (1, 1)
        finally:
            task.cancel()
            await asyncio.gather(task, return_exceptions=True)
