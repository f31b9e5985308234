"""An API server in memory with controllers: StatefulSets and Deployments get pods, pods get nodes and run.

Objects have the size of real ones, including managed fields, and change as often, so that a client's cost equals that in a
cluster. Nothing is validated.
"""

import asyncio
import collections
import json
from typing import Any

from aiohttp import web

from phalanx_api import labels
from tests.control.fake_api import Call, FakeApi, Json, ObjectKey

UNKNOWN = frozenset({"podgroups", "httproutes", "servicemonitors", "prometheusrules"})
"""Kinds of projects that are not installed."""
_AT = "2026-01-01T00:00:00Z"
_RUNNING = ("Initialized", "Ready", "ContainersReady", "PodScheduled")


class LiveApi(FakeApi):
    def __init__(self, lag_s: float, address: str) -> None:
        super().__init__()
        self.counts: collections.Counter[str] = collections.Counter()  # requests by verb and kind
        self.started = 0  # running pods
        self._lag_s = lag_s  # delay of each controller step
        self._address = address
        self._watches: dict[str, list[asyncio.Queue[bytes]]] = collections.defaultdict(list)
        self._controller_tasks: set[asyncio.Task[None]] = set()

    def put(self, plural: str, body: Json, kind: str = "MODIFIED") -> Json:
        """Stores an object like a server: an update without changes is no event; managed fields are recorded."""
        where: ObjectKey = (plural, body["metadata"].get("namespace", ""), body["metadata"]["name"])
        previous = self.objects.get(where)
        if previous and kind != "DELETED" and _content(previous) == _content(body):
            return previous
        stored = super().put(plural, body | {"metadata": body["metadata"] | {"managedFields": _managed(body)}}, kind)
        line = (
            json.dumps({"type": "ADDED" if previous is None else kind, "object": stored}, separators=(",", ":")).encode() + b"\n"
        )
        for queue in self._watches[plural]:
            queue.put_nowait(line)
        if previous is None and plural in ("statefulsets", "deployments"):
            self._start_controller(self._make_pods(where))
        return stored

    def _start_controller(self, controller: Any) -> None:
        task = asyncio.ensure_future(controller)
        self._controller_tasks.add(task)
        task.add_done_callback(self._controller_tasks.discard)

    async def _watch(self, request: web.Request, call: Call) -> web.StreamResponse:
        """Sends only new events; clients list before they watch."""
        response, queue = web.StreamResponse(), asyncio.Queue[bytes]()
        await response.prepare(request)
        self._watches[call.plural].append(queue)
        try:
            while True:
                await response.write(await queue.get())
        finally:
            self._watches[call.plural].remove(queue)

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        parts = request.path.split("/")
        if not UNKNOWN.isdisjoint(parts):
            return web.json_response({"kind": "Status", "code": 404, "message": "404 page not found"}, status=404)
        return await super()._handle(request)

    async def _object(self, request: web.Request, call: Call) -> web.Response:
        kind = f"{call.plural}/{call.subresource}" if call.subresource else call.plural
        self.counts[f"{request.method} {kind}"] += 1
        return await super()._object(request, call)

    async def _make_pods(self, owner: ObjectKey) -> None:
        """Creates the pods of a StatefulSet, or the one of a router."""
        plural, namespace, name = owner
        await asyncio.sleep(self._lag_s)
        body, is_set = self.objects[owner], plural == "statefulsets"
        count = body["spec"]["replicas"] if is_set else 1
        for index in range(count):
            template = body["spec"]["template"]
            own = {labels.POD_INDEX: str(index), "statefulset.kubernetes.io/pod-name": f"{name}-{index}"} if is_set else {}
            holder = {
                "apiVersion": "apps/v1",
                "kind": body["kind"],
                "name": name,
                "uid": body["metadata"]["uid"],
                "controller": True,
            }
            metadata = template["metadata"] | {"name": f"{name}-{index}", "namespace": namespace, "ownerReferences": [holder]}
            metadata |= {"labels": template["metadata"]["labels"] | own}
            pod = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": dict(template["spec"])}
            self.put("pods", pod | {"status": {"phase": "Pending", "qosClass": "Burstable"}})
            self._start_controller(self._run_pod(("pods", namespace, f"{name}-{index}"), owner))
        self._set_status(owner, {"observedGeneration": 1, "replicas": count, "updatedReplicas": count})

    async def _run_pod(self, where: ObjectKey, owner: ObjectKey) -> None:
        """Schedules a pod, runs its containers, then counts it in its owner."""
        await asyncio.sleep(self._lag_s)
        pod = self.objects[where]
        placed = pod | {"spec": pod["spec"] | {"nodeName": "node"}, "status": pod["status"] | _conditions("PodScheduled")}
        self.put("pods", placed)
        await asyncio.sleep(self._lag_s)
        running = {"ready": True, "started": True, "restartCount": 0, "state": {"running": {"startedAt": _AT}}, "imageID": "fake"}
        containers = [
            {"name": container["name"], "image": container["image"]} | running for container in pod["spec"]["containers"]
        ]
        status = {"phase": "Running", "containerStatuses": containers, "podIP": self._address, "startTime": _AT}
        self._set_status(where, _conditions(*_RUNNING) | status)
        self.started += 1
        await asyncio.sleep(self._lag_s)
        ready = (self.objects[owner].get("status") or {}).get("readyReplicas", 0) + 1
        self._set_status(owner, {"readyReplicas": ready, "availableReplicas": ready})

    def _set_status(self, where: ObjectKey, status: Json) -> None:
        current = self.objects[where]
        self.put(where[0], current | {"status": (current.get("status") or {}) | status})


def _conditions(*kinds: str) -> Json:
    return {"conditions": [{"type": kind, "status": "True", "reason": "Fake", "lastTransitionTime": _AT} for kind in kinds]}


def _content(body: Json) -> Json:
    """Returns the object without fields that every write changes."""
    metadata = {name: value for name, value in body["metadata"].items() if name not in ("managedFields", "resourceVersion")}
    served = {"uid", "creationTimestamp", "generation"}
    return body | {"metadata": {name: value for name, value in metadata.items() if name not in served}}


def _managed(body: Json) -> list[Json]:
    """Returns managed fields: the operator owns the spec, a controller the status."""
    parts = [{name: body[name] for name in ("spec", "data") if name in body}, {"status": body.get("status", {})}]
    owners = ("phalanx-operator", "controller")
    return [
        {"manager": owner, "operation": "Apply", "time": _AT, "fieldsType": "FieldsV1", "fieldsV1": _fields(part)}
        for owner, part in zip(owners, parts, strict=True)
    ]


def _fields(value: Any) -> Json:
    if isinstance(value, dict):
        return {f"f:{name}": _fields(inner) for name, inner in value.items()}
    if isinstance(value, list) and value and all(isinstance(item, dict) and "name" in item for item in value):
        return {f'k:{{"name":"{item["name"]}"}}': {".": {}} | _fields(item) for item in value}
    return {}
