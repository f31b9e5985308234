"""The service that most cluster tests share, by its objects, routers and groups."""

import json
from dataclasses import dataclass
from typing import Any

import httpx

from tests.cluster import service as svc
from tests.cluster.fixtures import Cluster

GROUPS = "phalanx.dev/component=group"
"""Label selector of the groups' pods."""
ROUTERS = "phalanx.dev/component=router"
SPEED_DECAY_S = 40
"""All groups share processors, so a busy group measures a low speed. Idle routers forget it in this time, and distribute the next
streams evenly."""


@dataclass(frozen=True, slots=True)
class Chat:
    """The service under test."""

    cluster: Cluster
    namespace: str

    def kubectl(self, *args: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl("-n", self.namespace, *args, stdin=stdin)

    def get(self, *args: str) -> Any:
        return json.loads(self.kubectl("get", *args, "-o", "json"))

    def pods(self, selector: str = GROUPS) -> dict[str, dict[str, Any]]:
        return {p["metadata"]["name"]: p for p in self.get("pods", "-l", selector)["items"]}

    def uids(self, selector: str = GROUPS) -> dict[str, str]:
        return {name: pod["metadata"]["uid"] for name, pod in self.pods(selector).items()}

    def restarts(self, selector: str = GROUPS) -> int:
        pods = self.pods(selector).values()
        return sum(container["restartCount"] for pod in pods for container in pod["status"].get("containerStatuses", []))

    def groups(self) -> list[str]:
        return sorted(s["metadata"]["name"] for s in self.get("statefulsets")["items"])

    @property
    def url(self) -> str:
        return self.address("chat")

    def address(self, service: str) -> str:
        """Returns the URL of a service's routers."""
        return f"http://{self.kubectl('get', 'service', service, '-o', 'jsonpath={.spec.clusterIP}')}"

    def router_metric(self, name: str) -> float:
        return svc.metric(httpx.get(f"{self.url}/metrics", timeout=10).text, name)

    def busiest(self) -> str:
        """Returns the group with most running requests, by its leader's metrics."""
        leaders = [name for name in self.pods() if name.endswith("-0")]
        return max((name.removesuffix("-0") for name in leaders), key=self.running)

    def running(self, group: str) -> float:
        """Returns the running requests of a group, by its leader's metrics."""
        leader = self.get("pod", f"{group}-0")["status"]["podIP"]
        return svc.metric(httpx.get(f"http://{leader}:8000/metrics", timeout=10).text, "vllm:num_requests_running")

    def num_moves(self) -> float:
        return self.router_metric("phalanx_router_moves_total")

    def num_takeovers(self) -> float:
        """Returns the number of streams that continued in another group by a move or a replay."""
        return self.num_moves() + self.router_metric("phalanx_router_replays_total")

    def is_ready(self, groups: int) -> bool:
        service = self.get("infsvc", "chat")
        status = service.get("status", {})
        conditions = {c["type"]: c["status"] for c in status.get("conditions", [])}
        counts = (status.get("replicas"), status.get("readyReplicas"), len(self.groups()))
        is_current = status.get("observedGeneration") == service["metadata"]["generation"]
        return is_current and conditions.get("Ready") == "True" and counts == (groups, groups, groups)

    def _groups_at_router(self) -> float:
        """Returns the ready groups of a router; -1 while the nodes do not route to a new Service yet."""
        try:
            return self.router_metric("phalanx_router_groups_ready")
        except httpx.ConnectError:
            return -1

    def wait_ready(self, groups: int, limit_s: float = 300) -> None:
        """Waits for this number of groups in the status and at the router."""
        try:
            svc.wait_for(lambda: self.is_ready(groups), limit_s, f"{groups} ready groups")
            svc.wait_for(lambda: self._groups_at_router() == groups, 60, f"{groups} groups at the router")
        except TimeoutError as late:
            objects = self.kubectl("get", "infsvc,statefulsets,pods", "-o", "wide")
            status = json.dumps(self.get("infsvc", "chat").get("status"), indent=1)
            logs = self.kubectl("logs", "-l", GROUPS, "--tail=15", "--prefix", "--ignore-errors")
            raise TimeoutError(f"{late}\n{objects}\n{status}\n{logs}") from None
