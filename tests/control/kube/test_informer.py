"""Stores follow the API server through failures of lists and watches."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from phalanx_operator.kube.client import PODS, SERVICES, Denied, Gone, KubeError, Resource, Retry
from phalanx_operator.kube.informer import Informer, watch_age_s
from phalanx_operator.kube.store import MAX_DELETED, Key, Store
from phalanx_operator.observe.observe import read_name
from tests.control.fake_kube import FakeKube
from tests.polling import until


def body(name: str, service: str = "chat", owner: str = "o", version: str = "1", namespace: str = "team") -> dict[str, Any]:
    metadata = {
        "name": name,
        "namespace": namespace,
        "uid": f"uid-{name}",
        "resourceVersion": version,
        "labels": {"phalanx.dev/service": service},
        "ownerReferences": [{"uid": owner, "controller": True}],
    }
    return {"metadata": metadata}


KEY: Key = ("team", "chat")


def test_store_finds_records_by_service() -> None:
    store = Store(read_name)
    assert [store.put(body("a")), store.put(body("b", "other")), store.put(body("a"))] == [KEY, ("team", "other"), None]
    assert [record.name for record in store.of_service(KEY)] == ["a"]
    assert len(store) == 2


def test_changed_record_wakes_and_deleted_record_wakes_once() -> None:
    store = Store(read_name)
    store.put(body("a"))
    assert [store.put(body("a", owner="p")), store.drop("team", "a"), store.drop("team", "a")] == [KEY, KEY, None]
    assert store.of_service(KEY) == []


def test_a_store_remembers_the_last_deleted_objects() -> None:
    store = Store(read_name)
    store.put(body("a"))
    store.drop("team", "a")
    store.drop("team", "never stored", "second")
    assert store.is_deleted("uid-a") and store.is_deleted("second") and not store.is_deleted("third")
    for number in range(MAX_DELETED):
        store.drop("team", "a", f"later {number}")
    assert not store.is_deleted("uid-a") and not store.is_deleted("second") and store.is_deleted("later 0")


def test_new_list_replaces_all_records() -> None:
    store = Store(read_name)
    store.replace([body("a"), body("b"), body("c", "other")])
    assert store.replace([body("b"), body("d")]) == {KEY, ("team", "other")}
    assert sorted(record.name for record in store.of_service(KEY)) == ["b", "d"]


def test_list_of_one_namespace_keeps_records_of_others() -> None:
    store = Store(read_name)
    store.replace([body("a"), body("b")], "team")
    store.replace([body("a", namespace="other")], "other")
    assert store.replace([body("b")], "team") == {KEY}
    assert [record.name for record in store.of_service(KEY)] == ["b"]
    assert [record.name for record in store.of_service(("other", "chat"))] == ["a"]


class Follower:
    """An informer over a fake API server. Pauses are recorded and take no time."""

    def __init__(
        self, kube: FakeKube, namespace: str | None = None, store: Store[Any] | None = None, resource: Resource = PODS
    ) -> None:
        self.kube = kube
        self.store = Store(read_name) if store is None else store
        self.woken: list[Key] = []
        self.pauses: list[float] = []
        self.informer = Informer(
            kube, resource, namespace, self.store, wake=self.woken.append, defer=self.woken.append, pause=self.pause
        )

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    def names(self) -> list[str]:
        return sorted(record.name for record in self.store.of_service(KEY))

    async def until(self, is_reached: Callable[[], bool]) -> None:
        await until(is_reached)


@pytest.fixture
async def follower() -> AsyncIterator[Follower]:
    follower = Follower(FakeKube())
    for name in "abcde":
        follower.kube.put(PODS, body(name))
    task = asyncio.create_task(follower.informer.run())
    yield follower
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_store_is_synced_after_all_pages_of_the_list(follower: Follower) -> None:
    await follower.informer.synced.wait()
    assert follower.names() == ["a", "b", "c", "d", "e"]


async def test_changes_are_followed(follower: Follower) -> None:
    await follower.informer.synced.wait()
    before = follower.informer.last_data_at
    follower.kube.events.put_nowait({"type": "ADDED", "object": body("f")})
    follower.kube.events.put_nowait({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "77"}}})
    follower.kube.events.put_nowait({"type": "DELETED", "object": body("a")})
    await follower.until(lambda: follower.names() == ["b", "c", "d", "e", "f"])
    assert follower.informer.last_data_at >= before


async def test_ended_watch_resumes_at_its_version(follower: Follower) -> None:
    await follower.informer.synced.wait()
    follower.kube.events.put_nowait({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "77"}}})
    follower.kube.events.put_nowait(None)
    follower.kube.events.put_nowait({"type": "ADDED", "object": body("f")})
    await follower.until(lambda: "f" in follower.names())


@pytest.mark.parametrize("error", [Gone("too old"), Retry("broken"), Denied("forbidden")])
async def test_objects_deleted_between_watches_leave_the_store(follower: Follower, error: KubeError) -> None:
    await follower.informer.synced.wait()
    del follower.kube.objects["pods", "team", "c"]
    follower.kube.events.put_nowait({"raise": error})
    await follower.until(lambda: follower.names() == ["a", "b", "d", "e"])
    assert follower.pauses
    assert KEY in follower.woken


async def test_informers_of_several_namespaces_share_a_store() -> None:
    kube = FakeKube()
    kube.put(PODS, body("a"))
    kube.put(PODS, body("a", namespace="other"))
    team = Follower(kube, "team")
    other = Follower(kube, "other", team.store)
    tasks = [asyncio.create_task(follower.informer.run()) for follower in (team, other)]
    await team.informer.synced.wait()
    await other.informer.synced.wait()
    kube.events.put_nowait({"raise": Gone("expired")})
    await team.until(lambda: bool(team.pauses or other.pauses))
    assert len(team.store) == 2
    assert not {KEY} & set(other.woken) and ("other", "chat") not in team.woken
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_watch_age_is_the_maximum_over_namespaces() -> None:
    informers = [Follower(FakeKube(), namespace).informer for namespace in ("team", "other")]
    informers.append(Follower(FakeKube(), "team", resource=SERVICES).informer)
    for informer, last_data_at in zip(informers, (70.0, 40.0, 0.0), strict=True):
        informer.last_data_at = last_data_at
    assert watch_age_s(informers, PODS, 100.0) == 60.0


async def test_repeatedly_failing_watch_causes_few_lists() -> None:
    follower = Follower(FakeKube())
    for _ in range(3):
        follower.kube.events.put_nowait({"raise": Denied("forbidden")})
    follower.kube.events.put_nowait({"type": "ADDED", "object": body("f")})
    follower.kube.events.put_nowait({"raise": Denied("forbidden")})
    task = asyncio.create_task(follower.informer.run())
    await follower.until(lambda: len(follower.pauses) > 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert follower.pauses[:4] == [0.2, 0.5, 1.0, 0.2], "an event resets the backoff"


async def test_unreachable_api_server_is_retried_with_backoff() -> None:
    class UnreachableKube(FakeKube):
        async def list_page(self, *_: Any, **__: Any) -> Any:
            raise Retry("unreachable")

    follower = Follower(UnreachableKube())
    task = asyncio.create_task(follower.informer.run())
    await follower.until(lambda: len(follower.pauses) > 8)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert follower.pauses[:8] == [0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 30.0]
    assert not follower.informer.synced.is_set()
