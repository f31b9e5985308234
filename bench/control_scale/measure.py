"""Measures the operator by its metrics and the control plane by /proc."""

import asyncio
import os
import time
from dataclasses import dataclass

import httpx
from prometheus_client.parser import text_string_to_metric_families

from bench.frame.programs import cpu_s
from phalanx_operator.kube.client import LEASES, PODS, STATEFUL_SETS, KubeClient, KubeError
from phalanx_operator.kube.informer import SELECTOR
from tests.cluster import namespaces
from tests.cluster.access import Cluster
from tests.cluster.config import NODES

OPERATOR_NAMESPACE = "phalanx-system"


@dataclass(frozen=True, slots=True)
class Usage:
    cpu_s: float  # since its start
    rss_bytes: float
    queue: float  # keys
    at_s: float  # time of the measurement


async def find_leader(kube: KubeClient) -> tuple[str, str]:
    while True:
        try:
            lease = await kube.get(LEASES, OPERATOR_NAMESPACE, "phalanx-operator")
            holder = lease["spec"].get("holderIdentity") or ""
            pod = await kube.get(PODS, OPERATOR_NAMESPACE, holder) if holder else {}
            if ip := (pod.get("status") or {}).get("podIP"):
                return holder, ip
        except KubeError:
            pass  # retry
        await asyncio.sleep(0.2)


async def usage_of(ip: str) -> Usage:
    async with httpx.AsyncClient(timeout=30, trust_env=False) as http:
        page = (await http.get(f"http://{ip}:8080/metrics")).text
    values = {sample.name: sample.value for family in text_string_to_metric_families(page) for sample in family.samples}
    names = ("process_cpu_seconds_total", "process_resident_memory_bytes", "phalanx_operator_queue_keys")
    cpu, rss, queue = (values[name] for name in names)
    return Usage(cpu, rss, queue, time.monotonic())


def control_plane_cpu(cluster: Cluster) -> dict[str, float]:
    found = {"this bench": sum(os.times()[:2])}
    if cluster.files is not None:
        for process in namespaces.processes(cluster.files.netns(NODES[0])):
            if process.name in ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler"):
                found[process.name] = cpu_s(process.pid)
    return found


class StatefulSetTimes:
    """Records the creation time of each service's StatefulSets by a watch. Service names must be unique."""

    def __init__(self, kube: KubeClient) -> None:
        self._kube = kube
        self.created_s: dict[str, dict[str, float]] = {}
        self._changed = asyncio.Event()

    async def run(self) -> None:
        while True:
            try:
                page = await self._kube.list_page(STATEFUL_SETS, None, SELECTOR, "")
                async for event in self._kube.watch(STATEFUL_SETS, None, SELECTOR, page.resource_version):
                    if event["type"] == "ADDED":
                        metadata = event["object"]["metadata"]
                        service = metadata["labels"]["phalanx.dev/service"]
                        self.created_s.setdefault(service, {}).setdefault(metadata["name"], time.monotonic())
                        self._changed.set()
            except KubeError:
                await asyncio.sleep(0.2)

    async def until(self, service: str, count: int) -> float:
        """Waits for `count` StatefulSets; returns the time of the last."""
        while len(self.created_s.get(service, {})) < count:
            self._changed.clear()
            await self._changed.wait()
        return max(self.created_s[service].values())
