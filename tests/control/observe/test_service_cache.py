"""The service cache saves requests, and no reconcile uses an outdated service."""

import pytest

from phalanx_operator.kube.client import INFERENCE_SERVICES, Conflict, Json
from phalanx_operator.observe.service_cache import MAX_AGE_S, ServiceCache
from tests.control.fake_kube import FakeKube
from tests.control.worlds import KEY, World


def body(version: str, uid: str = "1") -> Json:
    return {"metadata": {"namespace": KEY[0], "name": KEY[1], "uid": uid, "resourceVersion": version}}


FETCHED = body("99")


async def get(cache: ServiceCache) -> Json:
    """Returns the cached service, or FETCHED after a request."""
    kube = FakeKube()
    kube.objects[INFERENCE_SERVICES.plural, *KEY] = FETCHED
    return await cache.get(kube, KEY)


async def test_newest_of_watched_and_written_version_is_cached() -> None:
    cache = ServiceCache(clock=lambda: 0.0)
    assert await get(cache) == FETCHED
    cache.store(body("5"))
    assert await get(cache) == body("5")
    cache.store_write(body("10"))
    cache.store(body("9"))
    assert await get(cache) == body("10"), "an older event is ignored"
    cache.store(body("11"))
    assert await get(cache) == body("11")


async def test_stale_deleted_or_unordered_service_is_fetched() -> None:
    now = 0.0
    cache = ServiceCache(clock=lambda: now)
    cache.store(body("5"))
    now = MAX_AGE_S
    assert await get(cache) == FETCHED, "the watch may be broken"
    cache.store(body("6"))
    cache.store(body("opaque"))
    assert await get(cache) == FETCHED
    cache.store(body("7"))
    cache.forget(KEY)
    cache.store_write(body("8"))
    assert await get(cache) == FETCHED, "a late response does not restore it"


async def test_silent_watch_costs_one_request_per_age() -> None:
    """A partition reconciles a service every 2 s, without an event of it."""
    now, kube = 0.0, FakeKube()
    cache = ServiceCache(clock=lambda: now)
    kube.objects[INFERENCE_SERVICES.plural, *KEY] = FETCHED
    cache.store(body("5"))
    for _ in range(150):
        await cache.get(kube, KEY)
        now += 2
    assert len(kube.reads) == 300 / MAX_AGE_S - 1
    cache.store(body("100"))
    assert await cache.get(kube, KEY) == body("100"), "a later event replaces what was read"


async def test_expired_service_is_fetched_once() -> None:
    """Each reconcile read it until its next event, which may never come."""
    cache, kube = ServiceCache(clock=lambda: 0.0), FakeKube()
    cache.store(body("9"))
    cache.store_write(body("10"))
    kube.objects[INFERENCE_SERVICES.plural, *KEY] = FETCHED
    cache.expire(KEY)
    cache.store(body("9"))
    assert [await cache.get(kube, KEY) for _ in range(3)] == [FETCHED] * 3, "the event is older than the write"
    cache.store(body("100"))
    assert await cache.get(kube, KEY) == body("100") and len(kube.reads) == 1


async def test_recreated_service_replaces_the_former() -> None:
    cache = ServiceCache(clock=lambda: 0.0)
    cache.store(body("5"))
    cache.store(body("3", uid="2"))
    cache.store_write(body("9", uid="1"))
    assert await get(cache) == body("3", uid="2")


async def test_watched_service_needs_no_get_and_reads_own_writes() -> None:
    cached, plain = World(replicas=3), World(replicas=3)
    cached.reconciler.sources.services.store(cached.kube.objects[INFERENCE_SERVICES.plural, *KEY])
    for world in (cached, plain):
        await world.settle()
    reads = [[read for read in world.kube.reads if "inferenceservices" in read] for world in (cached, plain)]
    assert reads[0] == [] and len(reads[1]) > 2
    calls = [
        [call for call in world.kube.calls if "events" not in call] for world in (cached, plain)
    ]  # event names contain the time
    assert cached.status == plain.status and calls[0] == calls[1]
    assert await cached.reconciler.sources.services.get(cached.kube, KEY) == cached.kube.objects[INFERENCE_SERVICES.plural, *KEY]


async def test_reconcile_after_a_failure_fetches_the_service() -> None:
    world = World(replicas=1)
    await world.settle()
    world.reconciler.sources.services.store(world.kube.objects[INFERENCE_SERVICES.plural, *KEY])
    await world.change(replicas=2)
    world.kube.failures["apply inferenceservices/status chat"] = Conflict("another write was faster")
    await world.reconcile()
    assert len(world.groups) == 1, "the event has not arrived yet"
    world.reconciler.sources.services.store(world.kube.objects[INFERENCE_SERVICES.plural, *KEY])
    with pytest.raises(Conflict):
        await world.reconcile()
    world.kube.reads.clear()
    await world.settle()
    assert len(world.groups) == 2 and "get inferenceservices chat" in world.kube.reads
