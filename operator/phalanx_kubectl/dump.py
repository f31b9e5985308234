"""Collects a bug report of a service: one archive of objects, events, logs, metrics, summaries and flight recorders.

Files are written as they are read, so that memory does not grow with the number of pods.
"""

import io
import json
import tarfile
import tempfile
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import IO

import msgspec

from phalanx_api import labels
from phalanx_kubectl.recordings import MAX_CALLS, ServicePod, fetch, service_pods
from phalanx_kubectl.redaction import redact_object, redact_text
from phalanx_kubectl.transport import Json, Kubectl, KubectlFailed, read_json

LOG_LINES = 20_000
"""Of each container."""
RECORDINGS = "recordings.jsonl"
_WORKLOADS = ("deployments", "replicasets", "statefulsets", "pods")
"""Events of refused pods of routers are those of their ReplicaSet."""
_KINDS = (*_WORKLOADS, "services", "persistentvolumeclaims", "networkpolicies", "poddisruptionbudgets")
_CONTAINERS = {"router": "router", "group": "runtime"}
_MODE = 0o600


@dataclass(frozen=True, slots=True)
class DumpedFile:
    """A file of the archive."""

    name: str
    text: str


@dataclass(frozen=True, slots=True)
class Dump:
    """Reads what a report needs. `warn` receives what could not be read, which the report names too."""

    kubectl: Kubectl
    warn: Callable[[str], None]
    kind: str
    """Resource of InferenceServices."""

    def write(self, service: str, path: Path, made_at: str) -> int:
        """Writes the archive and returns the number of its files. Raises KubectlFailed if the service cannot be read."""
        missing: list[str] = []

        def note(why: str) -> None:
            missing.append(redact_text(why))
            self.warn(why)

        described = _object_file("service.json", read_json(self.kubectl, "get", self.kind, service))
        pods, added = service_pods(self.kubectl, service), list[str]()
        with (
            _replacement(path) as unfinished,
            tarfile.open(unfinished, "w:gz") as archive,
            tempfile.TemporaryFile() as recordings,
        ):

            def add(name: str, content: IO[bytes]) -> None:
                added.append(name)
                info = tarfile.TarInfo(f"{service}-dump/{name}")
                info.size, info.mode = content.seek(0, io.SEEK_END), _MODE
                content.seek(0)
                archive.addfile(info, content)

            for file in chain([described], self._files(service, pods, note)):
                add(file.name, io.BytesIO(file.text.encode()))
            self._write_recordings([pod for pod in pods if pod.phase == "Running"], note, recordings)
            add(RECORDINGS, recordings)
            about = {"service": service, "made": made_at, "missing": missing}
            add("about.json", io.BytesIO(json.dumps(about, indent=2).encode()))
        return len(added)

    def _write_recordings(self, pods: Sequence[ServicePod], note: Callable[[str], None], target: IO[bytes]) -> None:
        """Writes recordings as lines; those of a few pods at a time are in memory."""
        for first in range(0, len(pods), MAX_CALLS):
            for recording in fetch(self.kubectl, pods[first : first + MAX_CALLS], note):
                target.write(msgspec.json.encode(recording) + b"\n")

    def _files(self, service: str, pods: Sequence[ServicePod], note: Callable[[str], None]) -> Iterator[DumpedFile]:
        own = {service}
        for kind in _KINDS:
            found = self._objects(kind, f"{labels.SERVICE}={service}", note)
            own.update(item["metadata"]["name"] for item in found)
            yield _object_file(f"{kind}.json", found)
        yield from self._events(own, note)
        for pod in pods:
            yield from self._logs(pod, note)
        for pod in (pod for pod in pods if pod.component == "router" and pod.phase == "Running"):
            yield from self._router(pod, note)
        yield from self._operator_logs(note)

    def _objects(self, kind: str, selector: str, note: Callable[[str], None]) -> list[Json]:
        try:
            found: list[Json] = read_json(self.kubectl, "get", kind, "-l", selector)["items"]
            return found
        except KubectlFailed as error:
            note(f"{kind}: {error}")
            return []

    def _events(self, own: Collection[str], note: Callable[[str], None]) -> Iterator[DumpedFile]:
        """Events of objects with these names."""
        try:
            events = read_json(self.kubectl, "get", "events")["items"]
        except KubectlFailed as error:
            note(f"events: {error}")
            return
        shown = [event for event in events if (event.get("involvedObject") or {}).get("name") in own]
        yield _object_file("events.json", shown)

    def _logs(self, pod: ServicePod, note: Callable[[str], None]) -> Iterator[DumpedFile]:
        """Logs of a pod that has started, and of its init containers otherwise."""
        if pod.phase == "Pending":
            for container in pod.init_containers:
                yield from self._log(f"{pod.name}.{container}", (pod.name, "-c", container), note)
            return
        own = (pod.name, "-c", _CONTAINERS[pod.component])
        yield from self._log(pod.name, own, note)
        yield from self._log(f"{pod.name}.previous", (*own, "--previous"), note)

    def _log(self, name: str, words: Sequence[str], note: Callable[[str], None]) -> Iterator[DumpedFile]:
        try:
            yield DumpedFile(f"logs/{name}.log", redact_text(self.kubectl.read("logs", *words, f"--tail={LOG_LINES}")))
        except KubectlFailed as error:
            if "previous terminated container" not in str(error):  # it has not restarted
                note(f"logs of {name}: {error}")

    def _router(self, pod: ServicePod, note: Callable[[str], None]) -> Iterator[DumpedFile]:
        calls = {
            f"metrics/{pod.name}.txt": ("get", "--raw", pod.metrics_path),
            f"summaries/{pod.name}.json": ("exec", pod.name, "-c", "router", "--", "phalanx-router", "summary"),
        }
        for name, call in calls.items():
            try:
                yield DumpedFile(name, redact_text(self.kubectl.read(*call)))
            except KubectlFailed as error:
                note(f"{name}: {error}")

    def _operator_logs(self, note: Callable[[str], None]) -> Iterator[DumpedFile]:
        selector = f"app.kubernetes.io/name={labels.LEASE}"
        call = ("logs", "-l", selector, "--namespace", labels.OPERATOR_NAMESPACE, f"--tail={LOG_LINES}", "--prefix")
        try:
            yield DumpedFile("logs/operator.log", redact_text(self.kubectl.read(*call)))
        except KubectlFailed as error:
            note(f"logs of the operator: {error}")


@contextmanager
def _replacement(path: Path) -> Iterator[Path]:
    """Yields a file that becomes `path` when it is complete, and is removed otherwise."""
    unfinished = path.with_name(f"{path.name}.part")
    unfinished.touch(_MODE)
    try:
        yield unfinished
        unfinished.replace(path)
    finally:
        unfinished.unlink(missing_ok=True)


def _object_file(name: str, value: object) -> DumpedFile:
    return DumpedFile(name, json.dumps(redact_object(value), indent=2))
