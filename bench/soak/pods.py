"""Pods of a service and of the operator, and their processes on this machine."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.soak.processes import module_of, start_of, use_of
from bench.soak.record import Use
from phalanx_api import labels

_UID = re.compile(r"/pod([0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12})/")
OPERATOR_PORT = 8080
PAUSE = "pause"
"""The program of a pod that holds its namespaces."""


@dataclass(frozen=True, slots=True)
class Pod:
    """A pod that runs."""

    name: str
    uid: str
    role: str
    """router, leader, worker or operator."""
    address: str
    is_ready: bool

    @property
    def url(self) -> str:
        return f"http://{self.address}:{OPERATOR_PORT if self.role == 'operator' else labels.HTTP_PORT}"


def parse_pod(body: Mapping[str, Any]) -> Pod | None:
    """Returns a pod that has an address; `None` for others."""
    metadata, status = body["metadata"], body.get("status") or {}
    if not status.get("podIP") or status.get("phase") != "Running":
        return None
    is_ready = any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions") or ())
    return Pod(metadata["name"], metadata["uid"], _role(metadata.get("labels") or {}), status["podIP"], is_ready)


def _role(found: Mapping[str, str]) -> str:
    match found.get(labels.COMPONENT):
        case "group":
            return "leader" if found.get(labels.POD_INDEX) == "0" else "worker"
        case None:
            return "operator"
        case component:
            return component


def uid_of(cgroup: str) -> str | None:
    """Returns the UID of the pod of a process by its `/proc/<pid>/cgroup`; `None` outside of pods."""
    found = _UID.search(cgroup)
    return found[1] if found else None


def pids_by_pod(uids: Iterable[str]) -> dict[str, list[int]]:
    """Returns the processes of this machine in each of these pods, oldest first."""
    found: dict[str, list[int]] = {uid: [] for uid in uids}
    for path in Path("/proc").glob("[0-9]*/cgroup"):
        try:
            uid = uid_of(path.read_text())
        except OSError:
            continue
        if uid in found:
            found[uid].append(int(path.parent.name))
    return {uid: sorted(pids, key=lambda pid: (int(start_of(pid) or 0), pid)) for uid, pids in found.items()}


def uses_of(pods: Sequence[Pod]) -> dict[str, Use]:
    """Returns what each process of the pods uses, and an entry with the pod's name for its gauges."""
    by_pod, found = pids_by_pod(pod.uid for pod in pods), dict[str, Use]()
    for pod in pods:
        found[pod.name] = Use(pod.uid, {}, pod.role)
        count = Counter[str]()
        for pid in by_pod[pod.uid]:
            try:
                module = module_of(Path(f"/proc/{pid}/cmdline").read_bytes())
            except OSError:
                continue
            values = use_of(pid)
            if module in ("", PAUSE) or values is None:
                continue
            name = f"{module} {count[module]}"
            count[module] += 1
            found[f"{pod.name} {name}"] = Use(f"{pid}/{start_of(pid)}", dict(values), f"{pod.role} {name}")
    return found


def object_counts(bodies: Iterable[Mapping[str, Any]]) -> dict[str, float]:
    """Returns the number of objects, of all kinds and of each."""
    kinds = Counter(body["kind"] for body in bodies)
    return {"objects": float(kinds.total()), **{f"objects {kind}": float(count) for kind, count in sorted(kinds.items())}}
