"""Keeps a Store equal to the API server: a paged list, then a watch from its version; a new list replaces all records.

Without a selector it reads objects with the operator's label. A silent, broken or expired watch restarts.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Iterable
from typing import Any, TypedDict

import msgspec

from phalanx_api import labels
from phalanx_operator.decide.pacing import is_calm
from phalanx_operator.kube.client import Denied, Gone, Json, KubeClient, KubeError, Resource
from phalanx_operator.kube.store import Key, Store

log = logging.getLogger(__name__)
SELECTOR = f"{labels.MANAGED_BY}={labels.MANAGER}"
BACKOFF_S = (0.2, 0.5, 1.0, 2.0, 5.0, 10.0, 30.0)


class Informer:
    """Informer of one kind in one namespace, or in all. `wake` receives each changed service; `later` receives it instead where
    the change is not urgent."""

    def __init__(
        self,
        client: KubeClient,
        resource: Resource,
        namespace: str | None,
        store: Store[Any],
        wake: Callable[[Key], None],
        pause: Callable[[float], Any] = asyncio.sleep,
        selector: str = SELECTOR,
        later: Callable[[Key], None] | None = None,
    ) -> None:
        self.resource = resource
        self.synced = asyncio.Event()
        """Set after the first list."""
        self.heard_at = time.monotonic()
        """Monotonic time of the last data from the API server."""
        self._client = client
        self._namespace = namespace
        self._store = store
        self._wake = wake
        self._pause = pause
        self._selector = selector
        self._later = later or wake
        self._failures = 0
        """Restarts in a row. A list does not reset it: a watch that always fails must not list at once each time."""

    async def run(self) -> None:
        """Runs forever; an error of the API server makes it wait and restart."""
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
        """Replaces the store's records. Returns the version to watch from."""
        bodies: list[Json] = []
        after = ""
        while True:
            page = await self._client.list_page(self.resource, self._namespace, self._selector, after)
            self.heard_at = time.monotonic()
            bodies += page.items
            after = page.next_page
            if not after:
                break
        for key in self._store.replace(bodies, self._namespace):
            self._wake(key)
        self.synced.set()
        return page.resource_version

    async def _watch(self, version: str) -> str:
        """Applies changes until the server ends the watch. Returns the version to continue from."""
        async for event in self._client.watch(self.resource, self._namespace, self._selector, version):
            self.heard_at, self._failures = time.monotonic(), 0
            body = event["object"]
            version = body["metadata"]["resourceVersion"]
            if event["type"] == "BOOKMARK":
                continue
            where = body["metadata"].get("namespace", ""), body["metadata"]["name"]
            former = self._store.find(*where)
            key = self._store.drop(*where) if event["type"] == "DELETED" else self._store.put(body)
            if key:
                (self._later if is_calm(former, self._store.find(*where)) else self._wake)(key)
        return version


def silence_s(informers: Iterable[Informer], resource: Resource, now_s: float) -> float:
    """Returns the seconds since the last data of a kind; of several namespaces, the longest."""
    return max(now_s - informer.heard_at for informer in informers if informer.resource == resource)


# Fields that are decoded from watch events; the rest, most of a pod, is skipped, which takes a third of the time. A field that
# `observe` reads must be listed here.


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
    replicas: int
    unschedulable: bool


class _Object(TypedDict, total=False):
    """An object, or the Status in its place in an error event."""

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
    """Returns a watch event; its object has only the fields that `observe` reads. Raises msgspec.DecodeError."""
    event: Any = _DECODER.decode(line)
    found: Json = event
    return found
