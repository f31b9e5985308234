"""What programs use: the operator by its own metrics, the control plane by /proc."""

import asyncio
import os
import time
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from phalanx_operator.kube.client import LEASES, PODS, STATEFUL_SETS, KubeClient, KubeError
from phalanx_operator.kube.informer import SELECTOR
from tests.cluster import namespaces
from tests.cluster.access import Cluster
from tests.cluster.config import NODES

OPERATOR_NAMESPACE = "phalanx-system"
TICKS = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True, slots=True)
class Use:
    """What the leader has used since its start, and now."""

    cpu_s: float
    rss_bytes: float
    queue: float
    at_s: float


async def leader_of(kube: KubeClient) -> tuple[str, str]:
    """Name and address of the operator's pod that leads."""
    while True:
        try:
            lease = await kube.get(LEASES, OPERATOR_NAMESPACE, "phalanx-operator")
            holder = lease["spec"].get("holderIdentity") or ""
            pod = await kube.get(PODS, OPERATOR_NAMESPACE, holder) if holder else {}
            if ip := (pod.get("status") or {}).get("podIP"):
                return holder, ip
        except KubeError:
            pass  # between two leaders
        await asyncio.sleep(0.2)


async def use_of(ip: str) -> Use:
    """What the operator at this address says of itself."""
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        page = (await http.get(f"http://{ip}:8080/metrics")).text
    values = {sample.name: sample.value for family in text_string_to_metric_families(page) for sample in family.samples}
    names = ("process_cpu_seconds_total", "process_resident_memory_bytes", "phalanx_operator_queue_keys")
    cpu_s, rss, queue = (values[name] for name in names)
    return Use(cpu_s, rss, queue, time.monotonic())


def control_plane_cpu(cluster: Cluster) -> dict[str, float]:
    """CPU seconds of each program of the control plane, and of this one."""
    found = {"this bench": sum(os.times()[:2])}
    if cluster.files is not None:
        for process in namespaces.processes(cluster.files.netns(NODES[0])):
            if process.name in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"):
                found[process.name] = _cpu_s(process.pid)
    return found


def _cpu_s(pid: int) -> float:
    with open(f"/proc/{pid}/stat") as stat:
        fields = stat.read().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / TICKS


class Sets:
    """When each service's StatefulSets were seen, by a watch of its own. Names of services are taken to be unique."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube
        self.seen: dict[str, dict[str, float]] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """For ever."""
        while True:
            try:
                page = await self._kube.list_page(STATEFUL_SETS, None, SELECTOR, "")
                async for event in self._kube.watch(STATEFUL_SETS, None, SELECTOR, page.resource_version):
                    if event["type"] == "ADDED":
                        metadata = event["object"]["metadata"]
                        service = metadata["labels"]["phalanx.dev/service"]
                        self.seen.setdefault(service, {}).setdefault(metadata["name"], time.monotonic())
                        self._changed.set()
            except KubeError:
                await asyncio.sleep(0.2)

    async def until(self, service: str, count: int) -> float:
        """When the last of so many was seen."""
        while len(self.seen.get(service, {})) < count:
            self._changed.clear()
            await self._changed.wait()
        return max(self.seen[service].values())
