"""Watches the leader pods of one service through the Kubernetes API.

A list replaces all known pods; a watch with bookmarks continues from its resource version. While the API server is unavailable,
the last list remains in use.
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

PAGE_SIZE = 500


class ResourceExpired(Exception):
    """HTTP 410: the resource version is too old."""


class KubernetesError(Exception):
    """The API server returned an error."""


class NoCluster(Exception):
    """No service account and no kubeconfig was found."""


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
    """API client from the service account or the kubeconfig. Raises NoCluster."""
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
    except config.ConfigException as in_cluster_error:
        try:
            await config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise NoCluster(
                f"cannot watch leader pods, provide a service account or a kubeconfig: {in_cluster_error} {error}"
            ) from error
    return client.CoreV1Api(client.ApiClient(settings))


class WatchedLeaders:
    """Pods that match a label selector. A watch is requested for `watch_s` and cancelled `slack_s` later."""

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
        self._published: Leaders | None = None

    async def run(self, on_change: Callable[[Leaders], None]) -> None:
        """Calls `on_change` with the first list and after each change; closes the API client at the end."""
        failures = 0
        try:
            while True:
                try:
                    version = await self._list()
                    self._publish(on_change)
                    failures = 0
                    while True:
                        async with asyncio.timeout(self._watch_s + self._slack_s):
                            version = await self._watch(version, on_change)
                except ResourceExpired:
                    log.info("listing pods again", extra={"why": "the server no longer has the resource version"})
                except Exception as error:  # the client library raises many types, and the last list must survive all of them
                    is_expected = isinstance(error, KubernetesError | aiohttp.ClientError | OSError | msgspec.DecodeError)
                    why = {"why": str(error) or type(error).__name__}
                    log.warning(
                        "cannot list or watch pods; using the last list", extra=why, exc_info=None if is_expected else error
                    )
                    wait_s = min(self._last_retry_s, self._first_retry_s * 2.0 ** min(failures, 16))
                    failures += 1
                    await asyncio.sleep(wait_s * (0.5 + self._draw() / 2))
        finally:
            await self._api.api_client.close()

    def _publish(self, on_change: Callable[[Leaders], None]) -> None:
        leaders = leaders_of(self._pods.values())
        if leaders != self._published:
            self._published = leaders
            on_change(leaders)

    async def _list(self) -> str:
        pods: list[Pod] = []
        continue_: str | None = None
        while True:
            async with asyncio.timeout(self._slack_s):
                response = await self._get(limit=PAGE_SIZE, _continue=continue_)
                page = msgspec.json.decode(await response.read(), type=_PodList)
            pods += page.items
            continue_ = page.metadata.continue_ or None
            if continue_ is None:
                self._pods = {pod.metadata.uid: pod for pod in pods}
                return page.metadata.resource_version

    async def _watch(self, version: str, on_change: Callable[[Leaders], None]) -> str:
        response = await self._get(
            watch=True, resource_version=version, allow_watch_bookmarks=True, timeout_seconds=self._watch_s
        )
        try:
            async for line in _lines(response):
                event = msgspec.json.decode(line, type=_Event)
                if event.type == "ERROR":
                    status = msgspec.json.decode(event.object, type=_Status)
                    raise ResourceExpired if status.code == 410 else KubernetesError(f"watch: {status.code} {status.message}")
                version = msgspec.json.decode(event.object, type=_Bookmark).metadata.resource_version
                if event.type == "BOOKMARK":
                    continue
                pod = msgspec.json.decode(event.object, type=Pod)
                if event.type == "DELETED":
                    self._pods.pop(pod.metadata.uid, None)
                else:
                    self._pods[pod.metadata.uid] = pod
                self._publish(on_change)
        finally:
            response.close()
        return version

    async def _get(self, **parameters: Any) -> aiohttp.ClientResponse:
        """Raw response: the client's own objects cost milliseconds per pod."""
        response: aiohttp.ClientResponse = await self._api.list_namespaced_pod_without_preload_content(
            **self._query, **parameters
        )
        if response.status == 200:
            return response
        text = (await response.text())[:300]
        if response.status == 410:
            raise ResourceExpired
        raise KubernetesError(f"HTTP {response.status}: {text}")


async def _lines(response: aiohttp.ClientResponse) -> AsyncIterator[bytes]:
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line
