"""An API server in memory with an HTTP endpoint: discovery, lists, watches and writes.

Every write increments the version; a replace of an older version is a conflict. There are no controllers.
"""

import asyncio
import copy
import json
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from phalanx_api.spec import inference_service as api

Json = dict[str, Any]
ObjectKey = tuple[str, str, str]
"""Plural, namespace, name."""


def _kind(plural: str, kind: str, namespaced: bool) -> Json:
    verbs = ["get", "list", "watch", "create", "patch", "delete"]
    return {"name": plural, "singularName": kind.lower(), "namespaced": namespaced, "kind": kind, "verbs": verbs}


def _kinds(version: str, kind: Json) -> Json:
    return {"kind": "APIResourceList", "groupVersion": version, "resources": [kind]}


def _group(group: str, version: str) -> Json:
    served = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [served], "preferredVersion": served}


NAMESPACES = _kind("namespaces", "Namespace", False)
GROUPS = (
    (api.GROUP, api.VERSION, _kind(api.PLURAL, api.KIND, True)),
    ("apiextensions.k8s.io", "v1", _kind("customresourcedefinitions", "CustomResourceDefinition", False)),
)
"""kopf reads both before its first watch."""


@dataclass(frozen=True, slots=True)
class Call:
    """The parsed path of a request."""

    api_version: str
    plural: str
    namespace: str
    name: str
    subresource: str


def parse(path: str) -> Call | None:
    """Returns the parts of an object path."""
    parts = path.strip("/").split("/")
    head, rest = (parts[1:2], parts[2:]) if parts[0] == "api" else (parts[1:3], parts[3:])
    namespace = ""
    if len(rest) > 2 and rest[0] == "namespaces":
        namespace, rest = rest[1], rest[2:]
    if not rest:
        return None
    plural, name, subresource = (*rest, "", "")[:3]
    return Call("/".join(head), plural, namespace, name, subresource)


class FakeApi:
    """The server."""

    def __init__(self) -> None:
        self.objects: dict[ObjectKey, Json] = {}
        self.writes: list[tuple[str, ObjectKey, Json]] = []
        """Of clients, in order."""
        self.denied: set[str] = set()
        """Namespaces in which clients have no role, and kinds that they may not read."""
        self._events: list[tuple[int, str, str, Json]] = []
        self._version = 0
        self._changed = asyncio.Event()
        self._runner: web.AppRunner | None = None
        self.url = ""

    async def start(self) -> None:
        """Listens on a free port."""
        app = web.Application()
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, access_log=None, shutdown_timeout=0.1)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"

    async def stop(self) -> None:
        """Closes all connections."""
        if self._runner is not None:
            await self._runner.cleanup()

    def of(self, plural: str) -> dict[str, Json]:
        """Returns the objects of a kind by name."""
        return {key[2]: body for key, body in self.objects.items() if key[0] == plural}

    def put(self, plural: str, body: Json, kind: str = "MODIFIED") -> Json:
        """Stores and returns an object; sends it to watches."""
        metadata = body["metadata"]
        key = (plural, metadata.get("namespace", ""), metadata["name"])
        self._version += 1
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        fixed = {"uid": f"uid-{self._version}", "creationTimestamp": at, "generation": 1}
        body = copy.deepcopy(body) | {"metadata": fixed | metadata | {"resourceVersion": str(self._version)}}
        kind = "ADDED" if key not in self.objects else kind
        if kind == "DELETED":
            self.objects.pop(key, None)
        else:
            self.objects[key] = body
        self._events.append((self._version, kind, plural, body))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return body

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        document = self._discover(request.path)
        if document is not None:
            return web.json_response(document)
        call = parse(request.path)
        if call is None:
            return _failure(404, "no such path")
        if self.denied & {call.namespace, call.plural}:
            return _failure(403, "forbidden: no role")
        if request.method == "GET" and not call.name:
            return await self._watch(request, call) if "watch" in request.query else self._list(call)
        return await self._object(request, call)

    def _discover(self, path: str) -> Json | None:
        """Returns the discovery document of a path."""
        documents: dict[str, Json] = {
            "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/api/v1": _kinds("v1", NAMESPACES),
            "/apis": {"kind": "APIGroupList", "groups": [_group(group, version) for group, version, _ in GROUPS]},
        }
        documents |= {f"/apis/{group}/{version}": _kinds(f"{group}/{version}", kind) for group, version, kind in GROUPS}
        return documents.get(path.rstrip("/"))

    def _list(self, call: Call) -> web.Response:
        items = [b for (plural, ns, _), b in self.objects.items() if plural == call.plural and call.namespace in ("", ns)]
        metadata = {"resourceVersion": str(self._version)}
        return web.json_response({"kind": "List", "apiVersion": call.api_version, "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, call: Call) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        sent = int(request.query.get("resourceVersion") or 0)
        with suppress(ConnectionResetError):
            while True:
                for version, kind, plural, body in list(self._events):
                    if version > sent and plural == call.plural:
                        await response.write(json.dumps({"type": kind, "object": body}).encode() + b"\n")
                    sent = max(sent, version)
                with suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await self._changed.wait()
        return response

    async def _object(self, request: web.Request, call: Call) -> web.Response:
        text = await request.text()
        sent: Json = json.loads(text) if text else {}
        name = call.name or sent.get("metadata", {}).get("name", "")
        key = (call.plural, call.namespace, name)
        stored = self.objects.get(key)
        if request.method == "GET":
            return _response(request, stored) if stored else _failure(404, "not found")
        if "dryRun" not in request.query:
            self.writes.append((request.method, key, sent))
        match request.method:
            case "POST" if stored:
                return _failure(409, "exists")
            case "PUT" if stored and sent["metadata"]["resourceVersion"] != stored["metadata"]["resourceVersion"]:
                return _failure(409, "older version")
            case "PATCH" if _has_other_identity(sent.get("metadata", {}), stored):
                return _failure(409, "other UID or version")
            case "PATCH" if not stored and "apply" not in request.content_type:
                return _failure(404, "not found")
            case "DELETE":
                return web.json_response(self.put(call.plural, stored, "DELETED")) if stored else _failure(404, "not found")
        if "dryRun" in request.query:
            return _response(request, sent)
        return _response(request, self.put(call.plural, _merge(stored, sent) if request.method == "PATCH" and stored else sent))


def _response(request: web.Request, body: Json) -> web.Response:
    """Returns the object, or only its metadata if the client requests that."""
    is_full = "as=PartialObjectMetadata" not in request.headers.get("Accept", "")
    return web.json_response(body if is_full else {"metadata": body["metadata"]})


def _has_other_identity(metadata: Json, stored: Json | None) -> bool:
    """Whether a patch names another UID or version. A missing object has no UID and any version."""
    current = stored["metadata"] if stored else {}
    if "uid" in metadata and metadata["uid"] != current.get("uid"):
        return True
    return bool(current) and metadata.get("resourceVersion", current["resourceVersion"]) != current["resourceVersion"]


def _merge(stored: Json, patch: Json) -> Json:
    """Returns the object with the patch applied; null removes a field."""
    merged = dict(stored)
    for key, value in patch.items():
        if value is None:
            merged.pop(key, None)
        else:
            merged[key] = _merge(merged.get(key) or {}, value) if isinstance(value, dict) else value
    return merged


def _failure(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "code": code, "message": message}, status=code)
