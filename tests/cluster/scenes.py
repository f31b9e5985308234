"""What the scenarios of services share: a service of a tiny model, what is seen of it, traffic, and devices that are taken."""

import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import httpx

from tests.cluster import operator as installation
from tests.cluster import service as svc
from tests.cluster import tiny_model
from tests.cluster.config import GPU_RESOURCE, PAUSE_IMAGE
from tests.cluster.test_cluster_itself import LOCKED
from tests.cluster.test_path import GROUPS, Chat
from tests.cluster.watching import is_ready

OPERATOR = ("-n", installation.NAMESPACE, "deployment/phalanx-operator")


@dataclass(slots=True)
class Traffic:
    """Requests without a pause, of so many tokens. `failed`: what went wrong, with the time since the start."""

    url: str
    model: str
    tokens: int = 12
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    _over: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        """Asks until it is over."""
        began = time.monotonic()
        body = {"model": self.model, "prompt": f"request {number}", "max_tokens": self.tokens, "ignore_eos": True}
        body |= {"seed": number}
        with httpx.Client(timeout=120) as client:
            while not self._over.is_set():
                try:
                    answer = client.post(f"{self.url}/v1/completions", json=body)
                    words = "" if answer.status_code == 200 else f"{answer.status_code} {answer.text[:200]}"
                except httpx.HTTPError as error:
                    words = f"{type(error).__name__}: {error}"
                if words:
                    self.failed.append(f"after {time.monotonic() - began:.1f} s: {words}")
                else:
                    self.answered += 1

    def end(self) -> None:
        """Asks no more."""
        self._over.set()


class Scene(Chat):
    """One service `chat`, or several, in a namespace of a scenario's own."""

    def manifest(self, replicas: int | None = 1, pods: int = 2, name: str = "chat", **spec: Any) -> dict[str, Any]:
        """A service of the tiny model, whose groups have so many pods of one device each, placed anywhere."""
        model = f"pvc://models/{tiny_model.NAME}"
        made = svc.manifest(name, model=model, replicas=replicas or 0, tensor=pods, **{"servedNames": ["tiny"], **spec})
        del made["spec"]["podTemplate"]["spec"]["topologySpreadConstraints"]
        made["spec"]["engine"] = {"kvCacheMemory": "32Mi", "maxModelLen": 2048, "dtype": "float32"} | spec.get("engine", {})
        if replicas is None:
            del made["spec"]["replicas"]
        return self.cluster.with_site_packages(made)

    def apply(self, manifest: dict[str, Any]) -> None:
        """Nothing; the API server has it."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def patch(self, spec: dict[str, Any], name: str = "chat") -> None:
        """Nothing; the spec is changed so."""
        self.kubectl("patch", "infsvc", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def roll(self, word: str) -> None:
        """Nothing; every pod of the groups should have another annotation."""
        self.patch({"podTemplate": {"metadata": {"annotations": {"example.com/round": word}}}})

    def scale(self, replicas: int) -> None:
        """Nothing; so many groups are wanted."""
        self.kubectl("scale", "infsvc", "chat", f"--replicas={replicas}")

    def status(self, name: str = "chat") -> dict[str, Any]:
        """The status of a service."""
        found: dict[str, Any] = self.get("infsvc", name).get("status", {})
        return found

    def condition(self, kind: str, name: str = "chat") -> tuple[str, str]:
        """Status and reason of a condition; empty when it is not there."""
        conditions = {c["type"]: (c["status"], c["reason"]) for c in self.status(name).get("conditions", [])}
        return conditions.get(kind, ("", ""))

    def message(self, kind: str, name: str = "chat") -> str:
        """The message of a condition; empty when it is not there."""
        return next((str(c.get("message", "")) for c in self.status(name).get("conditions", []) if c["type"] == kind), "")

    def things(self, *flags: str) -> set[str]:
        """Kind and name of every object of the namespace, events left out; `flags` choose some."""
        kinds = self.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
        asked = ",".join(kind for kind in kinds if not kind.startswith("events"))
        return set(self.kubectl("get", asked, "-o", "name", *flags).split())

    def events(self, name: str = "chat") -> set[tuple[str, str]]:
        """Type and reason of every event of a service."""
        found = [one for one in self.get("events")["items"] if one["involvedObject"].get("name") == name]
        return {(one["type"], one["reason"]) for one in found if one["involvedObject"].get("kind") == "InferenceService"}

    def revisions(self, name: str = "chat") -> list[str]:
        """The revision of each group that is not being deleted."""
        return sorted(one["metadata"]["labels"]["phalanx.dev/revision"] for one in self.sets(name).values())

    def sets(self, name: str = "chat") -> dict[str, dict[str, Any]]:
        """The groups that are not being deleted, by name."""
        found = self.get("statefulsets", "-l", f"phalanx.dev/service={name}")["items"]
        return {one["metadata"]["name"]: one for one in found if "deletionTimestamp" not in one["metadata"]}

    def by_group(self, service: str = "chat") -> dict[str, dict[str, dict[str, Any]]]:
        """Pods by name, by group."""
        found: dict[str, dict[str, dict[str, Any]]] = {}
        for name, pod in self.pods(f"{GROUPS},phalanx.dev/service={service}").items():
            found.setdefault(pod["metadata"]["labels"]["phalanx.dev/group"], {})[name] = pod
        return found

    def fingerprints(self, group: str) -> dict[str, tuple[str, int]]:
        """UID and restarts of each pod of a group."""
        pods = self.by_group().get(group, {})
        starts = {n: sum(c["restartCount"] for c in p["status"].get("containerStatuses", [])) for n, p in pods.items()}
        return {name: (pod["metadata"]["uid"], starts[name]) for name, pod in pods.items()}

    def incarnation(self, group: str) -> int:
        """Of a group, by its own word; 0 while it does not answer."""
        leader = self.pods().get(f"{group}-0", {}).get("status", {}).get("podIP")
        if not leader:
            return 0
        try:
            return int(httpx.get(f"http://{leader}:8000/v1/health", timeout=5).json()["incarnation"])
        except (httpx.HTTPError, KeyError, ValueError):
            return 0

    def ready_groups(self) -> list[str]:
        """Groups of which every pod is ready."""
        return [name for name, pods in self.by_group().items() if pods and all(is_ready(pod) for pod in pods.values())]

    def held_devices(self) -> list[tuple[str, str, int]]:
        """Namespace, node and devices of each pod that has some or is about to."""
        found = []
        for pod in json.loads(self.cluster.kubectl("get", "pods", "-A", "-o", "json"))["items"]:
            node = pod["spec"].get("nodeName", "")
            if node and pod["status"].get("phase") not in ("Succeeded", "Failed"):
                limits = (one.get("resources", {}).get("limits", {}) for one in pod["spec"]["containers"])
                devices = sum(int(limit.get(GPU_RESOURCE, "0")) for limit in limits)
                found += [(pod["metadata"]["namespace"], node, devices)] if devices else []
        return found

    def free_devices(self) -> dict[str, int]:
        """Devices of each node that no pod has or is about to have."""
        left = {}
        for node in json.loads(self.cluster.kubectl("get", "nodes", "-o", "json"))["items"]:
            left[node["metadata"]["name"]] = int(node["status"]["allocatable"].get(GPU_RESOURCE, "0"))
        for _, name, devices in self.held_devices():
            if name in left:  # the pods of a node that was deleted stay for a while
                left[name] -= devices
        return left

    def leave(self, devices: int) -> None:
        """Nothing; pods of this scenario hold all devices but so many. Every other scenario's are waited for first."""
        svc.wait_for(lambda: {one[0] for one in self.held_devices()} <= {self.namespace}, 180, "other scenarios are over")
        svc.wait_for(lambda: sum(self.free_devices().values()) >= devices, 180, f"{devices} devices are free")
        left = devices
        for node, free in sorted(self.free_devices().items()):
            spare = min(free, left)
            left -= spare
            if free > spare:
                self._occupy(node, free - spare)
        svc.wait_for(lambda: sum(self.free_devices().values()) == devices, 60, f"{devices} devices are left")

    def _occupy(self, node: str, devices: int) -> None:
        limits = {"limits": {GPU_RESOURCE: str(devices)}}
        container = {"name": "c", "image": PAUSE_IMAGE, "securityContext": LOCKED, "resources": limits}
        security = {"runAsNonRoot": True, "runAsUser": 65532, "runAsGroup": 65532, "seccompProfile": {"type": "RuntimeDefault"}}
        spec = {
            "nodeSelector": {"kubernetes.io/hostname": node},
            "terminationGracePeriodSeconds": 0,
            "securityContext": security,
            "containers": [container],
        }
        metadata = {"generateName": "holder-", "labels": {"app": "holder"}}
        body = {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}
        self.kubectl("create", "-f", "-", stdin=json.dumps(body))

    def free_all(self) -> None:
        """Nothing; the scenario's own holders of devices are gone."""
        self.kubectl("delete", "pods", "-l", "app=holder", "--wait=false")

    def stop_operator(self) -> None:
        """Nothing; no operator runs. `start_operator` brings it back."""
        self.cluster.kubectl("scale", *OPERATOR, "--replicas=0")
        of = ("-n", installation.NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=phalanx-operator", "-o", "name")
        svc.wait_for(lambda: not self.cluster.kubectl(*of).strip(), 90, "no operator runs")

    def start_operator(self) -> None:
        """Nothing; operators run as they were installed."""
        self.cluster.kubectl("scale", *OPERATOR, "--replicas=2")
        self.cluster.kubectl("rollout", "status", *OPERATOR, "--timeout=120s")

    def restart_operator(self) -> None:
        """Nothing; all operators were killed, and others run."""
        delete = ("delete", "pod", "-l", "app.kubernetes.io/name=phalanx-operator", "--grace-period=0", "--force")
        self.cluster.kubectl("-n", installation.NAMESPACE, *delete)
        self.cluster.kubectl("rollout", "status", *OPERATOR, "--timeout=120s")

    def gone(self, name: str = "chat", limit_s: float = 240) -> None:
        """Nothing, once the service and every pod of it are."""
        self.kubectl("delete", "infsvc", name, "--ignore-not-found")
        svc.wait_for(lambda: not self.pods(f"phalanx.dev/service={name}"), limit_s, f"no pod of {name} is left")

    @contextmanager
    def traffic(self, workers: int = 2, tokens: int = 12) -> Iterator[Traffic]:
        """Requests while the block runs."""
        made = Traffic(self.url, "tiny", tokens)
        threads = [threading.Thread(target=made.run, args=(number,)) for number in range(workers)]
        for thread in threads:
            thread.start()
        try:
            svc.wait_for(lambda: made.answered > 0, 180, "the first answers")
            yield made
        finally:
            made.end()
            for thread in threads:
                thread.join()


def is_placed(pod: dict[str, Any]) -> bool:
    """Whether a pod has a node."""
    return bool(pod["spec"].get("nodeName"))


def is_over(pod: dict[str, Any]) -> bool:
    """Whether a pod has ended for good."""
    return pod["status"].get("phase") in ("Succeeded", "Failed")
