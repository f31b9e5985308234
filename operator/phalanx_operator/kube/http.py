"""`KubeClient` over HTTP, with the official client's credentials."""

import time
import urllib.parse
import urllib.request
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any

import aiohttp
import msgspec
from kubernetes.aio.client import ApiClient, Configuration
from kubernetes.aio.config import ConfigException, load_incluster_config, load_kube_config

from phalanx_api import labels
from phalanx_operator.kube.client import (
    Conflict,
    Denied,
    Gone,
    Json,
    KubeError,
    Page,
    Rejected,
    Resource,
    Retry,
    Unauthenticated,
)
from phalanx_operator.kube.clock import ServerClock

PAGE_SIZE = 500
REQUEST_TIMEOUT_S = 30
WATCH_S = 300
SILENCE_S = 150
"""A longer silence means a dead connection."""
_REQUEST_TIMEOUT = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
_APPLY = "application/apply-patch+yaml"
_UNTYPED = (
    "failed to create typed patch object"  # an applied field of the user's that does not exist, in a response with status 500
)
_MERGE = "application/merge-patch+json"
_METADATA = "application/json;as=PartialObjectMetadata;g=meta.k8s.io;v=v1,application/json"  # the second is for errors


async def connect() -> Any:
    """Returns a client for this pod's cluster, else the kubeconfig's. Raises ConfigException."""
    configuration = Configuration()
    try:
        load_incluster_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    except ConfigException:
        await load_kube_config(client_configuration=configuration)  # type: ignore[no-untyped-call]
    prepare(configuration)
    return ApiClient(configuration)


def prepare(configuration: Any) -> None:
    """Completes a client's configuration.

    The API server's proxy is resolved once; aiohttp would do it at every request. Connections have no limit, which is 100 by
    default: each watch holds one, and each watched namespace has four.
    """
    server = urllib.parse.urlsplit(configuration.host)
    if not configuration.proxy and not urllib.request.proxy_bypass(server.hostname or ""):
        configuration.proxy = urllib.request.getproxies().get(server.scheme)
    configuration.client_session_kwargs = {"trust_env": False}
    configuration.connection_pool_maxsize = 0


def without_credentials(client: Any) -> Any:
    """Returns a client of the same API server for calls with users' tokens. It runs in an event loop.

    It has no token and no certificate of this process, and keeps no cookie, which could carry one user's session to another.
    """
    own = client.configuration
    bare = Configuration(host=own.host)
    for setting in ("ssl_ca_cert", "verify_ssl", "tls_server_name", "proxy", "proxy_headers"):
        setattr(bare, setting, getattr(own, setting))
    bare.client_session_kwargs = {"trust_env": False, "cookie_jar": aiohttp.DummyCookieJar()}
    return ApiClient(bare)


class HttpKube:
    """A `KubeClient`. The caller closes `client`. `read_event` may skip fields."""

    def __init__(
        self,
        client: Any,  # the library is not typed
        silence_s: float = SILENCE_S,
        read_event: Callable[[bytes], Json] = msgspec.json.decode,
        token: str | None = None,
        clock: ServerClock | None = None,
    ) -> None:
        """token: a user's; `client` is one `without_credentials`. clock: follows the responses."""
        self._client = client
        self._clock = clock or ServerClock()
        self._token = token
        self._silence_s = silence_s
        self._read_event = read_event

    async def get(self, resource: Resource, namespace: str, name: str, *, metadata_only: bool = False) -> Json:
        """See KubeClient."""
        return await self._json("GET", resource.path(namespace, name), accept=_METADATA if metadata_only else "application/json")

    async def create(self, resource: Resource, body: Json, *, dry_run: bool = False) -> Json:
        """See KubeClient. Rejects unknown fields, which are the user's."""
        query = {"fieldManager": labels.MANAGER, "fieldValidation": "Strict"} | ({"dryRun": "All"} if dry_run else {})
        return await self._json("POST", resource.path(body["metadata"]["namespace"]), query=query, body=body, accept=_METADATA)

    async def apply(
        self, resource: Resource, body: Json, *, subresource: str | None = None, manager: str = labels.MANAGER
    ) -> Json:
        """See KubeClient. Takes ownership of the applied fields."""
        metadata = body["metadata"]
        path = resource.path(metadata["namespace"], metadata["name"], subresource)
        query = {"fieldManager": manager, "force": "true"}
        return await self._json("PATCH", path, query=query, body=body, content_type=_APPLY, accept=_accept(subresource))

    async def merge(
        self, resource: Resource, namespace: str, name: str, patch: Mapping[str, Any], *, subresource: str | None = None
    ) -> Json:
        """See KubeClient."""
        path, query = resource.path(namespace, name, subresource), {"fieldManager": labels.MANAGER}
        return await self._json("PATCH", path, query=query, body=dict(patch), content_type=_MERGE, accept=_accept(subresource))

    async def replace(self, resource: Resource, body: Json) -> Json:
        """See KubeClient."""
        metadata = body["metadata"]
        return await self._json("PUT", resource.path(metadata["namespace"], metadata["name"]), body=body)

    async def delete(self, resource: Resource, namespace: str, name: str, uid: str, *, grace_s: int | None = None) -> None:
        """See KubeClient. Without `grace_s`, dependents are deleted first."""
        options: Json = {
            "apiVersion": "v1",
            "kind": "DeleteOptions",
            "propagationPolicy": "Foreground" if grace_s is None else "Background",
            "preconditions": {"uid": uid},
        } | ({} if grace_s is None else {"gracePeriodSeconds": grace_s})
        await self._json("DELETE", resource.path(namespace, name), body=options)

    async def list_page(self, resource: Resource, namespace: str | None, selector: str, after: str, *, fields: str = "") -> Page:
        """See KubeClient."""
        optional = {"labelSelector": selector, "fieldSelector": fields, "continue": after}
        query = {"limit": str(PAGE_SIZE)} | {name: value for name, value in optional.items() if value}
        answer = await self._json("GET", resource.path(namespace), query=query)
        metadata = answer["metadata"]
        return Page(answer.get("items") or [], metadata["resourceVersion"], metadata.get("continue") or "")

    async def watch(self, resource: Resource, namespace: str | None, selector: str, resource_version: str) -> AsyncIterator[Json]:
        """See KubeClient."""
        query = {
            "watch": "true",
            "allowWatchBookmarks": "true",
            "resourceVersion": resource_version,
            "timeoutSeconds": str(WATCH_S),
        } | ({"labelSelector": selector} if selector else {})
        timeout = aiohttp.ClientTimeout(connect=REQUEST_TIMEOUT_S, sock_read=self._silence_s)
        response = await self._send("GET", resource.path(namespace), query=query, timeout=timeout)
        try:
            async for event in _events(response.content, self._read_event):
                yield event
        except TimeoutError as error:
            raise Retry(f"watch of {resource.plural}: no data") from error
        # A DecodeError of a truncated line is not always a ValueError.
        except (aiohttp.ClientError, OSError, ValueError, msgspec.DecodeError) as error:
            raise Retry(f"watch of {resource.plural}: {error}") from error
        finally:
            response.close()

    async def _json(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str] | None = None,
        body: Json | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
    ) -> Json:
        response = await self._send(
            method, path, query=query or {}, body=body, content_type=content_type, accept=accept, timeout=_REQUEST_TIMEOUT
        )
        try:
            answer: Json = msgspec.json.decode(await response.read())
        except (aiohttp.ClientError, TimeoutError, OSError, ValueError, msgspec.DecodeError) as error:
            raise Retry(f"{method} {path}: {type(error).__name__}: {error}") from error
        return answer

    async def _send(
        self,
        method: str,
        path: str,
        *,
        query: Mapping[str, str],
        body: Json | None = None,
        content_type: str = "application/json",
        accept: str = "application/json",
        timeout: aiohttp.ClientTimeout,
    ) -> Any:
        """Returns the response with its body unread."""
        headers: dict[str, str] = {"Accept": accept, "Content-Type": content_type, "User-Agent": labels.MANAGER}
        if self._token is not None:
            headers["Authorization"] = f"Bearer {self._token}"
        else:
            await self._client.update_params_for_auth(
                headers, None, auth_settings=["BearerToken"], resource_path=path, method=method, body=body
            )
        url = f"{self._client.configuration.host}{path}" + (f"?{urllib.parse.urlencode(query)}" if query else "")
        sent_s = time.monotonic()
        try:
            response = await _session(self._client.rest_client).request(
                method,
                url,
                headers=headers,
                data=None if body is None else msgspec.json.encode(body),
                timeout=timeout,
                proxy=self._client.configuration.proxy,
                proxy_headers=self._client.configuration.proxy_headers,
                server_hostname=self._client.configuration.tls_server_name,
                allow_redirects=self._token is None,
            )
            self._clock.observe(response.headers.get("Date", ""), sent_s, time.monotonic())
            if response.status < 300:
                return response
            text = (await response.read()).decode(errors="replace")
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise Retry(f"{method} {path}: {type(error).__name__}: {error}") from error
        raise error_for(response.status, f"{method} {path}", text)


def _accept(subresource: str | None) -> str:
    return "application/json" if subresource else _METADATA


def _session(rest: Any) -> Any:
    """Returns the official client's session; its `request` encodes ten times slower."""
    if rest.pool_manager is None:
        rest.pool_manager = rest._create_pool_manager()
    return rest.pool_manager


async def _events(content: aiohttp.StreamReader, read: Callable[[bytes], Json]) -> AsyncIterator[Json]:
    """Yields the events of a watch. Raises `ERROR` events."""
    partial = b""
    while True:
        chunk = await content.readany()  # a busy watch has many events in one chunk
        *lines, partial = (partial + chunk).split(b"\n")
        lines += [] if chunk or not partial else [partial]  # the end of the stream, mostly truncated
        for line in lines:
            event = read(line)
            if event["type"] == "ERROR":
                status = event["object"]
                raise error_for(int(status.get("code", 500)), "watch", str(status.get("message", "")))
            yield event
        if not chunk:
            return


def error_for(status: int, call: str, text: str) -> KubeError:
    """Returns the error of a response. `text`: a Status, or a proxy's text."""
    message, reason = text[:500], ""
    try:
        answer = msgspec.json.decode(text)
        message, reason = str(answer.get("message", message)), str(answer.get("reason", ""))
    except (ValueError, msgspec.DecodeError, AttributeError):
        pass  # not a Status: a proxy answered
    description = f"{call}: {status} {message}"
    if status in (404, 410):
        return Gone(description)
    if status == 409 or (status == 422 and "metadata.uid" in message):  # a patch of an earlier object
        return Conflict(description)
    if status == 401:
        return Unauthenticated(description)
    if status == 403:
        return Rejected(description) if ("exceeded quota" in message or "PodSecurity" in message) else Denied(description)
    if status in (400, 422) or reason == "Invalid" or message.startswith(_UNTYPED):
        return Rejected(description)
    return Retry(description)
