"""Fetches the flight recorders of a service's pods."""

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import msgspec

from phalanx_api import labels
from phalanx_api.flight.entries import Recording
from phalanx_kubectl.transport import Kubectl, KubectlFailed, metrics_path, read_json

MAX_CALLS = 8
_PROGRAMS = {"router": ("router", "phalanx-router"), "group": ("runtime", "phalanx-runtime")}
"""Container and program of each component."""


@dataclass(frozen=True, slots=True)
class ServicePod:
    """A pod of a service. It has a recorder while it runs."""

    name: str
    component: str
    """`router` or `group`."""
    metrics_path: str
    """Of a router, at the API server."""
    phase: str = "Running"
    init_containers: tuple[str, ...] = ()


def service_pods(kubectl: Kubectl, service: str) -> list[ServicePod]:
    """Returns the routers and group pods of a service. Raises KubectlFailed."""
    pods = []
    for component in _PROGRAMS:
        selector = f"{labels.SERVICE}={service},{labels.COMPONENT}={component}"
        for pod in read_json(kubectl, "get", "pods", "-l", selector)["items"]:
            metadata, phase = pod["metadata"], (pod.get("status") or {}).get("phase") or ""
            first = tuple(each["name"] for each in (pod.get("spec") or {}).get("initContainers") or ())
            pods.append(ServicePod(metadata["name"], component, metrics_path(metadata), phase, first))
    return pods


def recorded_pods(kubectl: Kubectl, service: str) -> list[ServicePod]:
    """Returns the running ones of `service_pods`. Raises KubectlFailed."""
    return [pod for pod in service_pods(kubectl, service) if pod.phase == "Running"]


def fetch(
    kubectl: Kubectl, pods: Sequence[ServicePod], warn: Callable[[str], None], seconds: float | None = None
) -> list[Recording]:
    """Returns the recordings of the last `seconds`, several pods at a time. `warn` receives the pods that do not answer."""

    def fetch_one(pod: ServicePod) -> list[Recording] | KubectlFailed:
        try:
            return _fetch(kubectl, pod, seconds)
        except KubectlFailed as error:
            return error

    recordings: list[Recording] = []
    with ThreadPoolExecutor(MAX_CALLS) as calls:
        for pod, answer in zip(pods, calls.map(fetch_one, pods), strict=True):
            if isinstance(answer, KubectlFailed):
                warn(f"{pod.component} {pod.name}: {answer}")
                continue
            recordings += answer
            for unknown in (recording.unknown for recording in answer if recording.unknown):
                warn(f"{pod.component} {pod.name}: {unknown} records of another version are left out")
    return recordings


def _fetch(kubectl: Kubectl, pod: ServicePod, seconds: float | None) -> list[Recording]:
    container, program = _PROGRAMS[pod.component]
    limit = [] if seconds is None else ["--seconds", f"{seconds:g}"]
    text = kubectl.read(*("exec", pod.name, "-c", container, "--", program, "recording"), *limit)
    try:
        found = [msgspec.json.decode(line, type=Recording) for line in text.splitlines() if line.strip()]
        return [msgspec.structs.replace(recording, pod=pod.name) for recording in found]
    except msgspec.MsgspecError as error:
        raise KubectlFailed(f"its recording is unreadable: {error}") from error
