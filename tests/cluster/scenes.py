"""A service of a tiny model for scenarios: its state, traffic, and occupied devices."""

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
from tests.cluster.chat import GROUPS, Chat
from tests.cluster.config import GPU_RESOURCE, LOCKED, PAUSE_IMAGE
from tests.cluster.watching import is_ready

OPERATOR = ("-n", installation.NAMESPACE, "deployment/phalanx-operator")


@dataclass(slots=True)
class Traffic:
    """Continuous requests."""

    url: str
    model: str
    tokens: int = 12
    answered: int = 0
    failed: list[str] = field(default_factory=list)
    """Errors with their times since the start."""
    _ended: threading.Event = field(default_factory=threading.Event)

    def run(self, number: int) -> None:
        """Sends requests until `end`."""
        started_s = time.monotonic()
        body = {"model": self.model, "prompt": f"request {number}", "max_tokens": self.tokens, "ignore_eos": True}
        body |= {"seed": number}
        with httpx.Client(timeout=120) as client:
            while not self._ended.is_set():
                try:
                    response = client.post(f"{self.url}/v1/completions", json=body)
                    failure = "" if response.status_code == 200 else f"{response.status_code} {response.text[:200]}"
                except httpx.HTTPError as error:
                    failure = f"{type(error).__name__}: {error}"
                if failure:
                    self.failed.append(f"after {time.monotonic() - started_s:.1f} s: {failure}")
                else:
                    self.answered += 1

    def end(self) -> None:
        """Ends the requests."""
        self._ended.set()


class Scene(Chat):
    """A namespace with the service `chat`, and possibly others."""

    def manifest(self, replicas: int | None = 1, pods: int = 2, name: str = "chat", **spec: Any) -> dict[str, Any]:
        """Returns a service of the tiny model with `pods` pods of one device per group."""
        model = f"pvc://models/{tiny_model.NAME}"
        manifest = svc.manifest(name, model=model, replicas=replicas or 0, tensor=pods, **{"servedNames": ["tiny"], **spec})
        del manifest["spec"]["podTemplate"]["spec"]["topologySpreadConstraints"]
        manifest["spec"]["engine"] = {"kvCacheMemory": "32Mi", "maxModelLen": 2048, "dtype": "float32"} | spec.get("engine", {})
        if replicas is None:
            del manifest["spec"]["replicas"]
        return self.cluster.with_site_packages(manifest)

    def apply(self, manifest: dict[str, Any]) -> None:
        """Applies an object."""
        self.kubectl("apply", "-f", "-", stdin=json.dumps(manifest))

    def patch(self, spec: dict[str, Any], name: str = "chat") -> None:
        """Patches the spec."""
        self.kubectl("patch", "infsvc", name, "--type=merge", "-p", json.dumps({"spec": spec}))

    def roll(self, value: str) -> None:
        """Changes an annotation of the groups' pods."""
        self.patch({"podTemplate": {"metadata": {"annotations": {"example.com/round": value}}}})

    def scale(self, replicas: int) -> None:
        """Sets the number of groups."""
        self.kubectl("scale", "infsvc", "chat", f"--replicas={replicas}")

    def status(self, name: str = "chat") -> dict[str, Any]:
        """Returns the status of a service."""
        status: dict[str, Any] = self.get("infsvc", name).get("status", {})
        return status

    def condition(self, kind: str, name: str = "chat") -> tuple[str, str]:
        """Returns status and reason of a condition, or empty texts."""
        conditions = {c["type"]: (c["status"], c["reason"]) for c in self.status(name).get("conditions", [])}
        return conditions.get(kind, ("", ""))

    def message(self, kind: str, name: str = "chat") -> str:
        """Returns the message of a condition, or an empty text."""
        return next((str(c.get("message", "")) for c in self.status(name).get("conditions", []) if c["type"] == kind), "")

    def object_names(self, *flags: str) -> set[str]:
        """Returns kind and name of every object in the namespace, except events. `flags` are those of kubectl get."""
        kinds = self.kubectl("api-resources", "--namespaced", "--verbs=list", "-o", "name").split()
        listed = ",".join(kind for kind in kinds if not kind.startswith("events"))
        return set(self.kubectl("get", listed, "-o", "name", *flags).split())

    def events(self, name: str = "chat") -> set[tuple[str, str]]:
        """Returns type and reason of the events of a service."""
        events = [event for event in self.get("events")["items"] if event["involvedObject"].get("name") == name]
        return {(e["type"], e["reason"]) for e in events if e["involvedObject"].get("kind") == "InferenceService"}

    def revisions(self, name: str = "chat") -> list[str]:
        """Returns the revision of each live group."""
        return sorted(group["metadata"]["labels"]["phalanx.dev/revision"] for group in self.sets(name).values())

    def sets(self, name: str = "chat") -> dict[str, dict[str, Any]]:
        """Returns the live groups by name."""
        items = self.get("statefulsets", "-l", f"phalanx.dev/service={name}")["items"]
        return {group["metadata"]["name"]: group for group in items if "deletionTimestamp" not in group["metadata"]}

    def by_group(self, service: str = "chat") -> dict[str, dict[str, dict[str, Any]]]:
        """Returns pods by name, by group."""
        pods: dict[str, dict[str, dict[str, Any]]] = {}
        for name, pod in self.pods(f"{GROUPS},phalanx.dev/service={service}").items():
            pods.setdefault(pod["metadata"]["labels"]["phalanx.dev/group"], {})[name] = pod
        return pods

    def fingerprints(self, group: str) -> dict[str, tuple[str, int]]:
        """Returns UID and restarts of each pod of a group."""
        pods = self.by_group().get(group, {})
        starts = {n: sum(c["restartCount"] for c in p["status"].get("containerStatuses", [])) for n, p in pods.items()}
        return {name: (pod["metadata"]["uid"], starts[name]) for name, pod in pods.items()}

    def incarnation(self, group: str) -> int:
        """Returns the incarnation that a group reports; 0 without an answer."""
        leader = self.pods().get(f"{group}-0", {}).get("status", {}).get("podIP")
        if not leader:
            return 0
        try:
            return int(httpx.get(f"http://{leader}:8000/v1/health", timeout=5).json()["incarnation"])
        except (httpx.HTTPError, KeyError, ValueError):
            return 0

    def ready_groups(self) -> list[str]:
        """Returns the groups with all pods ready."""
        return [name for name, pods in self.by_group().items() if pods and all(is_ready(pod) for pod in pods.values())]

    def held_devices(self) -> list[tuple[str, str, int]]:
        """Returns namespace, node and devices of each scheduled pod with devices."""
        held = []
        for pod in json.loads(self.cluster.kubectl("get", "pods", "-A", "-o", "json"))["items"]:
            node = pod["spec"].get("nodeName", "")
            if node and pod["status"].get("phase") not in ("Succeeded", "Failed"):
                limits = (container.get("resources", {}).get("limits", {}) for container in pod["spec"]["containers"])
                devices = sum(int(limit.get(GPU_RESOURCE, "0")) for limit in limits)
                held += [(pod["metadata"]["namespace"], node, devices)] if devices else []
        return held

    def free_devices(self) -> dict[str, int]:
        """Returns the unallocated devices of each node."""
        left = {}
        for node in json.loads(self.cluster.kubectl("get", "nodes", "-o", "json"))["items"]:
            left[node["metadata"]["name"]] = int(node["status"]["allocatable"].get(GPU_RESOURCE, "0"))
        for _, name, devices in self.held_devices():
            if name in left:  # pods of deleted nodes stay for a while
                left[name] -= devices
        return left

    def occupy_all_but(self, devices: int) -> None:
        """Occupies all devices except `devices`, after other scenarios have released theirs."""
        svc.wait_for(
            lambda: {namespace for namespace, _, _ in self.held_devices()} <= {self.namespace}, 180, "other scenarios have ended"
        )
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

    def release_devices(self) -> None:
        """Deletes the pods that occupy devices."""
        self.kubectl("delete", "pods", "-l", "app=holder", "--wait=false")

    def stop_operator(self) -> None:
        """Stops all operators. `start_operator` starts them again."""
        self.cluster.kubectl("scale", *OPERATOR, "--replicas=0")
        query = ("-n", installation.NAMESPACE, "get", "pods", "-l", "app.kubernetes.io/name=phalanx-operator", "-o", "name")
        svc.wait_for(lambda: not self.cluster.kubectl(*query).strip(), 90, "no operator runs")

    def start_operator(self) -> None:
        """Starts the operators."""
        self.cluster.kubectl("scale", *OPERATOR, "--replicas=2")
        self.cluster.kubectl("rollout", "status", *OPERATOR, "--timeout=120s")

    def restart_operator(self) -> None:
        """Kills all operators and waits for their successors."""
        delete = ("delete", "pod", "-l", "app.kubernetes.io/name=phalanx-operator", "--grace-period=0", "--force")
        self.cluster.kubectl("-n", installation.NAMESPACE, *delete)
        self.cluster.kubectl("rollout", "status", *OPERATOR, "--timeout=120s")

    def delete_service(self, name: str = "chat", limit_s: float = 240) -> None:
        """Deletes a service and waits until its pods are deleted."""
        self.kubectl("delete", "infsvc", name, "--ignore-not-found")
        svc.wait_for(lambda: not self.pods(f"phalanx.dev/service={name}"), limit_s, f"no pod of {name} remains")

    @contextmanager
    def traffic(self, workers: int = 2, tokens: int = 12) -> Iterator[Traffic]:
        """Sends requests during the block."""
        traffic = Traffic(self.url, "tiny", tokens)
        threads = [threading.Thread(target=traffic.run, args=(number,)) for number in range(workers)]
        for thread in threads:
            thread.start()
        try:
            svc.wait_for(lambda: traffic.answered > 0, 180, "the first answers")
            yield traffic
        finally:
            traffic.end()
            for thread in threads:
                thread.join()


def is_placed(pod: dict[str, Any]) -> bool:
    """Whether a pod has a node."""
    return bool(pod["spec"].get("nodeName"))


def has_ended(pod: dict[str, Any]) -> bool:
    """Whether a pod has terminated."""
    return pod["status"].get("phase") in ("Succeeded", "Failed")
