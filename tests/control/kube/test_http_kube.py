"""The HTTP client against a scripted API server."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import msgspec
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from kubernetes.aio.client import ApiClient, Configuration

from phalanx_operator.kube.client import (
    DEPLOYMENTS,
    INFERENCE_SERVICES,
    PODS,
    RESOURCES,
    Conflict,
    Denied,
    Gone,
    KubeError,
    Rejected,
    Retry,
    Unauthenticated,
    resource_of,
)
from phalanx_operator.kube.http import HttpKube, error_for, prepare, without_credentials
from phalanx_operator.kube.informer import read_event
from tests.polling import until

MANY = 110
"""More than the connections that aiohttp opens by default."""
BODY = {"apiVersion": "apps/v1", "kind": "Deployment", "metadata": {"name": "n", "namespace": "ns"}}


class Server:
    """Records requests and sends the answers that a test sets."""

    def __init__(self) -> None:
        self.requests: list[tuple[str, str, dict[str, str], str, str]] = []
        self.status = 200
        self.answer: Any = {"metadata": {"name": "n", "resourceVersion": "5"}}
        self.lines: list[bytes] = []
        self.hangs = False
        self.extra: dict[str, str] = {}
        """Headers of answers."""
        self.client: Any = None
        """Connected to this server."""

    async def handle(self, request: web.Request) -> web.StreamResponse:
        text = await request.text()
        headers = request.headers
        self.requests.append((request.method, request.path, dict(request.query), headers.get("Content-Type", ""), text))
        self.auth, self.accept, self.cookie = headers.get("Authorization"), headers["Accept"], headers.get("Cookie")
        if "watch" not in request.query:
            text = self.answer if isinstance(self.answer, str) else json.dumps(self.answer)
            return web.Response(status=self.status, text=text, headers=self.extra)
        response = web.StreamResponse()
        await response.prepare(request)
        for line in self.lines:
            await response.write(line)
        if self.hangs:
            await asyncio.Event().wait()
        return response


@pytest.fixture
async def served() -> AsyncIterator[tuple[Server, HttpKube]]:
    server = Server()
    app = web.Application()
    app.router.add_route("*", "/{path:.*}", server.handle)
    async with TestServer(app) as running:
        configuration = Configuration(host=str(running.make_url("")).rstrip("/"))
        configuration.api_key["BearerToken"] = "bearer t0ken"
        prepare(configuration)
        async with ApiClient(configuration) as client:
            server.client = client
            yield server, HttpKube(client)


Served = tuple[Server, HttpKube]


async def test_each_call_sends_the_expected_request(served: Served) -> None:
    server, kube = served
    await kube.get(DEPLOYMENTS, "ns", "n")
    await kube.create(DEPLOYMENTS, BODY)
    await kube.create(DEPLOYMENTS, BODY, dry_run=True)
    await kube.apply(INFERENCE_SERVICES, BODY, subresource="status")
    await kube.merge(INFERENCE_SERVICES, "ns", "n", {"spec": {}})
    await kube.replace(DEPLOYMENTS, BODY)
    await kube.delete(DEPLOYMENTS, "ns", "n", "uid-7")
    group = "/apis/apps/v1/namespaces/ns/deployments"
    service = "/apis/phalanx.dev/v1alpha1/namespaces/ns/inferenceservices/n"
    manager = {"fieldManager": "phalanx-operator"}
    assert [request[:4] for request in server.requests] == [
        ("GET", f"{group}/n", {}, "application/json"),
        ("POST", group, manager | {"fieldValidation": "Strict"}, "application/json"),
        ("POST", group, manager | {"fieldValidation": "Strict", "dryRun": "All"}, "application/json"),
        ("PATCH", f"{service}/status", manager | {"force": "true"}, "application/apply-patch+yaml"),
        ("PATCH", service, manager, "application/merge-patch+json"),
        ("PUT", f"{group}/n", {}, "application/json"),
        ("DELETE", f"{group}/n", {}, "application/json"),
    ]
    assert json.loads(server.requests[1][4]) == BODY
    options = json.loads(server.requests[-1][4])
    assert (options["preconditions"], options["propagationPolicy"]) == ({"uid": "uid-7"}, "Foreground")
    assert server.auth == "bearer t0ken"


@pytest.mark.parametrize(
    ("call", "is_full"),
    [
        (lambda kube: kube.get(PODS, "ns", "n"), True),
        (lambda kube: kube.get(PODS, "ns", "n", metadata_only=True), False),
        (lambda kube: kube.create(DEPLOYMENTS, BODY), False),
        (lambda kube: kube.apply(DEPLOYMENTS, BODY), False),
        (lambda kube: kube.apply(INFERENCE_SERVICES, BODY, subresource="status"), True),
        (lambda kube: kube.merge(PODS, "ns", "n", {}), False),
        (lambda kube: kube.merge(INFERENCE_SERVICES, "ns", "n", {}, subresource="scale"), True),
        (lambda kube: kube.replace(DEPLOYMENTS, BODY), True),
    ],
    ids=["get", "get metadata", "create", "apply", "apply status", "merge", "merge scale", "replace"],
)
async def test_only_the_read_parts_of_objects_are_requested(
    served: Served, call: Callable[[HttpKube], Awaitable[Any]], is_full: bool
) -> None:
    server, kube = served
    await call(kube)
    assert ("PartialObjectMetadata" not in server.accept) is is_full


async def test_lists_are_read_in_pages(served: Served) -> None:
    server, kube = served
    server.answer = {"metadata": {"resourceVersion": "9", "continue": "more"}, "items": [{"a": 1}]}
    first = await kube.list_page(PODS, None, "a=b", "")
    server.answer = {"metadata": {"resourceVersion": "9"}, "items": None}
    last = await kube.list_page(PODS, "ns", "a=b", first.next_page)
    assert (first.items, first.next_page, last.items, last.next_page) == ([{"a": 1}], "more", [], "")
    assert [request[1:3] for request in server.requests] == [
        ("/api/v1/pods", {"labelSelector": "a=b", "limit": "500"}),
        ("/api/v1/namespaces/ns/pods", {"labelSelector": "a=b", "limit": "500", "continue": "more"}),
    ]


async def test_watch_yields_events_until_the_server_closes_it(served: Served) -> None:
    server, kube = served
    server.lines = [b'{"type": "ADDED", "object": {"a": 1}}\n', b'{"type": "BOOKMARK", "object": {}}\n']
    assert [event["type"] async for event in kube.watch(PODS, None, "a=b", "7")] == ["ADDED", "BOOKMARK"]
    query = server.requests[0][2]
    assert (query["resourceVersion"], query["allowWatchBookmarks"]) == ("7", "true")


@pytest.mark.parametrize("size", [1, 7, 40, 1000])
@pytest.mark.parametrize("end", [b"", b"\n"], ids=["no newline", "newline"])
async def test_events_are_independent_of_chunk_boundaries(served: Served, size: int, end: bytes) -> None:
    server, _ = served
    kube = HttpKube(server.client, read_event=read_event)
    text = b"\n".join(b'{"type": "ADDED", "object": {"metadata": {"uid": "%d"}}}' % number for number in range(3)) + end
    server.lines = [text[at : at + size] for at in range(0, len(text), size)]
    assert [event["object"]["metadata"]["uid"] async for event in kube.watch(PODS, None, "", "7")] == ["0", "1", "2"]


@pytest.mark.parametrize("read", [msgspec.json.decode, read_event])
@pytest.mark.parametrize(
    ("line", "error"),
    [
        (b'{"type": "ERROR", "object": {"code": 410, "message": "too old"}}\n', Gone),
        (b'{"type": "ADDED", "obj', Retry),
    ],
    ids=["too old", "cut off"],
)
async def test_broken_watch_raises(served: Served, line: bytes, error: type[KubeError], read: Any) -> None:
    server, _ = served
    kube = HttpKube(server.client, read_event=read)
    server.lines = [line]
    with pytest.raises(error):
        _ = [event async for event in kube.watch(PODS, None, "", "7")]


async def test_silent_watch_raises(served: Served) -> None:
    server, _ = served
    kube = HttpKube(server.client, silence_s=0.05)
    server.hangs = True
    with pytest.raises(Retry, match="no data"):
        _ = [event async for event in kube.watch(PODS, None, "", "7")]


async def test_watches_of_many_namespaces_delay_no_call(served: Served) -> None:
    server, kube = served
    server.hangs = True

    async def follow(namespace: str) -> None:
        _ = [event async for event in kube.watch(PODS, namespace, "", "7")]

    async with asyncio.TaskGroup() as tasks:
        watches = [tasks.create_task(follow(f"team-{number}")) for number in range(MANY)]
        await until(lambda: len(server.requests) == MANY)
        await kube.get(PODS, "ns", "n")
        for watch in watches:
            watch.cancel()


async def test_response_that_is_no_json_may_be_retried(served: Served) -> None:
    server, kube = served
    server.answer = "<html>"
    with pytest.raises(Retry):
        await kube.get(PODS, "ns", "n")


async def test_error_contains_the_message_of_the_server(served: Served) -> None:
    server, kube = served
    server.status, server.answer = 422, {"message": "spec.x: no", "reason": "Invalid"}
    with pytest.raises(Rejected, match=r"422 spec\.x: no"):
        await kube.create(DEPLOYMENTS, BODY)


async def test_a_token_of_a_user_replaces_all_credentials(served: Served) -> None:
    server, _ = served
    own = server.client.configuration
    own.cert_file, own.key_file = "/absent/operator.crt", "/absent/operator.key"
    own.host = own.host.replace("127.0.0.1", "localhost")  # clients keep no cookie of an address
    async with without_credentials(server.client) as bare:
        assert (bare.configuration.cert_file, bare.configuration.key_file, bare.configuration.api_key) == (None, None, {})
        assert bare.configuration.ssl_ca_cert == own.ssl_ca_cert
        await HttpKube(bare, token="of-the-user").get(PODS, "ns", "n")
        assert server.auth == "Bearer of-the-user"
        server.extra = {"Set-Cookie": "session=alice"}
        await HttpKube(bare, token="alice").get(PODS, "ns", "n")
        await HttpKube(bare, token="bob").get(PODS, "ns", "n")
        assert server.cookie is None, "no session of one user is another's"
        server.status, server.extra = 307, {"Location": "/elsewhere"}
        with pytest.raises(KubeError):
            await HttpKube(bare, token="alice").get(PODS, "ns", "n")
        assert server.requests[-1][1] != "/elsewhere", "a token follows no redirect"


async def test_unreachable_server_may_be_retried() -> None:
    async with ApiClient(Configuration(host="http://127.0.0.1:1")) as client:
        with pytest.raises(Retry):
            await HttpKube(client).get(PODS, "ns", "n")


@pytest.mark.parametrize(
    ("status", "text", "error"),
    [
        (404, "", Gone),
        (410, "", Gone),
        (409, "{}", Conflict),
        (422, "{}", Rejected),
        (400, "[]", Rejected),
        (401, "", Unauthenticated),
        (403, '{"message": "forbidden: User cannot"}', Denied),
        (403, '{"message": "forbidden: exceeded quota: q"}', Rejected),
        (403, '{"message": "violates PodSecurity"}', Rejected),
        (429, "slow down", Retry),
        (503, "", Retry),
        (500, '{"reason": "Invalid"}', Rejected),
        (500, '{"message": "failed to create typed patch object (a/b; apps/v1, Kind=Deployment): .spec.x: no field"}', Rejected),
        (500, '{"message": "etcdserver: request timed out"}', Retry),
    ],
)
def test_error_classes_table(status: int, text: str, error: type[KubeError]) -> None:
    assert type(error_for(status, "GET /x", text)) is error


def test_rendered_kinds_have_resources() -> None:
    assert resource_of(BODY) is DEPLOYMENTS
    assert {resource.path("ns") for resource in RESOURCES.values()} >= {"/api/v1/namespaces/ns/secrets"}


@pytest.mark.parametrize(
    ("environment", "configured", "proxy"),
    [
        ({}, None, None),
        ({"https_proxy": "http://proxy:3128"}, None, "http://proxy:3128"),
        ({"https_proxy": "http://proxy:3128", "no_proxy": "10.96.0.1"}, None, None),
        ({"https_proxy": "http://proxy:3128"}, "http://mine:1", "http://mine:1"),
        ({"http_proxy": "http://proxy:3128"}, None, None),
    ],
    ids=["none", "environment", "excluded host", "kubeconfig", "other scheme"],
)
def test_proxy_is_resolved_from_the_environment(
    environment: dict[str, str], configured: str | None, proxy: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("http_proxy", "https_proxy", "no_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    configuration = Configuration(host="https://10.96.0.1:443")
    configuration.proxy = configured
    prepare(configuration)
    assert configuration.proxy == proxy
    assert configuration.client_session_kwargs == {"trust_env": False}
