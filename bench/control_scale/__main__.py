"""The operator against the number of services: `python -m bench.control_scale --services 200 --rate 1`.

    python3 -m tests.cluster up --images
    python3 -m tests.cluster run $(python3 tools/bootstrap.py dev)/bin/python -m bench.control_scale --services 200 --rate 1
    ... --services 200 --rate 5      what saturates when services come faster
    ... --namespaces 1               all in one, where Kubernetes' own controllers list all pods for each
    ... --check                      exit status 1 when a bound is missed

Each service has five groups of two pods and a router, on nodes that exist only in the API server
(`bench.control_scale.nodes`, in place of kwok); the real nodes are cordoned meanwhile, with the operator on them. Services go to
`--namespaces` in turn. Measured in stages of `--stage` services: seconds from the answer to the create call until a watch shows
the service's last StatefulSet; the operator's CPU per service, resident memory and CPU when idle, by its own metrics; CPU of the
control plane. In the end the leader is stopped, and another one killed, and a change is timed. Then comes a line for each bound
that is missed (`bench.control_scale.bounds`), and the last line is JSON.
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
from bench.control_scale.measure import OPERATOR_NAMESPACE, Sets, Use, control_plane_cpu, leader_of, use_of
from phalanx_api import labels
from phalanx_operator.kube.client import NODES as NODE
from phalanx_operator.kube.client import PODS, SERVICES_OF_OURS, Conflict, Json, KubeClient, KubeError, Retry
from phalanx_operator.kube.http import HttpKube, connect
from tests.cluster import operator as installation
from tests.cluster.access import Cluster, ours
from tests.cluster.config import API_IP, NODES

GROUPS, PODS_PER_GROUP = 5, 2
FAKE_NODES = 12
IDLE_S = 60.0


def service(namespace: str, name: str) -> Json:
    """One service; its model is never read."""
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
    """One run: services applied stage by stage, to each namespace in turn."""

    def __init__(self, cluster: Cluster, kube: KubeClient, namespaces: Sequence[str], fake: nodes.FakeNodes) -> None:
        self._cluster = cluster
        self._kube = kube
        self._namespaces = namespaces
        self._fake = fake
        self._sets = Sets(kube)
        self._made = 0

    async def measure(self, services: int, rate: float, stage: int) -> dict[str, Any]:
        """The figures, as printed."""
        watching = asyncio.create_task(self._sets.run())
        await asyncio.sleep(1)
        stages = []
        while self._made < services:
            stages.append(await self._stage(min(stage, services - self._made), rate))
            print(json.dumps(stages[-1]), flush=True)
        resumed_s = await self._resume(forced=False)
        overtaken_s = await self._resume(forced=True)
        print(json.dumps({"resumed_s": resumed_s, "overtaken_s": overtaken_s}), flush=True)
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)
        return {
            "rate": rate,
            "namespaces": len(self._namespaces),
            "stages": stages,
            "resumed_s": resumed_s,
            "overtaken_s": overtaken_s,
        }

    async def _stage(self, count: int, rate: float) -> dict[str, Any]:
        _, ip = await leader_of(self._kube)
        before, control = await use_of(ip), control_plane_cpu(self._cluster)
        began = time.monotonic()
        delays = await asyncio.gather(*(self._apply(self._made + i, began + i / rate) for i in range(count)))
        self._made += count
        settled = await self._settle(ip)
        after, control_after = settled, control_plane_cpu(self._cluster)
        await asyncio.sleep(IDLE_S)
        idle = await use_of(ip)
        took_s = after.at_s - before.at_s
        return {
            "services": self._made,
            "last_set_s": _quantiles(delays),
            "settled_s": round(after.at_s - began, 1),
            "operator_cpu_ms_per_service": round(1000 * (after.cpu_s - before.cpu_s) / count, 1),
            "operator_rss_mib": round(idle.rss_bytes / 2**20, 1),
            "operator_idle_share_of_a_core": round((idle.cpu_s - after.cpu_s) / (idle.at_s - after.at_s), 4),
            "cores_meanwhile": {name: round((control_after[name] - used) / took_s, 2) for name, used in control.items()},
        }

    async def _apply(self, number: int, at: float) -> float:
        """Seconds from the answer of the API server until the last StatefulSet was seen."""
        await asyncio.sleep(max(at - time.monotonic(), 0))
        name = f"scale-{number:04}"
        await self._create(self._namespaces[number % len(self._namespaces)], name)
        applied = time.monotonic()
        return await self._sets.until(name, GROUPS) - applied

    async def _create(self, namespace: str, name: str) -> None:
        while True:
            try:
                await self._kube.create(SERVICES_OF_OURS, service(namespace, name))
                return
            except Conflict:
                return  # it was made, and the answer was lost
            except Retry:
                await asyncio.sleep(0.2)

    async def _settle(self, ip: str) -> Use:
        """What the operator has used when all pods are ready and its queue has been empty for three looks."""
        calm = 0
        while True:
            use = await use_of(ip)
            done = len(self._fake.started) >= self._made * (GROUPS * PODS_PER_GROUP + 1) and use.queue == 0
            calm = calm + 1 if done else 0
            if calm == 3:
                return use
            await asyncio.sleep(1)

    async def _resume(self, forced: bool) -> float:
        """Seconds from the end of the leader until a change that was made then is followed."""
        number, (holder, _) = 0 if forced else 1, await leader_of(self._kube)
        name, namespace = f"scale-{number:04}", self._namespaces[number % len(self._namespaces)]
        pod = await self._kube.get(PODS, OPERATOR_NAMESPACE, holder)
        began = time.monotonic()
        await self._kube.delete(PODS, OPERATOR_NAMESPACE, holder, pod["metadata"]["uid"], grace_s=0 if forced else 30)
        patch = {"metadata": {}, "spec": {"replicas": GROUPS + 1}}
        await self._kube.merge(SERVICES_OF_OURS, namespace, name, patch)
        return round(await self._sets.until(name, GROUPS + 1) - began, 1)


def _quantiles(delays: list[float]) -> dict[str, float]:
    ordered = sorted(delays)
    p99 = ordered[min(len(ordered) - 1, int(0.99 * len(ordered)))]
    return {"p50": round(statistics.median(ordered), 2), "p99": round(p99, 2), "max": round(ordered[-1], 2)}


def _keep_on_real_nodes(cluster: Cluster, is_kept: bool) -> None:
    """Lets the operator run on cordoned nodes, and on no other ones: kubelets label theirs with the system."""
    tolerations = [{"key": "node.kubernetes.io/unschedulable", "operator": "Exists"}]
    where = {"nodeSelector": {"kubernetes.io/os": "linux"} if is_kept else None, "tolerations": tolerations if is_kept else None}
    patch = json.dumps({"spec": {"template": {"spec": where}}})
    of = ("-n", OPERATOR_NAMESPACE)
    cluster.kubectl(*of, "patch", "deployment", "phalanx-operator", "--type=merge", "-p", patch)
    cluster.kubectl(*of, "rollout", "status", "deployment/phalanx-operator", "--timeout=120s")


async def _cordon(kube: KubeClient, is_cordoned: bool) -> None:
    for node in NODES:
        await kube.merge(NODE, "", node.name, {"metadata": {}, "spec": {"unschedulable": is_cordoned or None}})


async def _clear(kube: KubeClient, namespace: str) -> None:
    """Waits until no pod of the namespace is left: the nodes must end them."""
    for _ in range(300):
        try:
            page = await kube.list_page(PODS, namespace, "", "")
            if not page.items:
                return
        except KubeError:
            pass  # again
        await asyncio.sleep(1)


async def run(cluster: Cluster, services: int, rate: float, stage: int, num_namespaces: int) -> dict[str, Any]:
    """The figures of one run; nothing of it is left."""
    installation.install(cluster)
    _keep_on_real_nodes(cluster, True)
    name = f"control-scale-{uuid.uuid4().hex[:6]}"
    namespaces = [f"{name}-{number}" for number in range(num_namespaces)]
    for namespace in namespaces:
        cluster.kubectl("create", "namespace", namespace)
    client = await connect()
    kube = HttpKube(client)
    fake = nodes.FakeNodes(kube, FAKE_NODES, API_IP, f"{labels.MANAGED_BY}={labels.MANAGER}")
    routers = await nodes.answer_as_router(API_IP, labels.HTTP_PORT)
    await fake.make()
    living = asyncio.create_task(fake.run())
    try:
        await _cordon(kube, True)
        return await Bench(cluster, kube, namespaces, fake).measure(services, rate, stage)
    finally:
        cluster.kubectl("delete", "namespace", *namespaces, "--wait=false")
        for namespace in namespaces:
            await _clear(kube, namespace)
        await _cordon(kube, False)
        living.cancel()
        await asyncio.gather(living, return_exceptions=True)
        await fake.remove()
        await routers.cleanup()
        await client.close()
        _keep_on_real_nodes(cluster, False)  # with the other nodes still there a pod of the operator would wait on one of them


def main() -> int:
    """Exit status."""
    parser = argparse.ArgumentParser(
        prog="bench.control_scale", description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--services", type=int, default=200)
    parser.add_argument("--rate", type=float, default=1.0, help="services per second")
    parser.add_argument("--stage", type=int, default=50, help="services between two measurements at rest")
    parser.add_argument("--namespaces", type=int, default=20, help="how many the services are dealt out to")
    parser.add_argument("--check", action="store_true", help="exit status 1 when a bound is missed")
    given = parser.parse_args()
    result = asyncio.run(run(ours(), given.services, given.rate, given.stage, given.namespaces))
    wrong = missed(result)
    for sentence in wrong:
        print(f"missed: {sentence}")
    print(json.dumps(result))
    return 1 if given.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
