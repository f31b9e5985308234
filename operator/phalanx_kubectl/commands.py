"""Commands of the plugin. Each returns the text to print, `logs` an exit status."""

import datetime
import json
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec

from phalanx_api import labels
from phalanx_api.explain.explain import explain
from phalanx_api.schema import parse_record
from phalanx_api.spec import inference_service as api
from phalanx_api.status import ScaleChange, Status
from phalanx_api.summary import RouterSummary, StartedMoves
from phalanx_kubectl import show
from phalanx_kubectl.dump import Dump
from phalanx_kubectl.following import StreamFollower
from phalanx_kubectl.frame import Reading
from phalanx_kubectl.gauges import RouterLoad, merge, read_router
from phalanx_kubectl.perfetto import trace
from phalanx_kubectl.recordings import fetch, recorded_pods
from phalanx_kubectl.replaying import Window, read_file, simulate
from phalanx_kubectl.story import story, within
from phalanx_kubectl.transport import Json, Kubectl, KubectlFailed, metrics_path, read_json

KIND = f"{api.PLURAL}.{api.GROUP}"
_CONTAINER = "runtime"
_ROUTER = "router"


def rfc3339_now() -> str:
    """Returns the time in RFC 3339."""
    return datetime.datetime.now(datetime.UTC).strftime("%Y-%m-%dT%H:%M:%SZ")


@dataclass(frozen=True, slots=True)
class Commands:
    """The commands. Each raises KubectlFailed."""

    kubectl: Kubectl
    warn: Callable[[str], None]
    """Receives errors that end no command."""
    now: Callable[[], str] = field(default=rfc3339_now)

    def status(self, name: str | None, *, everywhere: bool = False) -> str:
        """Returns the status of one service or all."""
        if name is not None:
            return show.status(self._service(name), self._operator())
        scope = ["--all-namespaces"] if everywhere else []
        return show.services(read_json(self.kubectl, "get", KIND, *scope)["items"], with_namespace=everywhere)

    def groups(self, name: str) -> str:
        """Returns the groups of a service."""
        body = self._service(name)
        return show.groups(body, merge(self._routers(body).values()))

    def top(self, name: str) -> str:
        """Returns the current load of groups and routers. Raises KubectlFailed if no router answers."""
        body = self._service(name)
        routers = self._routers(body)
        if not routers:
            raise KubectlFailed(f"no router of {name} answers")
        return show.top(body, routers, merge(routers.values()))

    def cache(self, name: str) -> str:
        """Returns the prefix caches of the groups that routers report, and what the operator recommends."""
        body = self._service(name)
        return show.cache(body, merge(self._routers(body).values()))

    def explain(self, name: str, *, as_json: bool = False) -> str:
        """Returns what limits a service now. Raises KubectlFailed if no router answers."""
        body = self._service(name)
        service = api.parse(body)
        if isinstance(service, list):
            raise KubectlFailed(f"{service[0].field}: {service[0].message}")
        explanation = explain(self._summaries(name), service.spec, parse_record(Status, body.get("status") or {}))
        return msgspec.json.encode(explanation).decode() + "\n" if as_json else show.explanation(explanation)

    def profile(self, name: str, seconds: float, path: Path) -> str:
        """Writes the trace of the last seconds of all pods to `path`. Raises KubectlFailed if no pod has a recording."""
        history = _scaling(self._service(name))
        recordings = fetch(self.kubectl, recorded_pods(self.kubectl, name), self.warn, seconds)
        num_entries = sum(len(recording.entries) for recording in recordings)
        if not num_entries:
            raise KubectlFailed(f"no pod of {name} has recorded anything in the last {seconds:g} s")
        _write(path, json.dumps(trace(recordings, history)))
        num_pods = len({recording.pod for recording in recordings})
        return f"{path}: the last {seconds:g} s of {num_pods} pods, {num_entries} entries; open it with Perfetto\n"

    def replay(self, name: str, window: Window, file: Path | None, plot: Path | None) -> str:
        """Returns what happened in a time, and what other policies would have done. `file`: read instead of the cluster."""
        history: tuple[ScaleChange, ...] = ()
        if file is not None:
            recordings = read_file(file)
        else:
            history = _scaling(self._service(name))
            recordings = fetch(self.kubectl, recorded_pods(self.kubectl, name), self.warn)
        if plot is not None:
            _write(plot, "")
        recordings = within(recordings, window.start_s, window.end_s)
        text = story(recordings, history) + "\n" + simulate(recordings, plot)
        if plot is not None and not plot.stat().st_size:
            plot.unlink()
        return text

    def dump(self, name: str, path: Path) -> str:
        """Writes a bug report to `path`, without secrets, prompts and answers."""
        try:
            num_files = Dump(self.kubectl, self.warn, KIND).write(name, path, self.now())
        except OSError as error:
            raise KubectlFailed(f"{path} cannot be written: {error.strerror}") from error
        return f"{path}: {num_files} files; look into it before you share it\n"

    def reading(self, name: str) -> Reading:
        """Returns the service and the routers that answer, for `watch`. Routers that do not are warnings of it."""
        warnings: list[str] = []
        reader = replace(self, warn=warnings.append)
        body = reader._service(name)
        return Reading(service=body, routers=reader._routers(body), warnings=warnings, at_s=time.monotonic())

    def stream_follower(self, every_s: float) -> StreamFollower:
        """Returns what follows the streams of routers, for `watch`."""
        return StreamFollower(self.kubectl, _ROUTER, every_s)

    def pause_rollout(self, name: str, *, is_paused: bool) -> str:
        """Pauses or resumes the rollout of a service."""
        patch = {"spec": {"rollout": {"paused": is_paused}}}
        self.kubectl.read(*("patch", KIND, name, "--type=merge", "-p", json.dumps(patch)))
        return f"the rollout of {name} is paused\n" if is_paused else f"the rollout of {name} is resumed\n"

    def _summaries(self, name: str) -> list[RouterSummary]:
        """Returns the summaries of the routers that answer. Raises KubectlFailed if none does."""
        summaries = []
        for pod in (pod["metadata"]["name"] for pod in self._router_pods(name) if _is_running(pod)):
            try:
                text = self.kubectl.read(*("exec", pod, "-c", _ROUTER, "--", "phalanx-router", "summary"))
                summaries.append(msgspec.json.decode(text, type=RouterSummary))
            except (KubectlFailed, msgspec.DecodeError) as error:
                self.warn(f"router {pod}: {error}")
        if not summaries:
            raise KubectlFailed(f"no router of {name} answers")
        return summaries

    def drain(self, name: str, group: str) -> str:
        """Drains a group, which the operator replaces. Raises KubectlFailed if it drains already or is no group of `name`."""
        metadata = read_json(self.kubectl, "get", "statefulset", group)["metadata"]
        if (metadata.get("labels") or {}).get(labels.SERVICE) != name:
            raise KubectlFailed(f"{group} is not a group of {name}")
        if labels.DRAINING in (metadata.get("annotations") or {}):
            raise KubectlFailed(f"{group} is draining already: {metadata['annotations'][labels.DRAINING]}")
        note = f"{self.now()} asked requested with kubectl phalanx drain"
        patch = {"metadata": {"uid": metadata["uid"], "annotations": {labels.DRAINING: note}}}
        self.kubectl.read(*("patch", "statefulset", group, "--type=merge", "-p", json.dumps(patch)))
        return f"{group} is draining; it is deleted when its streams have moved or ended, and a new group replaces it\n"

    def move(self, name: str, group: str, target: str = "", count: int = 1) -> str:
        """Moves up to `count` streams of a group, router by router. Warns why others stay; raises KubectlFailed if all do."""
        pods = [pod["metadata"]["name"] for pod in self._router_pods(name) if _is_running(pod)]
        if not pods:
            raise KubectlFailed(f"{name} has no running router")
        targets, reasons = Counter[str](), list[str]()
        for pod in pods:
            wanted = count - targets.total()
            if not wanted:
                break
            flags = [f"--count={wanted}", *([f"--to={target}"] if target else [])]
            try:
                text = self.kubectl.read(*("exec", pod, "-c", _ROUTER, "--", "phalanx-router", "move", group, *flags))
                started = msgspec.json.decode(text, type=StartedMoves)
            except (KubectlFailed, msgspec.MsgspecError) as error:
                reasons.append(f"router {pod}: {error}")
                continue
            targets.update(started.targets)
            reasons += [f"router {pod}: {obstacle}" for obstacle in started.obstacles]
        if not targets:
            raise KubectlFailed("; ".join(reasons) or f"{group} has no stream")
        for reason in reasons:
            self.warn(reason)
        return (
            f"moving {targets.total()} of {count}: {', '.join(f'{number} to {to}' for to, number in sorted(targets.items()))}\n"
        )

    def restart(self, name: str) -> str:
        """Replaces all groups one by one; once the rollout resumes if it is paused."""
        patch = {"spec": {"rollout": {"restartId": self.now()}}}
        body = read_json(self.kubectl, *("patch", KIND, name, "--type=merge", "-p", json.dumps(patch)))
        if body["spec"]["rollout"].get("paused"):
            return f"{name} restarts when its rollout resumes: spec.rollout.paused is true\n"
        return f"{name} restarts group by group; kubectl phalanx groups {name} shows the progress\n"

    def rotate_token(self, name: str) -> str:
        """Replaces the token that the service's programs prove to one another."""
        patch = {"spec": {"security": {"tokenRotationId": self.now()}}}
        self.kubectl.read(*("patch", KIND, name, "--type=merge", "-p", json.dumps(patch)))
        return f"the operator replaces the token of {name} in the next half hour; its audit lines show each step\n"

    def purge_cache(self, name: str) -> str:
        """Drops the stored responses of all routers, also of those that are not ready. Raises KubectlFailed unless all answer."""
        pods = [pod["metadata"]["name"] for pod in self._router_pods(name) if _is_running(pod)]
        if not pods:
            raise KubectlFailed(f"{name} has no running router")
        purged: list[int] = []
        for pod in pods:
            try:
                purged.append(int(self.kubectl.read(*("exec", pod, "-c", _ROUTER, "--", "phalanx-router", "purge-cache"))))
            except (KubectlFailed, ValueError) as error:
                self.warn(f"router {pod}: {error}")
        if len(purged) < len(pods):
            raise KubectlFailed(f"purged {len(purged)} of {len(pods)} routers: repeat the command")
        return f"purged {sum(purged)} responses of {len(purged)} routers\n"

    def logs(self, name: str, group: str | None, *, follow: bool = False, previous: bool = False, tail: int = -1) -> int:
        """Prints the logs of all pods. Returns kubectl's exit status. Raises KubectlFailed without pods."""
        wanted_labels = {labels.SERVICE: name, labels.COMPONENT: "group"} | ({labels.GROUP: group} if group else {})
        selector = ",".join(f"{key}={value}" for key, value in wanted_labels.items())
        pods = read_json(self.kubectl, "get", "pods", "-l", selector)["items"]
        if not pods:
            raise KubectlFailed(f"{group or name} has no pods")
        flags = ["--follow"] * follow + ["--previous"] * previous
        limit = f"--max-log-requests={len(pods)}"
        return self.kubectl.run_attached("logs", *("-l", selector, "-c", _CONTAINER, "--prefix", f"--tail={tail}", limit), *flags)

    def _operator(self) -> str:
        try:
            lease = read_json(*(self.kubectl, "get", "lease", labels.LEASE, "--namespace", labels.OPERATOR_NAMESPACE))
        except KubectlFailed as error:
            return f"unknown: {str(error).splitlines()[0]}"
        return show.leader(lease, self.now())

    def _service(self, name: str) -> Json:
        return read_json(self.kubectl, "get", KIND, name)

    def _routers(self, body: Json) -> dict[str, RouterLoad]:
        """Returns the load of reachable routers by pod."""
        loads = {}
        try:
            pods = [pod["metadata"] for pod in self._router_pods(body["metadata"]["name"]) if _is_ready(pod)]
        except KubectlFailed as error:
            self.warn(str(error))
            return {}
        for metadata in pods:
            try:
                loads[metadata["name"]] = read_router(self.kubectl.read("get", "--raw", metrics_path(metadata)))
            except KubectlFailed as error:
                self.warn(f"router {metadata['name']}: {error}")
        return loads

    def _router_pods(self, name: str) -> list[Json]:
        """Returns the router pods. Raises KubectlFailed."""
        pods: list[Json] = read_json(self.kubectl, "get", "pods", "-l", f"{labels.SERVICE}={name},{labels.COMPONENT}=router")[
            "items"
        ]
        return pods


def _scaling(body: Json) -> tuple[ScaleChange, ...]:
    """The last changes of the number of groups."""
    autoscaling = parse_record(Status, body.get("status") or {}).autoscaling
    return () if autoscaling is None else autoscaling.history


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text)
    except OSError as error:
        raise KubectlFailed(f"{path} cannot be written: {error.strerror}") from error


def _is_ready(pod: Json) -> bool:
    conditions = (pod.get("status") or {}).get("conditions") or []
    return any(c.get("type") == "Ready" and c.get("status") == "True" for c in conditions)


def _is_running(pod: Json) -> bool:
    return (pod.get("status") or {}).get("phase") == "Running"
