"""What is known of services without a request, and that no look goes by what is not true any more."""

import pytest

from phalanx_operator.kube.client import SERVICES_OF_OURS, Conflict, Json
from phalanx_operator.observe.service_cache import FRESH_S, ServiceCache
from tests.control.fake_kube import FakeKube
from tests.control.worlds import KEY, World


def body(version: str, uid: str = "1") -> Json:
    return {"metadata": {"namespace": KEY[0], "name": KEY[1], "uid": uid, "resourceVersion": version}}


ASKED = body("99")


async def found(known: ServiceCache) -> Json:
    """ASKED where the API server had to be asked."""
    kube = FakeKube()
    kube.objects[SERVICES_OF_OURS.plural, *KEY] = ASKED
    return await known.get(kube, KEY)


async def test_newest_of_watched_and_written_version_is_cached() -> None:
    known = ServiceCache(clock=lambda: 0.0)
    assert await found(known) == ASKED
    known.hear(body("5"))
    assert await found(known) == body("5")
    known.wrote(body("10"))
    known.hear(body("9"))
    assert await found(known) == body("10"), "what comes late says nothing new"
    known.hear(body("11"))
    assert await found(known) == body("11")


async def test_stale_deleted_or_unordered_service_is_fetched() -> None:
    now = 0.0
    known = ServiceCache(clock=lambda: now)
    known.hear(body("5"))
    now = FRESH_S
    assert await found(known) == ASKED, "the watch may have died"
    known.hear(body("6"))
    known.hear(body("opaque"))
    assert await found(known) == ASKED
    known.hear(body("7"))
    known.forget(KEY)
    known.wrote(body("8"))
    assert await found(known) == ASKED, "a late answer brings nothing back"


async def test_doubted_service_is_fetched_until_a_newer_version() -> None:
    known = ServiceCache(clock=lambda: 0.0)
    known.hear(body("9"))
    known.wrote(body("10"))
    known.doubt(KEY)
    known.hear(body("9"))
    assert await found(known) == ASKED, "what comes late is still older than what we wrote"
    known.hear(body("11"))
    assert await found(known) == body("11")


async def test_another_service_of_the_name_is_another_one() -> None:
    known = ServiceCache(clock=lambda: 0.0)
    known.hear(body("5"))
    known.hear(body("3", uid="2"))
    known.wrote(body("9", uid="1"))
    assert await found(known) == body("3", uid="2")


async def test_watched_service_needs_no_get_and_reads_own_writes() -> None:
    world, plain = World(replicas=3), World(replicas=3)
    world.reconciler.known.hear(world.kube.objects[SERVICES_OF_OURS.plural, *KEY])
    for one in (world, plain):
        await one.settle()
    asked = [[read for read in one.kube.reads if "inferenceservices" in read] for one in (world, plain)]
    assert asked[0] == [] and len(asked[1]) > 2
    calls = [
        [call for call in one.kube.calls if "events" not in call] for one in (world, plain)
    ]  # those have the time in their names
    assert world.status == plain.status and calls[0] == calls[1]
    assert await world.reconciler.known.get(world.kube, KEY) == world.kube.objects[SERVICES_OF_OURS.plural, *KEY]


async def test_reconcile_after_a_failure_fetches_the_service() -> None:
    world = World(replicas=1)
    await world.settle()
    world.reconciler.known.hear(world.kube.objects[SERVICES_OF_OURS.plural, *KEY])
    await world.change(replicas=2)
    world.kube.failures["apply inferenceservices/status chat"] = Conflict("somebody was faster")
    await world.look()
    assert len(world.groups) == 1, "the watch has not told yet"
    world.reconciler.known.hear(world.kube.objects[SERVICES_OF_OURS.plural, *KEY])
    with pytest.raises(Conflict):
        await world.look()
    world.kube.reads.clear()
    await world.settle()
    assert len(world.groups) == 2 and "get inferenceservices chat" in world.kube.reads
