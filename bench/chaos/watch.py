"""Watches one service twice a second in a thread of its own, and asks its router for a token each second."""

import threading
import time
from dataclasses import dataclass, field
from typing import Any

import httpx

from bench.chaos.look import Sample, View, double
from phalanx_operator.lease import LEASE_S
from tests.cluster.access import Cluster
from tests.cluster.api import Api
from tests.cluster.config import NODES

NAME = "chaos"
EVERY_S = 0.5
PROBE_S = 3.0
DOUBLE_S = 5.0
"""How long a group too many may stand before it counts: the list of one moment is made of several reads."""
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
        self._url = url
        self._model = model
        self.seen = Seen()
        self._served_at = time.monotonic()
        self._lease = ("", 0.0)
        self._double_since: float | None = None
        self._stop = threading.Event()
        self._threads = [threading.Thread(target=part, daemon=True) for part in (self._look_on, self._probe_on, self._probe_on)]

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

    def view(self) -> View | None:
        """The service now; None when the API server does not answer all reads."""
        service = self._api.find(f"/apis/phalanx.dev/v1alpha1/namespaces/{self._namespace}/inferenceservices/{NAME}")
        kinds = ("apps/v1/statefulsets", "v1/pods", "apps/v1/replicasets", "apps/v1/deployments")
        lists = [self._list(kind) for kind in kinds]
        if service is None or any(one is None for one in lists):
            return None
        sets, pods, replica_sets, deployments = (one or [] for one in lists)
        return View(service, sets, pods, replica_sets, deployments)

    def _list(self, kind: str) -> list[dict[str, Any]] | None:
        version, _, plural = kind.rpartition("/")
        prefix = "/apis" if "/" in version else "/api"
        found = self._api.find(f"{prefix}/{version}/namespaces/{self._namespace}/{plural}?labelSelector={_OURS}")
        return None if found is None else list(found["items"])

    def has_operator(self) -> bool:
        """Whether the Lease was renewed lately, by our own clock."""
        lease = self._api.find("/apis/coordination.k8s.io/v1/namespaces/phalanx-system/leases/phalanx-operator")
        if lease is None or not lease["spec"].get("holderIdentity"):
            return False
        now = time.monotonic()
        if lease["metadata"]["resourceVersion"] != self._lease[0]:
            self._lease = (lease["metadata"]["resourceVersion"], now)
        return now - self._lease[1] < LEASE_S

    def _look_on(self) -> None:
        while not self._stop.wait(EVERY_S):
            view, has_operator = self.view(), self.has_operator()
            now = time.monotonic()
            ready = view is not None and view.is_ready
            self.seen.samples.append(Sample(now, view is not None, ready, has_operator, self._served_at))
            wrong = double(view) if view is not None else []
            self._double_since = (self._double_since or now) if wrong else None
            if self._double_since is not None and now - self._double_since > DOUBLE_S:
                self.seen.doubles += [sentence for sentence in wrong if sentence not in self.seen.doubles]

    def _probe_on(self) -> None:
        body = {"model": self._model, "prompt": "probe", "max_tokens": 1}
        while not self._stop.wait(1.0):
            self.seen.probes += 1
            try:
                if httpx.post(f"{self._url}/v1/completions", json=body, timeout=PROBE_S).status_code == 200:
                    self.seen.probes_answered += 1
                    self.served()
            except httpx.HTTPError:
                pass  # counted: probes that were not answered
