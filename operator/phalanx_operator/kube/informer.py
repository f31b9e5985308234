"""Keeps a `Store` equal to the API server, by a list and watches that restart."""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import msgspec

from phalanx_api import labels
from phalanx_operator.decide.pacing import is_deferrable
from phalanx_operator.kube.client import Denied, Gone, Json, KubeClient, KubeError, Resource
from phalanx_operator.kube.store import Key, Store

log = logging.getLogger(__name__)
SELECTOR = f"{labels.MANAGED_BY}={labels.MANAGER}"
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Informer:
    """Informer of one kind. Changes wake the service, or defer it if not urgent."""

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        namespace: str | None,
        store: Store[Any],
        *,
        wake: Callable[[Key], None],
        defer: Callable[[Key], None],
        pause: Callable[[float], Any] = asyncio.sleep,
        selector: str = SELECTOR,
    ) -> None:
        self.resource = resource
        self.synced = asyncio.Event()
        """Set after the first list."""
        self.last_data_at = time.monotonic()
        """Monotonic time."""
        self._client = client
        self._namespace = namespace
        self._store = store
        self._wake = wake
        self._pause = pause
        self._selector = selector
        self._defer = defer
        self._failures = 0
        """A list does not reset it, so that a failing watch does not list each time."""

    async def run(self) -> None:
        """Runs forever; restarts after errors."""
        while True:
            try:
                version = await self._list()
                while True:
                    version = await self._watch(version)
                    self._failures = 0
                    await self._pause(BACKOFF_S[0])
            except Gone as error:
                log.info("relisting", extra={"kind": self.resource.plural, "why": str(error)})
            except KubeError as error:
                level = logging.ERROR if isinstance(error, Denied) else logging.WARNING
                fields = {"kind": self.resource.plural, "why": str(error), "attempt": self._failures}
                log.log(level, "watch failed", extra=fields)
            await self._pause(BACKOFF_S[min(self._failures, len(BACKOFF_S) - 1)])
            self._failures += 1

    async def _list(self) -> str:
        """Returns the version to watch from."""
        bodies: list[Json] = []
        after = ""
        while True:
            page = await self._client.list_page(self.resource, self._namespace, self._selector, after)
            self.last_data_at = time.monotonic()
            bodies += page.items
            after = page.next_page
            if not after:
                break
        for key in self._store.replace(bodies, self._namespace):
            self._wake(key)
        self.synced.set()
        return page.resource_version

    async def _watch(self, version: str) -> str:
        """Returns the version to continue from."""
        async for event in self._client.watch(self.resource, self._namespace, self._selector, version):
            self.last_data_at, self._failures = time.monotonic(), 0
            body = event["object"]
            version = body["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK":
                continue
            name = body["metadata"].get("namespace", ""), body["metadata"]["name"]
            former = self._store.find(*name)
            key = self._store.drop(*name, body["metadata"]["uid"]) if event["type"] == "DELETED" else self._store.put(body)
            if key:
                (self._defer if is_deferrable(former, self._store.find(*name)) else self._wake)(key)
        return version


def watch_age_s(informers: Iterable[Informer], resource: Resource, now_s: float) -> float:
    """Returns the longest time since the last data of a kind."""
    return max(now_s - informer.last_data_at for informer in informers if informer.resource == resource)


# The fields that `observe` reads. Decoding only these takes a third of the time.


class _Owner(TypedDict, total=False):
    uid: str
    controller: bool | None


class _Metadata(TypedDict, total=False):
    name: str
    namespace: str
    uid: str
    resourceVersion: str
    generation: int
    labels: dict[str, str] | None
    annotations: dict[str, str] | None
    ownerReferences: list[_Owner] | None
    creationTimestamp: str | None
    deletionTimestamp: str
    deletionGracePeriodSeconds: int


class _Spec(TypedDict, total=False):
    nodeName: str
    nodeSelector: dict[str, str] | None
    replicas: int
    unschedulable: bool


class _Object(TypedDict, total=False):
    metadata: _Metadata
    spec: _Spec | None
    status: Any
    code: int
    message: str


class _Event(TypedDict):
    type: str
    object: _Object


_DECODER = msgspec.json.Decoder(_Event)


def read_event(line: bytes) -> Json:
    """Returns an event with the fields that `observe` reads. Raises msgspec.DecodeError."""
    event: Any = _DECODER.decode(line)
    decoded: Json = event
    return decoded
