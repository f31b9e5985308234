"""Watches the leader pods of one service through the Kubernetes API.

A list replaces all known pods; a watch with bookmarks continues from its resource version and is cancelled when the server keeps
it open too long. While the API server is unavailable, the last list remains in use.
"""

import asyncio
import logging
import random
from collections.abc import AsyncIterator, Callable
from typing import Any

import aiohttp
import msgspec
from kubernetes.aio import client, config

from phalanx_router.links.endpoints import Leaders, Metadata, Pod, leaders_of

log = logging.getLogger(__name__)

PAGE = 500
"""Pods per list page."""


class Gone(Exception):
    """The server no longer has the resource version (HTTP 410): list again."""


class ApiError(Exception):
    """The API server returned an error: its status and the beginning of the body."""


class NoCluster(Exception):
    """No in-cluster service account and no kubeconfig was found."""


class _ListMetadata(msgspec.Struct, frozen=True, rename="camel"):
    resource_version: str = ""
    continue_: str = msgspec.field(default="", name="continue")


class _PodList(msgspec.Struct, frozen=True):
    metadata: _ListMetadata
    items: list[Pod] = []


class _Event(msgspec.Struct, frozen=True):
    type: str
    object: msgspec.Raw


class _Status(msgspec.Struct, frozen=True):
    code: int = 0
    message: str = ""


class _Bookmark(msgspec.Struct, frozen=True):
    metadata: Metadata


async def make_api() -> client.CoreV1Api:
    """Returns an API client from the pod's service account, else from the kubeconfig. Raises NoCluster."""
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
    except config.ConfigException as outside:
        try:
            await config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise NoCluster(f"cannot watch leader pods, provide a service account or a kubeconfig: {outside} {error}") from error
    return client.CoreV1Api(client.ApiClient(settings))


class WatchedLeaders:
    """Implements `phalanx_router.links.endpoints.LeaderSource` with the pods that match a label selector.

    `watch_s`: timeout requested for one watch; a watch open `slack_s` longer is cancelled.
    `first_retry_s`, `last_retry_s`: bounds of the jittered exponential backoff after an error.
    """

    def __init__(
        self,
        api: client.CoreV1Api,
        namespace: str,
        label_selector: str,
        watch_s: int = 60,
        slack_s: float = 10.0,
        first_retry_s: float = 0.2,
        last_retry_s: float = 10.0,
        draw: Callable[[], float] = random.random,
    ) -> None:
        self._api = api
        self._query: dict[str, Any] = {"namespace": namespace, "label_selector": label_selector}
        self._watch_s = watch_s
        self._slack_s = slack_s
        self._first_retry_s = first_retry_s
        self._last_retry_s = last_retry_s
        self._draw = draw
        self._pods: dict[str, Pod] = {}
        self._told: Leaders | None = None

    async def run(self, found: Callable[[Leaders], None]) -> None:
        """Calls `found` with the first list and after each change, until cancelled; then closes the API client."""
        failures = 0
        try:
            while True:
                try:
                    version = await self._list()
                    self._tell(found)
                    failures = 0
                    while True:
                        async with asyncio.timeout(self._watch_s + self._slack_s):
                            version = await self._watch(version, found)
                except Gone:
                    log.info("listing pods again", extra={"why": "the server no longer has the resource version"})
                except Exception as error:  # the client library raises many types, and the last list must survive all of them
                    expected = isinstance(error, ApiError | aiohttp.ClientError | OSError | msgspec.DecodeError)
                    why = {"why": str(error) or type(error).__name__}
                    log.warning("cannot list or watch pods; using the last list", extra=why, exc_info=None if expected else error)
                    wait_s = min(self._last_retry_s, self._first_retry_s * 2.0 ** min(failures, 16))
                    failures += 1
                    await asyncio.sleep(wait_s * (0.5 + self._draw() / 2))
        finally:
            await self._api.api_client.close()

    def _tell(self, found: Callable[[Leaders], None]) -> None:
        leaders = leaders_of(self._pods.values())
        if leaders != self._told:
            self._told = leaders
            found(leaders)

    async def _list(self) -> str:
        """Replaces all known pods; returns the resource version from which to watch."""
        pods: list[Pod] = []
        continue_: str | None = None
        while True:
            async with asyncio.timeout(self._slack_s):
                response = await self._get(limit=PAGE, _continue=continue_)
                page = msgspec.json.decode(await response.read(), type=_PodList)
            pods += page.items
            continue_ = page.metadata.continue_ or None
            if continue_ is None:
                self._pods = {pod.metadata.uid: pod for pod in pods}
                return page.metadata.resource_version

    async def _watch(self, version: str, found: Callable[[Leaders], None]) -> str:
        """Applies changes until the server ends the watch; returns the resource version for the next one."""
        response = await self._get(
            watch=True, resource_version=version, allow_watch_bookmarks=True, timeout_seconds=self._watch_s
        )
        try:
            async for line in _lines(response):
                event = msgspec.json.decode(line, type=_Event)
                if event.type == "ERROR":
                    status = msgspec.json.decode(event.object, type=_Status)
                    raise Gone if status.code == 410 else ApiError(f"watch: {status.code} {status.message}")
                version = msgspec.json.decode(event.object, type=_Bookmark).metadata.resource_version
                if event.type == "BOOKMARK":
                    continue
                pod = msgspec.json.decode(event.object, type=Pod)
                if event.type == "DELETED":
                    self._pods.pop(pod.metadata.uid, None)
                else:
                    self._pods[pod.metadata.uid] = pod
                self._tell(found)
        finally:
            response.close()
        return version

    async def _get(self, **parameters: Any) -> aiohttp.ClientResponse:
        """Returns the raw response of a list or watch: the client's own objects cost milliseconds per pod."""
        response: aiohttp.ClientResponse = await self._api.list_namespaced_pod_without_preload_content(
            **self._query, **parameters
        )
        if response.status == 200:
            return response
        text = (await response.text())[:300]
        if response.status == 410:
            raise Gone
        raise ApiError(f"HTTP {response.status}: {text}")


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    """Yields the lines of a response, of any length."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line
