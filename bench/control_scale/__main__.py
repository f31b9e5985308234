"""Measures the operator by number of services in the test cluster.

    python3 -m tests.cluster up --images
    python3 -m tests.cluster run $(python3 tools/bootstrap.py dev)/bin/python -m bench.control_scale --services 200 --rate 1

    ... --services 200 --rate 5      shows what saturates at a higher rate
    ... --namespaces 1               one namespace: Kubernetes' controllers list all its pods for each service
    ... --check                      exits with 1 if a bound is missed

Each service has five groups of two pods and a router on simulated nodes (`bench.control_scale.nodes`, instead of kwok); the real
nodes are cordoned and run the operator. Services go to `--namespaces` in turn. Each stage of `--stage` services measures: seconds
from the create call's answer until a watch shows the service's last StatefulSet; the operator's CPU per service, resident memory
and idle CPU, from its metrics; CPU of the control plane. Finally the leader is stopped, then another one killed, and a change is
timed. Prints a line for each missed bound (`bench.control_scale.bounds`), and JSON as the last line.
"""

import argparse
import asyncio
import json
import statistics
import sys
import time
import uuid
from collections.abc import Sequence
from typing import Any

from bench.control_scale import nodes
from bench.control_scale.bounds import missed
from bench.control_scale.measure import OPERATOR_NAMESPACE, StatefulSetTimes, Usage, control_plane_cpu, find_leader, usage_of
from phalanx_api import labels
from phalanx_operator.kube.client import INFERENCE_SERVICES, PODS, Conflict, Json, KubeClient, KubeError, Retry
from phalanx_operator.kube.client import NODES as NODE
from phalanx_operator.kube.http import HttpKube, connect
from tests.cluster import operator as installation
from tests.cluster.access import Cluster, local_cluster
from tests.cluster.config import API_IP, NODES

GROUPS, PODS_PER_GROUP = 5, 2
FAKE_NODES = 12
IDLE_S = 60.0


def service(namespace: str, name: str) -> Json:
    """Returns the manifest of a service; its model is never read."""
    spec = {
        "model": {"uri": "hf://example/model"},
        "replicas": GROUPS,
        "parallelism": {"tensor": PODS_PER_GROUP, "gpusPerPod": 1},
        "resources": {"accelerator": {"resourceName": ""}, "cpu": "1", "memory": "1Gi"},
        "router": {"replicas": 1},
    }
    metadata = {"name": name, "namespace": namespace}
    return {"apiVersion": "phalanx.dev/v1alpha1", "kind": "InferenceService", "metadata": metadata, "spec": spec}


class Bench:
    """One run: services are created stage by stage, in each namespace in turn."""

    def __init__(self, cluster: Cluster, kube: KubeClient, namespaces: Sequence[str], fake: nodes.FakeNodes) -> None:
        self._cluster = cluster
        self._kube = kube
        self._namespaces = namespaces
        self._fake = fake
        self._set_times = StatefulSetTimes(kube)
        self._num_created = 0

    async def measure(self, services: int, rate: float, stage: int) -> dict[str, Any]:
        watch_task = asyncio.create_task(self._set_times.run())
        await asyncio.sleep(1)
        stages = []
        while self._num_created < services:
            stages.append(await self._stage(min(stage, services - self._num_created), rate))
            print(json.dumps(stages[-1]), flush=True)
        resumed_s = await self._resume(is_killed=False)
        overtaken_s = await self._resume(is_killed=True)
        print(json.dumps({"resumed_s": resumed_s, "overtaken_s": overtaken_s}), flush=True)
        watch_task.cancel()
        await asyncio.gather(watch_task, return_exceptions=True)
        return {
            "rate": rate,
            "namespaces": len(self._namespaces),
            "stages": stages,
            "resumed_s": resumed_s,
            "overtaken_s": overtaken_s,
        }

    async def _stage(self, count: int, rate: float) -> dict[str, Any]:
        _, ip = await find_leader(self._kube)
        before, control = await usage_of(ip), control_plane_cpu(self._cluster)
        started = time.monotonic()
        delays = await asyncio.gather(*(self._apply(self._num_created + i, started + i / rate) for i in range(count)))
        self._num_created += count
        after = await self._settle(ip)
        control_after = control_plane_cpu(self._cluster)
        await asyncio.sleep(IDLE_S)
        idle = await usage_of(ip)
        duration_s = after.at_s - before.at_s
        return {
            "services": self._num_created,
            "last_set_s": _quantiles(delays),
            "settled_s": round(after.at_s - started, 1),
            "operator_cpu_ms_per_service": round(1000 * (after.cpu_s - before.cpu_s) / count, 1),
            "operator_rss_mib": round(idle.rss_bytes / 2**20, 1),
            "operator_idle_share_of_a_core": round((idle.cpu_s - after.cpu_s) / (idle.at_s - after.at_s), 4),
            "cores": {name: round((control_after[name] - used) / duration_s, 2) for name, used in control.items()},
        }

    async def _apply(self, number: int, start_s: float) -> float:
        """Creates a service; returns seconds from the API server's answer until its last StatefulSet."""
        await asyncio.sleep(max(start_s - time.monotonic(), 0))
        name = f"scale-{number:04}"
        await self._create(self._namespaces[number % len(self._namespaces)], name)
        applied = time.monotonic()
        return await self._set_times.until(name, GROUPS) - applied

    async def _create(self, namespace: str, name: str) -> None:
        while True:
            try:
                await self._kube.create(INFERENCE_SERVICES, service(namespace, name))
                return
            except Conflict:
                return  # created; the answer was lost
            except Retry:
                await asyncio.sleep(0.2)

    async def _settle(self, ip: str) -> Usage:
        """Waits until all pods are ready and the operator's queue was empty three times in a row; returns the usage."""
        num_idle = 0
        while True:
            usage = await usage_of(ip)
            is_idle = len(self._fake.started) >= self._num_created * (GROUPS * PODS_PER_GROUP + 1) and usage.queue == 0
            num_idle = num_idle + 1 if is_idle else 0
            if num_idle == 3:
                return usage
            await asyncio.sleep(1)

    async def _resume(self, is_killed: bool) -> float:
        """Stops or kills the leader; returns seconds until a change made then is followed."""
        number, (holder, _) = 0 if is_killed else 1, await find_leader(self._kube)
        name, namespace = f"scale-{number:04}", self._namespaces[number % len(self._namespaces)]
        pod = await self._kube.get(PODS, OPERATOR_NAMESPACE, holder)
        started = time.monotonic()
        await self._kube.delete(PODS, OPERATOR_NAMESPACE, holder, pod["metadata"]["uid"], grace_s=0 if is_killed else 30)
        patch = {"metadata": {}, "spec": {"replicas": GROUPS + 1}}
        await self._kube.merge(INFERENCE_SERVICES, namespace, name, patch)
        return round(await self._set_times.until(name, GROUPS + 1) - started, 1)


def _quantiles(delays: list[float]) -> dict[str, float]:
    ordered = sorted(delays)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 2), "p99": round(p99, 2), "max": round(ordered[-1], 2)}


def _pin_to_real_nodes(cluster: Cluster, is_pinned: bool) -> None:
    """Restricts the operator to the real, cordoned nodes: kubelets label them with the operating system."""
    tolerations = [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]
    pod_spec = {
        "nodeSelector": {"kubernetes.io/os": "linux"} if is_pinned else None,
        "tolerations": tolerations if is_pinned else None,
    }
    patch = json.dumps({"spec": {"template": {"spec": pod_spec}}})
    namespace = ("-n", OPERATOR_NAMESPACE)
    cluster.kubectl(*namespace, "patch", "deployment", "phalanx-operator", "--type=merge", "-p", patch)
    cluster.kubectl(*namespace, "rollout", "status", "deployment/phalanx-operator", "--timeout=120s")


async def _cordon(kube: KubeClient, is_cordoned: bool) -> None:
    for node in NODES:
        await kube.merge(NODE, "", node.name, {"metadata": {}, "spec": {"unschedulable": is_cordoned or None}})


async def _wait_empty(kube: KubeClient, namespace: str) -> None:
    """Waits until the namespace has no pods; the simulated nodes must end them."""
    for _ in range(300):
        try:
            page = await kube.list_page(PODS, namespace, "", "")
            if not page.items:
                return
        except KubeError:
            pass  # retry
        await asyncio.sleep(1)


async def run(cluster: Cluster, services: int, rate: float, stage: int, num_namespaces: int) -> dict[str, Any]:
    """Runs the benchmark and removes everything that it created."""
    installation.install(cluster)
    _pin_to_real_nodes(cluster, True)
    name = f"control-scale-{uuid.uuid4().hex[:6]}"
    namespaces = [f"{name}-{number}" for number in range(num_namespaces)]
    for namespace in namespaces:
        cluster.kubectl("create", "namespace", namespace)
    client = await connect()
    kube = HttpKube(client)
    fake = nodes.FakeNodes(kube, FAKE_NODES, API_IP, f"{labels.MANAGED_BY}={labels.MANAGER}")
    routers = await nodes.answer_as_router(API_IP, labels.HTTP_PORT)
    await fake.create()
    nodes_task = asyncio.create_task(fake.run())
    try:
        await _cordon(kube, True)
        return await Bench(cluster, kube, namespaces, fake).measure(services, rate, stage)
    finally:
        cluster.kubectl("delete", "namespace", *namespaces, "--wait=false")
        for namespace in namespaces:
            await _wait_empty(kube, namespace)
        await _cordon(kube, False)
        nodes_task.cancel()
        await asyncio.gather(nodes_task, return_exceptions=True)
        await fake.remove()
        await routers.cleanup()
        await client.close()
        _pin_to_real_nodes(cluster, False)  # only now, or a pod might stay on a simulated node


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="bench.control_scale", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--services", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1.0, help="services per second")
    parser.add_argument("--stage", type=int, default=50, help="services per stage")
    parser.add_argument("--namespaces", type=int, default=20, help="number of namespaces")
    parser.add_argument("--check", action="store_true", help="exit with 1 if a bound is missed")
    args = parser.parse_args()
    result = asyncio.run(run(local_cluster(), args.services, args.rate, args.stage, args.namespaces))
    violations = missed(result)
    for sentence in violations:
        print(f"missed: {sentence}")
    print(json.dumps(result))
    return 1 if args.check and violations else 0


if __name__ == "__main__":
    sys.exit(main())
