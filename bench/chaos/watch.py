"""Watches one service twice a second in a thread of its own, and asks its router for a token each second."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field

import httpx

from bench.chaos.look import Sample, View, double, standing, unled_s
from phalanx_operator.kube.client import DEPLOYMENTS, PODS, RESOURCES, SERVICES_OF_OURS, STATEFUL_SETS, Json, Resource
from phalanx_operator.observe.api_discovery import POD_GROUPS
from tests.cluster.access import Cluster
from tests.cluster.api import Api
from tests.cluster.config import NODES
from tools.errors import Failed

NAME = "chaos"
EVERY_S = 0.5
PROBES, PROBE_S = 4, 1.5
"""How many ask at a time, and how long each waits. While a lost node is not known to be lost, half of the connections go to the
router that was on it: two that wait 3 s each make five tries in ten seconds, which all fail in one of 32 such times."""
DOUBLE_S = 5.0
"""How long a double may stand while strikes go on. A look reads one kind after the other, and each read may wait for a busy API
server, so that one look can show a group that goes beside the one that follows it. Five seconds are ten looks, which do not all
err alike, and less than the lease's time: no double that waits for another leader is passed over. What a leader makes twice and
takes back sooner is not told. Once all is said to be well nothing may be there twice at all, of any kind."""
REPLICA_SETS = Resource("apps/v1", "replicasets")
OFTEN = (STATEFUL_SETS, PODS, REPLICA_SETS, DEPLOYMENTS)
"""Kinds that each look reads, in the order of a `View`."""
_OURS = "phalanx.dev%2Fservice%3D" + NAME


@dataclass(slots=True)
class Seen:
    """What the watcher noted."""

    samples: list[Sample] = field(default_factory=list)
    doubles: list[str] = field(default_factory=list)
    probes: int = 0
    probes_answered: int = 0


class Watcher:
    """Looks until `stop`. `served` may be called by anyone who got a token."""

    def __init__(self, cluster: Cluster, namespace: str, url: str, model: str) -> None:
        assert cluster.files is not None, "chaos is for the cluster of this machine"
        self._api = Api(cluster.files.pki, cluster.files.netns(NODES[0]))
        self._namespace = namespace
        self._others = others(self._api.find)
        self._url = url
        self._model = model
        self.seen = Seen()
        self._served_at = time.monotonic()
        self._lease = ("", 0.0)
        self._doubles_since: dict[str, float] = {}
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=part, daemon=True) for part in (self._look_on, *[self._probe_on] * PROBES)]

    def start(self) -> None:
        """Begins."""
        for thread in self._threads:
            thread.start()

    def stop(self) -> Seen:
        """What was seen."""
        self._stop.set()
        for thread in self._threads:
            thread.join(30)
        return self.seen

    def served(self) -> None:
        """Somebody got a token now."""
        self._served_at = time.monotonic()

    def view(self, *, of_all_kinds: bool = False) -> View | None:
        """The service now, and its groups and routers or all that the operator made; None when the API server does not answer
        all reads."""
        service = self._api.find(SERVICES_OF_OURS.path(self._namespace, NAME))
        kinds = (*OFTEN, *(self._others if of_all_kinds else ()))
        lists = [one for one in map(self._list, kinds) if one is not None]
        if service is None or len(lists) < len(kinds):
            return None
        sets, pods, replica_sets, deployments, *rest = lists
        return View(service, sets, pods, replica_sets, deployments, [one for found in rest for one in found])

    def _list(self, resource: Resource) -> list[Json] | None:
        found = self._api.find(f"{resource.path(self._namespace)}?labelSelector={_OURS}")
        return None if found is None else [{"kind": found["kind"].removesuffix("List")} | one for one in found["items"]]

    def unled_s(self) -> float | None:
        """For how long nobody has led; None when the Lease could not be read."""
        lease = self._api.find("/apis/coordination.k8s.io/v1/namespaces/phalanx-system/leases/phalanx-operator")
        if lease is None:
            return None
        now, version = time.monotonic(), lease["metadata"]["resourceVersion"]
        if version != self._lease[0]:
            self._lease = (version, now)
        return unled_s(lease, self._lease[1], now)

    def _look_on(self) -> None:
        last = time.monotonic()
        while not self._stop.wait(EVERY_S):
            view, unled = self.view(), self.unled_s()
            now = time.monotonic()
            ready = view is not None and view.is_ready
            self.seen.samples.append(Sample(now, view is not None, ready, unled, self._served_at))
            self._doubles_since = standing(self._doubles_since, None if view is None else double(view), now, last)
            last = now
            stood = [sentence for sentence, since in self._doubles_since.items() if now - since > DOUBLE_S]
            self.seen.doubles += [sentence for sentence in stood if sentence not in self.seen.doubles]

    def _probe_on(self) -> None:
        body = {"model": self._model, "prompt": "probe", "max_tokens": 1}
        while not self._stop.wait(0.5):
            self.seen.probes += 1
            try:
                if httpx.post(f"{self._url}/v1/completions", json=body, timeout=PROBE_S).status_code == 200:
                    self.seen.probes_answered += 1
                    self.served()
            except httpx.HTTPError:
                pass  # counted: probes that were not answered


def others(find: Callable[[str], Json | None]) -> tuple[Resource, ...]:
    """The kinds beside `OFTEN` of which the operator makes objects, as far as this API server serves them: those of schedulers,
    gateways and Prometheus it need not. `find` gives what is at a path. Raises Failed when the API server does not answer."""

    def told(path: str) -> Json:
        found = find(path)
        if found is None:
            raise Failed(f"the API server does not answer: {path}")
        return found

    served = {"v1"} | {version["groupVersion"] for group in told("/apis")["groups"] for version in group["versions"]}
    made = [one for one in (*RESOURCES.values(), *POD_GROUPS.values()) if one not in OFTEN and one.api_version in served]
    plurals = {
        version: {one["name"] for one in told(f"/{'apis' if '/' in version else 'api'}/{version}")["resources"]}
        for version in {one.api_version for one in made}
    }
    return tuple(one for one in made if one.plural in plurals[one.api_version])
