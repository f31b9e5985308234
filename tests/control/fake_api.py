"""An API server in memory behind real HTTP, as much of one as the operator's programs need: discovery, lists, watches, writes.

Every write counts a version up; a replace of an older version is a conflict. There are no controllers.
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
Where = tuple[str, str, str]
"""Plural, namespace, name."""


def _kind(plural: str, kind: str, namespaced: bool) -> Json:
    verbs = ["get", "list", "watch", "create", "patch", "delete"]
    return {"name": plural, "singularName": kind.lower(), "namespaced": namespaced, "kind": kind, "verbs": verbs}


def _kinds(version: str, kind: Json) -> Json:
    return {"kind": "APIResourceList", "groupVersion": version, "resources": [kind]}


def _group(group: str, version: str) -> Json:
    one = {"groupVersion": f"{group}/{version}", "version": version}
    return {"name": group, "versions": [one], "preferredVersion": one}


NAMESPACES = _kind("namespaces", "Namespace", False)
GROUPS = (
    (api.GROUP, api.VERSION, _kind(api.PLURAL, api.KIND, True)),
    ("apiextensions.k8s.io", "v1", _kind("customresourcedefinitions", "CustomResourceDefinition", False)),
)
"""What kopf looks for before it watches anything."""


@dataclass(frozen=True, slots=True)
class Call:
    """One request: its path taken apart."""

    api_version: str
    plural: str
    namespace: str
    name: str
    subresource: str


def parse(path: str) -> Call | None:
    """The parts of a path of objects; None for any other."""
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
    """The server. `objects` may be read and `put` by a test; `writes` are those of clients, in order."""

    def __init__(self) -> None:
        self.objects: dict[Where, Json] = {}
        self.writes: list[tuple[str, Where, Json]] = []
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
        """Ends every connection."""
        if self._runner is not None:
            await self._runner.cleanup()

    def of(self, plural: str) -> dict[str, Json]:
        """Objects of a kind by name."""
        return {where[2]: body for where, body in self.objects.items() if where[0] == plural}

    def put(self, plural: str, body: Json, kind: str = "MODIFIED") -> Json:
        """The object as it is now; watches hear of it."""
        metadata = body["metadata"]
        where = (plural, metadata.get("namespace", ""), metadata["name"])
        self._version += 1
        at = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
        fixed = {"uid": f"uid-{self._version}", "creationTimestamp": at, "generation": 1}
        body = copy.deepcopy(body) | {"metadata": fixed | metadata | {"resourceVersion": str(self._version)}}
        kind = "ADDED" if where not in self.objects else kind
        if kind == "DELETED":
            self.objects.pop(where, None)
        else:
            self.objects[where] = body
        self._events.append((self._version, kind, plural, body))
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()
        return body

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        found = self._discover(request.path)
        if found is not None:
            return web.json_response(found)
        call = parse(request.path)
        if call is None:
            return _failure(404, "no such path")
        if request.method == "GET" and not call.name:
            return await self._watch(request, call) if "watch" in request.query else self._list(call)
        return await self._object(request, call)

    def _discover(self, path: str) -> Json | None:
        """What kinds there are, or None for another path."""
        found: dict[str, Json] = {
            "/version": {"major": "1", "minor": "36", "gitVersion": "v1.36.0"},
            "/api": {"kind": "APIVersions", "versions": ["v1"]},
            "/api/v1": _kinds("v1", NAMESPACES),
            "/apis": {"kind": "APIGroupList", "groups": [_group(group, version) for group, version, _ in GROUPS]},
        }
        found |= {f"/apis/{group}/{version}": _kinds(f"{group}/{version}", kind) for group, version, kind in GROUPS}
        return found.get(path.rstrip("/"))

    def _list(self, call: Call) -> web.Response:
        items = [b for (plural, ns, _), b in self.objects.items() if plural == call.plural and call.namespace in ("", ns)]
        metadata = {"resourceVersion": str(self._version)}
        return web.json_response({"kind": "List", "apiVersion": call.api_version, "metadata": metadata, "items": items})

    async def _watch(self, request: web.Request, call: Call) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        seen = int(request.query.get("resourceVersion") or 0)
        with suppress(ConnectionResetError):
            while True:
                for version, kind, plural, body in list(self._events):
                    if version > seen and plural == call.plural:
                        await response.write(json.dumps({"type": kind, "object": body}).encode() + b"\n")
                    seen = max(seen, version)
                with suppress(TimeoutError):
                    async with asyncio.timeout(1):
                        await self._changed.wait()
        return response

    async def _object(self, request: web.Request, call: Call) -> web.Response:
        text = await request.text()
        sent: Json = json.loads(text) if text else {}
        name = call.name or sent.get("metadata", {}).get("name", "")
        where = (call.plural, call.namespace, name)
        there = self.objects.get(where)
        if request.method == "GET":
            return _asked(request, there) if there else _failure(404, "not found")
        if "dryRun" not in request.query:
            self.writes.append((request.method, where, sent))
        match request.method:
            case "POST" if there:
                return _failure(409, "exists")
            case "PUT" if there and sent["metadata"]["resourceVersion"] != there["metadata"]["resourceVersion"]:
                return _failure(409, "changed meanwhile")
            case "PATCH" if _is_bound_to_another(sent.get("metadata", {}), there):
                return _failure(409, "another object, or another version of it")
            case "PATCH" if not there and "apply" not in request.content_type:
                return _failure(404, "not found")
            case "DELETE":
                return web.json_response(self.put(call.plural, there, "DELETED")) if there else _failure(404, "not found")
        if "dryRun" in request.query:
            return _asked(request, sent)
        return _asked(request, self.put(call.plural, _merged(there, sent) if request.method == "PATCH" and there else sent))


def _asked(request: web.Request, body: Json) -> web.Response:
    """As much of an object as the client asks for."""
    is_whole = "as=PartialObjectMetadata" not in request.headers.get("Accept", "")
    return web.json_response(body if is_whole else {"metadata": body["metadata"]})


def _is_bound_to_another(wanted: Json, there: Json | None) -> bool:
    """Whether a patch names the UID or the version of another object: only what has a version may be made by it."""
    found = there["metadata"] if there else {}
    if "uid" in wanted and wanted["uid"] != found.get("uid"):
        return True
    return bool(found) and wanted.get("resourceVersion", found["resourceVersion"]) != found["resourceVersion"]


def _merged(there: Json, patch: Json) -> Json:
    """The object with the patch laid over it; null takes a field away."""
    made = dict(there)
    for key, value in patch.items():
        if value is None:
            made.pop(key, None)
        else:
            made[key] = _merged(made.get(key) or {}, value) if isinstance(value, dict) else value
    return made


def _failure(code: int, message: str) -> web.Response:
    return web.json_response({"kind": "Status", "status": "Failure", "code": code, "message": message}, status=code)
