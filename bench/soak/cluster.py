"""The target `cluster`: a service in the cluster of this machine, struck by `bench.chaos`.

A service with three groups of two pods and two routers, in float32, the widest dtype of a manifest, and two operators. Every
process of its pods is read on this machine, as on the target `engines`. Each piece makes a namespace of its own.
"""

import asyncio
import json
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import aiohttp

from bench.chaos.__main__ import manifest, service_ip, settle
from bench.chaos.strikes import NOT_DONE, Striker
from bench.chaos.watch import Watcher
from bench.soak.fleet import KERNELS, Member, end_remaining, engine
from bench.soak.gauges import GROUP_GAUGES, OPERATOR_GAUGES, ROUTER_GAUGES, scrape
from bench.soak.pods import Pod, object_counts, parse_pod, uses_of
from bench.soak.record import Settings, Use
from bench.soak.traffic import Traffic
from phalanx_operator.kube.client import PODS
from tests.cluster import operator as installation
from tests.cluster import service as svc
from tests.cluster import tiny_model
from tests.cluster.access import local_cluster
from tests.cluster.api import Api
from tests.cluster.config import NODES
from tests.cluster.conftest import make_namespace
from tools.errors import Failed

NAMESPACE_FILE = "namespace"
"""Of the service, so that a resumed run deletes what a killed one left."""
POOL = "2Mi"
"""Of a rank: about 340 pages, which fill within the warm-up. Until then their keys take more memory in leaders and routers."""
SETTLE_S = 300.0
COUNT_EVERY = 12
"""Samples between two counts of all objects."""
OPERATOR_PODS = f"{PODS.path(installation.NAMESPACE)}?labelSelector=app.kubernetes.io%2Fname%3Dphalanx-operator"
_GAUGES = {"router": ROUTER_GAUGES, "leader": GROUP_GAUGES, "operator": OPERATOR_GAUGES}
"""Metrics by the role of a pod; workers have none."""


class InCluster:
    """One service in the cluster."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self._folder = folder
        self._seed = settings.seed
        self._cluster = local_cluster()
        assert self._cluster.files is not None, "the cluster of this machine"
        self._api = Api(self._cluster.files.pki, self._cluster.files.netns(NODES[0]))
        self._reference: Member = engine("reference", tiny_model.folder() / tiny_model.NAME, folder)
        self._violated: Callable[[str], None] = lambda _: None
        self._namespace = ""
        self._url = ""
        self._watcher: Watcher | None = None
        self._pods: list[Pod] = []
        self._num_samples = 0

    @property
    def routers(self) -> Sequence[str]:
        return [self._url]

    @property
    def reference(self) -> str:
        return self._reference.url

    @property
    def watcher(self) -> Watcher:
        assert self._watcher is not None, "the service was started"
        return self._watcher

    async def start(self, violated: Callable[[str], None]) -> None:
        self._violated = violated
        end_remaining(self._folder)
        self._reference.start()
        await asyncio.to_thread(self._install)

    def _install(self) -> None:
        self._delete_namespace()
        installation.install(self._cluster)
        self._namespace = make_namespace(self._cluster, "soak")
        (self._folder / NAMESPACE_FILE).write_text(self._namespace)
        self._cluster.claim(self._namespace, "models", tiny_model.folder())
        body = manifest(self._cluster)
        body["spec"]["engine"]["kvCacheMemory"] = POOL
        (runtime,) = [each for each in body["spec"]["podTemplate"]["spec"]["containers"] if each["name"] == "runtime"]
        runtime.setdefault("env", []).extend({"name": name, "value": value} for name, value in KERNELS.items())
        self._cluster.kubectl("-n", self._namespace, "apply", "-f", "-", stdin=json.dumps(body))
        ip = svc.wait_for(lambda: service_ip(self._cluster, self._namespace), 60, "the router's Service")
        self._url = f"http://{ip}"
        self._watcher = Watcher(self._cluster, self._namespace, self._url, "tiny")
        self._settle()

    def _settle(self) -> str:
        found = list[str]()
        seconds = settle(self.watcher, SETTLE_S, found)
        for what in found:
            self._violated(f"not recovered within {SETTLE_S:.0f} s: {what}")
        return "NOT recovered" if seconds is None else f"recovered after {seconds:.0f} s"

    def _delete_namespace(self) -> None:
        path = self._folder / NAMESPACE_FILE
        if path.exists():
            self._cluster.kubectl("delete", "namespace", path.read_text(), "--wait=false", "--ignore-not-found")
            path.unlink()

    async def uses(self) -> dict[str, Use]:
        return self._reference.uses() | await asyncio.to_thread(self._uses)

    def _uses(self) -> dict[str, Use]:
        """Returns nothing while the API server does not answer."""
        counts = self._num_samples % COUNT_EVERY == 0
        state = self.watcher.state(all_kinds=counts)
        operators = self._api.find(OPERATOR_PODS)
        if state is None or operators is None:
            self._pods = []
            return {}
        self._num_samples += 1
        parsed = (parse_pod(body) for body in (*state.pods, *operators["items"]))
        self._pods = [pod for pod in parsed if pod is not None]
        found = uses_of(self._pods)
        if counts:
            bodies = (*state.sets, *state.pods, *state.replica_sets, *state.deployments, *state.others)
            found["API server"] = Use("", object_counts(bodies))
        return found

    async def gauges(self, session: aiohttp.ClientSession) -> dict[str, dict[str, float]]:
        ready = [(pod, _GAUGES[pod.role]) for pod in self._pods if pod.is_ready and pod.role in _GAUGES]
        return {pod.name: await scrape(session, pod.url, names) for pod, names in ready}

    async def strike(self, number: int, traffic: Traffic) -> tuple[str, str]:
        rng = random.Random(f"{self._seed} strike {number}")
        kinds = Striker(self._cluster, self._namespace, rng).kinds()
        first = random.Random(f"{self._seed} first strikes").sample(sorted(kinds), len(kinds))
        kind = first[number] if number < len(first) else rng.choice(sorted(kinds))
        try:
            outcome = await asyncio.to_thread(kinds[kind])
        except Failed as error:  # kubectl may fail just after another strike
            outcome = f"{NOT_DONE}{error}"
        return kind, f"{outcome}; {await asyncio.to_thread(self._settle)}"

    def end(self) -> None:
        self._delete_namespace()
        self._reference.end()
