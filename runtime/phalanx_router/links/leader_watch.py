"""The leader pods of one service, from the Kubernetes API: list, then watch, again and again.

A list replaces all that was known; a watch goes on from there, asks for bookmarks, and is given up when the server keeps
it longer than it was asked to. While the API server is away the last list stands, so streams and new requests go on.
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
"""Pods per page of a list."""


class Gone(Exception):
    """The server no longer has the resource version: list again."""


class ApiError(Exception):
    """The API server said no: status and the beginning of its answer."""


class NoCluster(Exception):
    """This process is neither in a cluster nor has it a kubeconfig."""


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
    """An API client: of the pod's service account inside a cluster, else of the kubeconfig. Raises NoCluster."""
    settings = client.Configuration()
    try:
        config.load_incluster_config(client_configuration=settings)  # type: ignore[no-untyped-call]
    except config.ConfigException as outside:
        try:
            await config.load_kube_config(client_configuration=settings)  # type: ignore[no-untyped-call]
        except config.ConfigException as error:
            raise NoCluster(f"leaders cannot be watched: {outside} {error}") from error
    return client.CoreV1Api(client.ApiClient(settings))


class WatchedLeaders:
    """Implements `phalanx_router.links.endpoints.LeaderSource` with the pods that a label selector finds.

    watch_s: how long the server is asked to keep one watch; one that lives `slack_s` longer is taken for dead.
    first_retry_s, last_retry_s: jittered wait after an error.
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
                    log.info("pods are listed again", extra={"why": "the server no longer has our version"})
                except Exception as error:  # the client library raises what it likes, and the last list must stand whatever it is
                    expected = isinstance(error, ApiError | aiohttp.ClientError | OSError | msgspec.DecodeError)
                    why = {"why": str(error) or type(error).__name__}
                    log.warning("no view of the pods; the last list stands", extra=why, exc_info=None if expected else error)
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
        """Replaces all known pods; the version that a watch starts from."""
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
        """Follows changes until the server ends the watch; the version that the next one starts from."""
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
        """The raw answer to a list or watch: the client's own objects cost milliseconds per pod."""
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
    """The lines of an answer, however long one is."""
    rest = b""
    async for chunk in response.content.iter_any():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line:
                yield line
