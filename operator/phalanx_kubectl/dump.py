"""Collects a bug report of a service: one archive of objects, events, logs, metrics, summaries and flight recorders."""

import io
import json
import tarfile
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from pathlib import Path

import msgspec

from phalanx_api import labels
from phalanx_kubectl.recordings import RecordedPod, fetch, recorded_pods
from phalanx_kubectl.redaction import redact_object, redact_text
from phalanx_kubectl.transport import Json, Kubectl, KubectlFailed, read_json

LOG_LINES = 20_000
"""Of each container."""
RECORDINGS = "recordings.jsonl"
_KINDS = ("deployments", "statefulsets", "pods", "services", "persistentvolumeclaims", "networkpolicies", "poddisruptionbudgets")
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

        files = list(self._files(service, note))
        about = {"service": service, "made": made_at, "missing": missing}
        files.append(DumpedFile("about.json", json.dumps(about, indent=2)))
        folder = f"{service}-dump"
        path.touch(_MODE)
        with tarfile.open(path, "w:gz") as archive:
            for file in files:
                content = file.text.encode()
                info = tarfile.TarInfo(f"{folder}/{file.name}")
                info.size, info.mode = len(content), _MODE
                archive.addfile(info, io.BytesIO(content))
        return len(files)

    def _files(self, service: str, note: Callable[[str], None]) -> Iterator[DumpedFile]:
        yield _object_file("service.json", read_json(self.kubectl, "get", self.kind, service))
        own = {service}
        for kind in _KINDS:
            found = self._objects(kind, f"{labels.SERVICE}={service}", note)
            own.update(item["metadata"]["name"] for item in found)
            yield _object_file(f"{kind}.json", found)
        yield from self._events(own, note)
        pods = recorded_pods(self.kubectl, service)
        for pod in pods:
            yield from self._logs(pod, note)
        for pod in (pod for pod in pods if pod.component == "router"):
            yield from self._router(pod, note)
        recordings = fetch(self.kubectl, pods, note)
        yield DumpedFile(RECORDINGS, "".join(msgspec.json.encode(recording).decode() + "\n" for recording in recordings))
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

    def _logs(self, pod: RecordedPod, note: Callable[[str], None]) -> Iterator[DumpedFile]:
        call = ("logs", pod.name, "-c", _CONTAINERS[pod.component], f"--tail={LOG_LINES}")
        try:
            yield DumpedFile(f"logs/{pod.name}.log", redact_text(self.kubectl.read(*call)))
        except KubectlFailed as error:
            note(f"logs of {pod.name}: {error}")
        try:
            yield DumpedFile(f"logs/{pod.name}.previous.log", redact_text(self.kubectl.read(*call, "--previous")))
        except KubectlFailed as error:
            if "previous terminated container" not in str(error):  # it has not restarted
                note(f"earlier logs of {pod.name}: {error}")

    def _router(self, pod: RecordedPod, note: Callable[[str], None]) -> Iterator[DumpedFile]:
        path = f"/api/v1/namespaces/{pod.namespace}/pods/http:{pod.name}:{labels.HTTP_PORT}/proxy/metrics"
        calls = {
            f"metrics/{pod.name}.txt": ("get", "--raw", path),
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


def _object_file(name: str, value: object) -> DumpedFile:
    return DumpedFile(name, json.dumps(redact_object(value), indent=2))
