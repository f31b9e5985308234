"""The cluster around the operator: controllers of nodes, StatefulSets and Deployments, the scheduler and the kubelets.

A node is up, cut off (its pods run, the control plane receives nothing) or dead. It counts as silent after `SILENT_S`, its pods
are evicted after `evict_s`. Its kubelet reports pods `report_s` after it returns. A pod becomes ready `start_s` after it has a
node, unless its group fails.
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from phalanx_api import labels
from phalanx_operator.kube.client import DEPLOYMENTS, NODES, PODS, STATEFUL_SETS, Json, Resource
from tests.control.fake_kube import ObjectKey
from tests.control.search.api_server import ApiServer, stamp

SILENT_S = 40.0
REPORT_S = 10.0
"""From the return of a node to the first report of its pods."""
LATE_REPORT_S = 130.0
"""The same, if kubelets are late."""
EVICT_S = 300.0
EXIT_S, SLOW_EXIT_S = 5.0, 400.0
"""Time that a pod takes to exit after SIGTERM, if its grace period allows; of one with streams."""
CRASH_BACKOFF_S = 20.0
SLOTS = 2
"""Pods of groups on a node."""
NodeState = Literal["up", "cut", "dead"]
Failure = Literal["", "never", "crash", "image"]


@dataclass(slots=True)
class Machine:
    """A node."""

    state: NodeState = "up"
    changed: float = 0.0
    reports_at: float = 0.0
    """When its kubelet reports pods again."""
    cordoned: bool = False
    is_stuck: bool = False
    """Its container runtime hangs: it ends no pod."""
    is_refusing: bool = False
    """Its kubelet evicts pods of groups in place of making them ready."""


@dataclass(slots=True)
class Process:
    """The containers of a pod on its node. `restarts` of the container."""

    ready_at: float
    restarts: int = 0
    exits_at: float | None = None
    reported: Json = field(default_factory=dict)


class Cluster:
    """All controllers, one step at a time. `start_s`: time from a node to readiness."""

    def __init__(self, api: ApiServer, nodes: int, start_s: float = 20.0) -> None:
        self.api = api
        self.start_s = start_s
        self.evict_s = EVICT_S
        self.report_s = REPORT_S
        self.exit_s = EXIT_S
        self.has_requests: Callable[[str], bool] = lambda uid: False
        """Whether a router, by the UID of its pod, has requests: it exits late."""
        self.machines: dict[str, Machine] = {}
        self.processes: dict[str, Process] = {}
        """By UID of the pod."""
        self.failing: dict[str, Failure] = {}
        """By name of the StatefulSet."""
        self.is_controller_late = False
        """The controller of StatefulSets does nothing."""
        self._added = 0
        self._owned_at = -1
        self._owned: dict[str, list[Json]] = {}
        for _ in range(nodes):
            self.add_node()

    @property
    def now(self) -> float:
        return self.api.clock()

    def add_node(self) -> str:
        """Adds an empty node that is ready."""
        name = f"node-{self._added}"
        self._added += 1
        self.machines[name] = Machine(changed=self.now)
        self._report_node(name, "True")
        return name

    def set_node(self, name: str, state: NodeState) -> None:
        """Cuts off, ends or returns a node."""
        machine = self.machines[name]
        if machine.state == state:
            return
        if state == "up":
            for pod in self._pods_on(name):
                if machine.state == "dead":  # its containers start again
                    self._process(pod).ready_at = self.now + self.start_s
            machine.reports_at = self.now + self.report_s
            self._report_node(name, "True")
        machine.changed = self.now if machine.state == "up" or state == "up" else machine.changed
        machine.state = state

    def cordon(self, name: str, *, is_cordoned: bool) -> None:
        """Sets `unschedulable`."""
        self.machines[name].cordoned = is_cordoned
        self.api.edit(NODES, "", name, spec={"unschedulable": is_cordoned or None})

    def delete_node(self, name: str) -> None:
        """Removes a node from the API; the pod garbage collector removes its pods."""
        del self.machines[name]
        self.api.remove(("nodes", "", name))

    def is_serving(self, group: str) -> bool:
        """Returns whether all pods of a group run and are ready in truth, whatever the control plane reports."""
        body = self.api.of_kind(STATEFUL_SETS).get(group)
        if body is None:
            return False
        pods = self._pods_of(body["metadata"]["uid"])
        return len(pods) == body["spec"]["replicas"] and all(self._runs(pod) for pod in pods)

    def step(self) -> None:
        """Lets every controller act once."""
        self.api.collect()
        self._watch_nodes()
        if not self.is_controller_late:
            for body in list(self.api.of_kind(STATEFUL_SETS).values()):
                self._keep_pods(body)
        for body in list(self.api.of_kind(DEPLOYMENTS).values()):
            self._keep_routers(body)
        self._schedule()
        for pod in list(self.api.of_kind(PODS).values()):
            self._run_pod(pod)
        self.api.collect()
        self._report_deployments()

    def next_change(self) -> float | None:
        """Returns when the next controller acts by itself."""
        times = [
            machine.changed + wait
            for machine in self.machines.values()
            if machine.state != "up"
            for wait in (SILENT_S, self.evict_s)
        ]
        times += [machine.reports_at for machine in self.machines.values()]
        times += [time for p in self.processes.values() for time in (p.ready_at, p.exits_at) if time is not None]
        return min((time for time in times if time > self.now), default=None)

    def _pods_of(self, owner: str) -> list[Json]:
        """Returns the pods of an object by its UID, from an index of the present objects."""
        if self._owned_at != self.api.version:
            self._owned_at, self._owned = self.api.version, {}
            for pod in self.api.of_kind(PODS).values():
                self._owned.setdefault(_owner(pod), []).append(pod)
        return self._owned.get(owner, [])

    # Nodes.

    def _report_node(self, name: str, verdict: str) -> None:
        condition = {"type": "Ready", "status": verdict, "lastTransitionTime": stamp(self.now)}
        spec = {"unschedulable": True} if self.machines[name].cordoned else {}
        self.api.store(NODES, {"metadata": {"name": name, "namespace": ""}, "spec": spec, "status": {"conditions": [condition]}})

    def _watch_nodes(self) -> None:
        """The node controller."""
        for name, machine in self.machines.items():
            silent_s = self.now - machine.changed if machine.state != "up" else 0.0
            status = self.api.objects["nodes", "", name]["status"]["conditions"][0]["status"]
            if silent_s >= SILENT_S and status == "True":
                self._report_node(name, "Unknown")
                for pod in self._pods_on(name):
                    self._report(pod, {"conditions": _marked_unready(pod, stamp(self.now))})
            if silent_s >= self.evict_s:
                for pod in self._pods_on(name):
                    if "deletionTimestamp" not in pod["metadata"]:
                        self.api.terminate(_key(pod))
        for pod in list(self.api.of_kind(PODS).values()):
            if (node := pod["spec"].get("nodeName")) and node not in self.machines:
                self.api.remove(_key(pod))

    def _pods_on(self, node: str) -> list[Json]:
        return [pod for pod in list(self.api.of_kind(PODS).values()) if pod["spec"].get("nodeName") == node]

    # Pods.

    def _keep_pods(self, body: Json) -> None:
        """The StatefulSet controller. A pod keeps its name, so a successor waits for the end of its predecessor."""
        metadata = body["metadata"]
        if "deletionTimestamp" in metadata:
            return
        for index in range(body["spec"]["replicas"]):
            key = ("pods", metadata["namespace"], f"{metadata['name']}-{index}")
            pod = self.api.objects.get(key)
            if pod and pod["status"].get("phase") == "Failed" and "deletionTimestamp" not in pod["metadata"]:
                self.processes.pop(pod["metadata"]["uid"], None)
                self.api.remove(key)
            if key not in self.api.objects:
                template = body["spec"]["template"]
                pod_labels = template["metadata"]["labels"] | {labels.POD_INDEX: str(index)}
                grace_s = template["spec"]["terminationGracePeriodSeconds"]
                self._create_pod(key, metadata["uid"], pod_labels, grace_s)

    def _keep_routers(self, body: Json) -> None:
        """The Deployment controller."""
        metadata = body["metadata"]
        pods = self._pods_of(metadata["uid"])
        live = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
        for pod in live[body["spec"]["replicas"] :]:
            self.api.terminate(_key(pod))
        for _ in range(body["spec"]["replicas"] - len(live)):
            self._added += 1
            key = ("pods", metadata["namespace"], f"{metadata['name']}-{self._added}")
            template = body["spec"]["template"]
            grace_s = template["spec"]["terminationGracePeriodSeconds"]
            self._create_pod(key, metadata["uid"], template["metadata"]["labels"], grace_s)

    def _create_pod(self, key: ObjectKey, owner: str, pod_labels: Json, grace_s: int) -> None:
        metadata = {
            "name": key[2],
            "namespace": key[1],
            "labels": pod_labels,
            "ownerReferences": [{"uid": owner, "controller": True}],
        }
        self.api.store(PODS, {"metadata": metadata, "spec": {"terminationGracePeriodSeconds": grace_s}, "status": {}})

    def _schedule(self) -> None:
        used = {name: 0 for name in self.machines}
        waiting = []
        for pod in self.api.of_kind(PODS).values():
            node = pod["spec"].get("nodeName")
            if node is None:
                waiting.append(pod)
            elif node in used and _is_group(pod):
                used[node] += 1
        for pod in sorted(waiting, key=lambda pod: pod["metadata"]["name"]):
            usable = [name for name, machine in self.machines.items() if machine.state == "up" and not machine.cordoned]
            free = [name for name in usable if not _is_group(pod) or used[name] < SLOTS]
            if not free:
                condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no free node"}
                self._write_status(PODS, pod, {"conditions": [condition]})
                continue
            node = min(free, key=lambda name: used[name])
            used[node] += _is_group(pod)
            status = {"conditions": _conditions("False", stamp(self.now))["conditions"]}
            self.api.store(PODS, pod | {"spec": pod["spec"] | {"nodeName": node}, "status": status})

    def _run_pod(self, pod: Json) -> None:
        """The kubelet."""
        machine = self.machines.get(pod["spec"].get("nodeName", ""))
        if machine is None or machine.state != "up" or self.now < machine.reports_at:
            return
        process, metadata = self._process(pod), pod["metadata"]
        if "deletionTimestamp" in metadata:
            exit_s = self.exit_s if _is_group(pod) else SLOW_EXIT_S if self.has_requests(metadata["uid"]) else EXIT_S
            exits_at = self.now + min(exit_s, metadata["deletionGracePeriodSeconds"])
            process.exits_at = exits_at if process.exits_at is None else process.exits_at
            if self.now >= process.exits_at and not machine.is_stuck:
                self.api.remove(_key(pod))
                self.processes.pop(metadata["uid"], None)
            return
        if machine.is_refusing and _is_group(pod) and self.now >= process.ready_at and not _is_ready(pod):
            failed = {"phase": "Failed", "reason": "Evicted", "message": "The node had condition: [MemoryPressure]."}
            self._write_status(PODS, pod, pod["status"] | failed)
            return
        failure = self.failing.get(metadata["labels"].get(labels.GROUP, ""), "")
        if failure and self.now >= process.ready_at:
            if failure == "crash":
                process.restarts += 1
                process.ready_at = self.now + CRASH_BACKOFF_S
            else:
                process.ready_at = self.now + 1.0
        self._report(pod, self._status(process, failure, is_whole=self._is_whole(pod)))

    def _is_whole(self, pod: Json) -> bool:
        """Returns whether the other pods of its group run: all are ready or none is."""
        return not _is_group(pod) or self.is_serving(pod["metadata"]["labels"].get(labels.GROUP, ""))

    def _status(self, process: Process, failure: Failure, *, is_whole: bool) -> Json:
        is_ready = not failure and self.now >= process.ready_at and is_whole
        status = _conditions(str(is_ready), stamp(self.now))
        container: Json = {"restartCount": process.restarts, "state": {}}
        if process.restarts:
            container["lastState"] = {"terminated": {"exitCode": 1, "reason": "Error"}}
        if failure == "image":
            container["state"] = {"waiting": {"reason": "ImagePullBackOff", "message": "no image"}}
        elif failure == "crash":
            container["state"] = {"waiting": {"reason": "CrashLoopBackOff", "message": "it exits"}}
        return status | {"containerStatuses": [container]}

    def _report(self, pod: Json, status: Json) -> None:
        """Writes a status; an unchanged condition keeps its time."""
        former = pod["status"].get("conditions") or [{}]
        new = status["conditions"][0]
        if former[0].get("type") == "Ready" and former[0].get("status") == new["status"]:
            new["lastTransitionTime"] = former[0].get("lastTransitionTime", new["lastTransitionTime"])
        ip = {"podIP": pod["status"].get("podIP") or f"10.0.0.{len(self.processes)}"}
        self._write_status(PODS, pod, pod["status"] | status | ip)

    def _write_status(self, resource: Resource, body: Json, status: Json) -> None:
        """Most reports repeat the former one: the object is not built again for them."""
        if body.get("status") != status:
            self.api.store(resource, body | {"status": status})

    def _process(self, pod: Json) -> Process:
        uid = pod["metadata"]["uid"]
        if uid not in self.processes:
            self.processes[uid] = Process(self.now + (self.start_s if _is_group(pod) else 2.0))
        return self.processes[uid]

    def _runs(self, pod: Json) -> bool:
        process = self.processes.get(pod["metadata"]["uid"])
        return process is not None and process.exits_at is None and self._lives(pod)

    def _lives(self, pod: Json) -> bool:
        process, metadata = self.processes.get(pod["metadata"]["uid"]), pod["metadata"]
        machine = self.machines.get(pod["spec"].get("nodeName", ""))
        if process is None or machine is None or machine.state == "dead":
            return False
        is_failing = bool(self.failing.get(metadata["labels"].get(labels.GROUP, "")))
        return not is_failing and self.now >= process.ready_at

    def is_running(self, pod: Json, *, may_leave: bool = False) -> bool:
        """Returns whether a pod runs and is ready in truth. may_leave: also after SIGTERM."""
        return self._lives(pod) if may_leave else self._runs(pod)

    def _report_deployments(self) -> None:
        for body in list(self.api.of_kind(DEPLOYMENTS).values()):
            pods = self._pods_of(body["metadata"]["uid"])
            live = [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]
            ready = sum((pod["status"].get("conditions") or [{}])[0].get("status") == "True" for pod in live)
            counts = {"updatedReplicas": len(live), "readyReplicas": ready, "replicas": len(live)}
            self._write_status(DEPLOYMENTS, body, counts | {"observedGeneration": body["metadata"]["generation"]})


def _conditions(verdict: str, since: str) -> Json:
    """Returns what a kubelet reports."""
    ready = {"type": "Ready", "status": verdict, "lastTransitionTime": since}
    why = {} if verdict == "True" else {"reason": "ContainersNotReady"}
    return {"conditions": [ready | why, {"type": "ContainersReady", "status": verdict} | why]}


def _marked_unready(pod: Json, since: str) -> list[Json]:
    """Returns the conditions of a pod whose node fell silent: the node controller changes only the status of `Ready`."""
    ready, *others = pod["status"].get("conditions") or [{"type": "Ready", "status": "False"}]
    return [ready | {"status": "False", "lastTransitionTime": since}, *others]


def _owner(pod: Json) -> str:
    return next((str(owner["uid"]) for owner in pod["metadata"].get("ownerReferences") or []), "")


def _is_ready(pod: Json) -> bool:
    return bool((pod["status"].get("conditions") or [{}])[0].get("status") == "True")


def _is_group(pod: Json) -> bool:
    return bool(pod["metadata"]["labels"].get(labels.COMPONENT) == "group")


def _key(pod: Json) -> ObjectKey:
    return "pods", pod["metadata"]["namespace"], pod["metadata"]["name"]
