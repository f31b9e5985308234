"""Stores equal to what the API server has, whatever happens to lists and watches."""

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest

from phalanx_operator.kube.client import PODS, SERVICES, Denied, Gone, KubeError, Retry
from phalanx_operator.kube.informer import Informer, silence_s
from phalanx_operator.kube.store import Key, Store
from phalanx_operator.observe.observe import trim_name
from tests.control.fake_kube import FakeKube


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


def test_a_store_finds_records_by_service() -> None:
    store = Store(trim_name)
    assert [store.put(body("a")), store.put(body("b", "other")), store.put(body("a"))] == [KEY, ("team", "other"), None]
    assert [record.name for record in store.of(KEY)] == ["a"]
    assert len(store) == 2


def test_changed_record_wakes_and_deleted_record_wakes_once() -> None:
    store = Store(trim_name)
    store.put(body("a"))
    assert [store.put(body("a", owner="p")), store.drop("team", "a"), store.drop("team", "a")] == [KEY, KEY, None]
    assert store.of(KEY) == []


def test_a_new_list_replaces_everything() -> None:
    store = Store(trim_name)
    store.replace([body("a"), body("b"), body("c", "other")])
    assert store.replace([body("b"), body("d")]) == {KEY, ("team", "other")}
    assert sorted(record.name for record in store.of(KEY)) == ["b", "d"]


def test_list_of_one_namespace_keeps_records_of_others() -> None:
    store = Store(trim_name)
    store.replace([body("a"), body("b")], "team")
    store.replace([body("a", namespace="other")], "other")
    assert store.replace([body("b")], "team") == {KEY}
    assert [record.name for record in store.of(KEY)] == ["b"]
    assert [record.name for record in store.of(("other", "chat"))] == ["a"]


class Follower:
    """An informer over a fake API server, run as a task; each pause is noted and short."""

    def __init__(self, kube: FakeKube, namespace: str | None = None, store: Store[Any] | None = None) -> None:
        self.kube = kube
        self.store = Store(trim_name) if store is None else store
        self.woken: list[Key] = []
        self.pauses: list[float] = []
        self.informer = Informer(kube, PODS, namespace, self.store, self.woken.append, self.pause)

    async def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        await asyncio.sleep(0)

    def names(self) -> list[str]:
        return sorted(record.name for record in self.store.of(KEY))

    async def until(self, look: Callable[[], bool]) -> None:
        async with asyncio.timeout(5):
            while not look():
                await asyncio.sleep(0)


@pytest.fixture
async def follower() -> AsyncIterator[Follower]:
    made = Follower(FakeKube())
    for name in "abcde":
        made.kube.put(PODS, body(name))
    task = asyncio.create_task(made.informer.run())
    yield made
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def test_store_is_synced_after_all_pages_of_the_list(follower: Follower) -> None:
    await follower.informer.synced.wait()
    assert follower.names() == ["a", "b", "c", "d", "e"]


async def test_changes_are_followed(follower: Follower) -> None:
    await follower.informer.synced.wait()
    heard_at = follower.informer.heard_at
    follower.kube.events.put_nowait({"type": "ADDED", "object": body("f")})
    follower.kube.events.put_nowait({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "77"}}})
    follower.kube.events.put_nowait({"type": "DELETED", "object": body("a")})
    await follower.until(lambda: follower.names() == ["b", "c", "d", "e", "f"])
    assert follower.informer.heard_at >= heard_at


async def test_ended_watch_resumes_at_its_version(follower: Follower) -> None:
    await follower.informer.synced.wait()
    follower.kube.events.put_nowait({"type": "BOOKMARK", "object": {"metadata": {"resourceVersion": "77"}}})
    follower.kube.events.put_nowait(None)
    follower.kube.events.put_nowait({"type": "ADDED", "object": body("f")})
    await follower.until(lambda: "f" in follower.names())


@pytest.mark.parametrize("error", [Gone("too old"), Retry("broken"), Denied("no right")])
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
    one = Follower(kube, "team")
    other = Follower(kube, "other", one.store)
    tasks = [asyncio.create_task(follower.informer.run()) for follower in (one, other)]
    await one.informer.synced.wait()
    await other.informer.synced.wait()
    kube.events.put_nowait({"raise": Gone("list again")})
    await one.until(lambda: bool(one.pauses or other.pauses))
    assert len(one.store) == 2
    assert not {KEY} & set(other.woken) and ("other", "chat") not in one.woken
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def test_watch_age_is_that_of_the_most_silent_namespace() -> None:
    informers = [Follower(FakeKube(), namespace).informer for namespace in ("team", "other")]
    informers.append(Informer(FakeKube(), SERVICES, "team", Store(trim_name), lambda _: None))
    for informer, heard_at in zip(informers, (70.0, 40.0, 0.0), strict=True):
        informer.heard_at = heard_at
    assert silence_s(informers, PODS, 100.0) == 60.0


async def test_repeatedly_failing_watch_causes_few_lists() -> None:
    made = Follower(FakeKube())
    for _ in range(3):
        made.kube.events.put_nowait({"raise": Denied("no right to watch")})
    made.kube.events.put_nowait({"type": "ADDED", "object": body("f")})
    made.kube.events.put_nowait({"raise": Denied("no right to watch")})
    task = asyncio.create_task(made.informer.run())
    await made.until(lambda: len(made.pauses) > 3)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert made.pauses[:4] == [0.2, 0.5, 1.0, 0.2], "what is heard ends the row"


async def test_unreachable_api_server_is_retried_with_backoff() -> None:
    class Away(FakeKube):
        async def list_page(self, *_: Any, **__: Any) -> Any:
            raise Retry("away")

    made = Follower(Away())
    task = asyncio.create_task(made.informer.run())
    await made.until(lambda: len(made.pauses) > 8)
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert made.pauses[:8] == [0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0, 30.0]
    assert not made.informer.synced.is_set()
