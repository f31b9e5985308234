"""Simulated nodes that exist only in the API server: they renew their Leases; their pods become ready and end at once.

They replace kwok: the few kubelet calls that the control plane needs, through the operator's client. Router pods get this
machine's address, where `answer_as_router` responds like a router without groups.
"""

import asyncio
import datetime
from collections.abc import Iterable

import msgspec
from aiohttp import web

from phalanx_api.summary import SUMMARY_PATH, Histogram, RouterSummary, SummaryRequest
from phalanx_api.wire import PROTOCOL_VERSION
from phalanx_operator.kube.client import LEASES, NODES, PODS, Conflict, Gone, Json, KubeClient, KubeError

PREFIX = "fake-"
LABEL = "phalanx.dev/fake"
RENEW_S = 5.0
LEASE_NAMESPACE = "kube-node-lease"
CAPACITY = {"cpu": "1000", "memory": "1000Gi", "pods": "1000"}
WORKERS = 16


def now() -> str:
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _conditions(kinds: Iterable[str]) -> list[Json]:
    at = now()[:19] + "Z"
    return [{"type": kind, "status": "True", "reason": "Fake", "message": "", "lastTransitionTime": at} for kind in kinds]


class FakeNodes:
    """Several nodes; `run` acts for all of them and their pods."""

    def __init__(self, kube: KubeClient, count: int, pod_ip: str, selector: str) -> None:
        self._kube = kube
        self._names = [f"{PREFIX}{number}" for number in range(count)]
        self._pod_ip = pod_ip
        self._selector = selector
        self._queue: asyncio.Queue[tuple[str, Json]] = asyncio.Queue()
        self.started: set[str] = set()
        """UIDs of pods that became ready."""

    async def create(self) -> None:
        for name in self._names:
            body = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "namespace": "", "labels": {LABEL: "true"}}}
            lease = {"apiVersion": LEASES.api_version, "kind": "Lease", "metadata": {"name": name, "namespace": LEASE_NAMESPACE}}
            spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": now()}
            for resource, manifest in ((NODES, body), (LEASES, lease | {"spec": spec})):
                try:
                    await self._kube.create(resource, manifest)
                except Conflict:
                    pass  # left by a killed run
            ready = _conditions(["Ready"])
            status = {"capacity": CAPACITY, "allocatable": CAPACITY, "conditions": ready, "nodeInfo": {"kubeletVersion": "fake"}}
            await self._kube.merge(NODES, "", name, {"metadata": {}, "status": status}, subresource="status")

    async def remove(self) -> None:
        for name in self._names:
            for resource, namespace in ((NODES, ""), (LEASES, LEASE_NAMESPACE)):
                try:
                    current = await self._kube.get(resource, namespace, name, metadata_only=True)
                    await self._kube.delete(resource, namespace, name, current["metadata"]["uid"])
                except (Gone, Conflict):
                    pass

    async def run(self) -> None:
        """Renews Leases and starts and ends pods, forever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._renew())
            tasks.create_task(self._watch())
            for _ in range(WORKERS):
                tasks.create_task(self._work())

    async def _renew(self) -> None:
        while True:
            for name in self._names:
                try:
                    await self._kube.merge(LEASES, LEASE_NAMESPACE, name, {"metadata": {}, "spec": {"renewTime": now()}})
                except KubeError:
                    pass  # retry
            await asyncio.sleep(RENEW_S)

    async def _watch(self) -> None:
        while True:
            try:
                next_page = ""
                while True:
                    page = await self._kube.list_page(PODS, None, self._selector, next_page)
                    for pod in page.items:
                        self._enqueue(pod)
                    next_page = page.next_page
                    if not next_page:
                        break
                async for event in self._kube.watch(PODS, None, self._selector, page.resource_version):
                    if event["type"] in ("ADDED", "MODIFIED"):
                        self._enqueue(event["object"])
            except KubeError:
                await asyncio.sleep(0.5)

    def _enqueue(self, pod: Json) -> None:
        if not pod["spec"].get("nodeName", "").startswith(PREFIX):
            return
        if "deletionTimestamp" in pod["metadata"]:
            self._queue.put_nowait(("end", pod))
        elif pod.get("status", {}).get("phase") == "Pending":
            self._queue.put_nowait(("start", pod))

    async def _work(self) -> None:
        while True:
            action, pod = await self._queue.get()
            metadata = pod["metadata"]
            try:
                if action == "end":
                    await self._kube.delete(PODS, metadata["namespace"], metadata["name"], metadata["uid"], grace_s=0)
                else:
                    patch = {"metadata": {"uid": metadata["uid"]}, "status": self._running(pod)}
                    await self._kube.merge(PODS, metadata["namespace"], metadata["name"], patch, subresource="status")
                    self.started.add(metadata["uid"])
            except (Gone, Conflict):
                pass  # another event follows
            except KubeError:
                self._queue.put_nowait((action, pod))
                await asyncio.sleep(0.2)

    def _running(self, pod: Json) -> Json:
        started = {"running": {"startedAt": now()[:19] + "Z"}}
        containers = [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "fake",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": started,
            }
            for container in pod["spec"]["containers"]
        ]
        return {
            "phase": "Running",
            "conditions": _conditions(["Initialized", "Ready", "ContainersReady", "PodScheduled"]),
            "containerStatuses": containers,
            "podIP": self._pod_ip,
            "podIPs": [{"ip": self._pod_ip}],
            "startTime": now()[:19] + "Z",
        }


async def answer_as_router(address: str, port: int) -> web.AppRunner:
    """Starts a server that answers the operator for every router; the caller calls `cleanup`."""

    async def answer(request: web.Request) -> web.Response:
        query = msgspec.json.decode(await request.read(), type=SummaryRequest)
        await asyncio.sleep(query.wait_s)
        summary = RouterSummary(
            router="fake",
            groups=[],
            traffic=[],
            queued=0,
            queued_tokens=0,
            held=0,
            idle_s=0.0,
            ttft=Histogram(),
            itl=Histogram(),
            version=PROTOCOL_VERSION,
        )
        return web.Response(body=msgspec.json.encode(summary), content_type="application/json")

    app = web.Application()
    app.router.add_post(SUMMARY_PATH, answer)
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, address, port).start()
    return runner
