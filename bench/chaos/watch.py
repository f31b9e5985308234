"""Observes one service twice a second in a thread, and requests a token from its router each second."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from bench.chaos.checks import Sample, ServiceState, duplicates, leaderless_s, update_since
from phalanx_operator.kube.client import DEPLOYMENTS, INFERENCE_SERVICES, PODS, RESOURCES, STATEFUL_SETS, Json, Resource
from phalanx_operator.observe.api_discovery import POD_GROUPS
from tests.cluster.access import Cluster
from tests.cluster.api import Api
from tests.cluster.config import NODES
from tools.errors import Failed

NAME = "chaos"
SIBLING = "chaos-sibling"
"""Another service of the namespace, which is not checked."""
CHECK_S = 0.5
PROBES, PROBE_S = 4, 1.5
"""Concurrent probes, and the timeout of each.

While a lost node is undetected, half of the connections go to its router: two probes of 3 s would make five tries in ten seconds,
which all fail in one of 32 cases.
"""
DUPLICATE_S = 5.0
"""How long a duplicate may exist between strikes.

A check reads one kind after another, each read may wait for a busy API server, so one check may show a deleted group together
with its successor. Five seconds are ten checks, and less than the lease's time: duplicates that wait for another leader are
found, those that a leader removes sooner are not. Once settled, no duplicate of any kind is allowed.
"""
REPLICA_SETS = Resource("apps/v1", "replicasets")
BASIC_KINDS = (STATEFUL_SETS, PODS, REPLICA_SETS, DEPLOYMENTS)
"""Kinds that each check reads, in the order of a `ServiceState`."""


@dataclass(slots=True)
class Observations:
    samples: list[Sample] = field(default_factory=list)
    duplicates: list[str] = field(default_factory=list)
    probes: int = 0
    probes_answered: int = 0


class Watcher:
    """Checks until `stop`."""

    def __init__(self, cluster: Cluster, namespace: str, url: str, model: str) -> None:
        assert cluster.files is not None, "chaos is for the cluster of this machine"
        self._api = Api(cluster.files.pki, cluster.files.netns(NODES[0]))
        self._namespace = namespace
        self._further_kinds = further_kinds(self._api.find)
        self._url = url
        self._model = model
        self.observed = Observations()
        self._served_at = time.monotonic()
        self._lease = ("", 0.0)
        self._duplicates_since: dict[str, float] = {}
        self._stop = threading.Event()
        self._threads = [
            threading.Thread(target=part, daemon=True) for part in (self._check_repeatedly, *[self._probe_repeatedly] * PROBES)
        ]

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def stop(self) -> Observations:
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        return self.observed

    def served(self) -> None:
        self._served_at = time.monotonic()

    def state(self, *, all_kinds: bool = False) -> ServiceState | None:
        """Returns the service with groups and routers, or with all kinds; `None` if the API server does not answer all reads."""
        service = self._api.find(INFERENCE_SERVICES.path(self._namespace, NAME))
        kinds = (*BASIC_KINDS, *(self._further_kinds if all_kinds else ()))
        lists = [objects for objects in map(self._list, kinds) if objects is not None]
        if service is None or len(lists) < len(kinds):
            return None
        sets, pods, replica_sets, deployments, *rest = lists
        return ServiceState(service, sets, pods, replica_sets, deployments, [body for objects in rest for body in objects])

    def pod_addresses(self, service: str = NAME) -> list[str]:
        """Returns the addresses of a service's pods; none while the API server does not answer."""
        found = (pod.get("status", {}).get("podIP") for pod in self._list(PODS, service) or [])
        return [address for address in found if address]

    def _list(self, resource: Resource, service: str = NAME) -> list[Json] | None:
        found = self._api.find(f"{resource.path(self._namespace)}?labelSelector=phalanx.dev%2Fservice%3D{service}")
        return None if found is None else [{"kind": found["kind"].removesuffix("List")} | body for body in found["items"]]

    def leaderless_s(self) -> float | None:
        """Returns for how long there has been no leader; `None` if the Lease could not be read."""
        lease = self._api.find("/apis/coordination.k8s.io/v1/namespaces/phalanx-system/leases/phalanx-operator")
        if lease is None:
            return None
        now, version = time.monotonic(), lease["metadata"]["resourceVersion"]
        if version != self._lease[0]:
            self._lease = (version, now)
        return leaderless_s(lease, self._lease[1], now)

    def _check_repeatedly(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(CHECK_S):
            state, leaderless = self.state(), self.leaderless_s()
            now = time.monotonic()
            ready = state is not None and state.is_ready
            self.observed.samples.append(Sample(now, state is not None, ready, leaderless, self._served_at))
            self._duplicates_since = update_since(self._duplicates_since, None if state is None else duplicates(state), now, last)
            last = now
            lasting = [sentence for sentence, since in self._duplicates_since.items() if now - since > DUPLICATE_S]
            self.observed.duplicates += [sentence for sentence in lasting if sentence not in self.observed.duplicates]

    def _probe_repeatedly(self) -> None:
        body = {"model": self._model, "prompt": "probe", "max_tokens": 1}
        while not self._stop.wait(0.5):
            self.observed.probes += 1
            try:
                if httpx.post(f"{self._url}/v1/completions", json=body, timeout=PROBE_S).status_code == 200:
                    self.observed.probes_answered += 1
                    self.served()
            except httpx.HTTPError:
                pass  # counted as unanswered


def further_kinds(find: Callable[[str], Json | None]) -> tuple[Resource, ...]:
    """Returns the further kinds that the operator makes and this API server serves.

    Kinds of schedulers, gateways and Prometheus may be absent. `find` reads a path. Raises Failed if the API server does not
    answer.
    """

    def read(path: str) -> Json:
        found = find(path)
        if found is None:
            raise Failed(f"the API server does not answer: {path}")
        return found

    served = {"v1"} | {version["groupVersion"] for group in read("/apis")["groups"] for version in group["versions"]}
    kinds = [
        kind for kind in (*RESOURCES.values(), *POD_GROUPS.values()) if kind not in BASIC_KINDS and kind.api_version in served
    ]
    plurals = {
        version: {resource["name"] for resource in read(f"/{'apis' if '/' in version else 'api'}/{version}")["resources"]}
        for version in {kind.api_version for kind in kinds}
    }
    return tuple(kind for kind in kinds if kind.plural in plurals[kind.api_version])
