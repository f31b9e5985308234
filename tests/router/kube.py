"""A small Kubernetes API server: pods of one namespace by list and watch, with pages, bookmarks, and failures on demand."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from aiohttp import web
from kubernetes.aio import client

from phalanx_router.links.endpoints import Leaders, leader_selector
from phalanx_router.links.leader_watch import WatchedLeaders
from tests.polling import until


def make_pod(
    uid: str, ip: str = "10.0.0.1", phase: str = "Running", is_leaving: bool = False, index: str = "0", draining: bool = False
) -> dict[str, dict[str, object]]:
    labels = {
        "phalanx.dev/service": "chat",
        "phalanx.dev/component": "group",
        "phalanx.dev/group": f"chat-g-{uid}",
        "apps.kubernetes.io/pod-index": index,
    }
    metadata: dict[str, object] = {
        "uid": uid,
        "name": f"chat-g-{uid}-0",
        "labels": labels,
        "creationTimestamp": "2026-01-01T00:00:00Z",
    }
    if draining:
        metadata["annotations"] = {"phalanx.dev/draining": "2026-01-02T00:00:00Z"}
    if is_leaving:
        metadata["deletionTimestamp"] = "2026-01-02T00:00:00Z"
    return {"metadata": metadata, "status": {"phase": phase, "podIP": ip}}


class FakeApi:
    """Serves GET /api/v1/namespaces/ns/pods. `pods`: result of a list; `emit`: next event of a watch."""

    def __init__(self) -> None:
        self.pods: dict[str, dict[str, dict[str, object]]] = {}
        self.version = 10
        self.page = 500
        self.lists = 0
        self.watches: list[dict[str, str]] = []
        self.fail: tuple[int, str] | None = None
        self.failures = 0
        self._lines: asyncio.Queue[bytes | None] = asyncio.Queue()

    def emit(self, type: str, obj: object) -> None:
        self._lines.put_nowait(json.dumps({"type": type, "object": obj}).encode() + b"\n")

    def emit_raw(self, data: bytes) -> None:
        self._lines.put_nowait(data)

    def change(self, type: str, pod: dict[str, dict[str, object]]) -> None:
        """Changes a pod in the list and emits the event."""
        self.version += 1
        uid = str(pod["metadata"]["uid"])
        if type == "DELETED":
            self.pods.pop(uid, None)
        else:
            self.pods[uid] = pod
        self.emit(type, {**pod, "metadata": {**pod["metadata"], "resourceVersion": str(self.version)}})

    def end_watch(self) -> None:
        self._lines.put_nowait(None)

    async def answer(self, request: web.Request) -> web.StreamResponse:
        if self.fail is not None:
            self.failures += 1
            return web.Response(status=self.fail[0], text=self.fail[1])
        if request.query.get("watch") not in ("true", "True"):
            return self._list(request)
        self.watches.append(dict(request.query))
        response = web.StreamResponse()
        await response.prepare(request)
        while (line := await self._lines.get()) is not None:
            await response.write(line)
        return response

    def _list(self, request: web.Request) -> web.Response:
        self.lists += 1
        assert request.query["labelSelector"] == (
            "phalanx.dev/service=chat,apps.kubernetes.io/pod-index=0,phalanx.dev/component=group"
        )
        pods = list(self.pods.values())
        start = int(request.query.get("continue") or 0)
        rest = str(start + self.page) if start + self.page < len(pods) else ""
        metadata = {"resourceVersion": str(self.version), "continue": rest}
        return web.json_response({"metadata": metadata, "items": pods[start : start + self.page]})


class RecordedLeaders:
    """Leaders that a source reported, newest last."""

    def __init__(self) -> None:
        self.lists: list[Leaders] = []

    def __call__(self, leaders: Leaders) -> None:
        self.lists.append(leaders)

    async def wait_for(self, *keys: str) -> None:
        """Waits until the last list has these keys."""
        await until(lambda: self.lists and set(self.lists[-1]) == set(keys))


@asynccontextmanager
async def watching(api: FakeApi, watch_s: int = 60, slack_s: float = 10.0) -> AsyncIterator[RecordedLeaders]:
    """Leaders of service chat in namespace ns."""
    app = web.Application()
    app.router.add_get("/api/v1/namespaces/ns/pods", api.answer)
    runner = web.AppRunner(app, shutdown_timeout=0.01, handler_cancellation=True)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    host, port = runner.addresses[0][:2]
    settings = client.Configuration(host=f"http://{host}:{port}")
    source = WatchedLeaders(
        client.CoreV1Api(client.ApiClient(settings)),
        "ns",
        leader_selector("chat"),
        watch_s,
        slack_s,
        first_retry_s=0.005,
        last_retry_s=0.01,
    )
    recorded = RecordedLeaders()
    task = asyncio.create_task(source.run(recorded))
    try:
        yield recorded
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        await runner.cleanup()
